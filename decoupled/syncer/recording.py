"""The tape of a syncer that serves: written on a thread of its own.

A merge hands its job over and goes on. What is handed over and not written yet
is bounded: where the disk cannot keep up, the recording ends and says so,
before it costs the run its memory or its pace. A snapshot waits, before it is
committed, for the rounds in it to be on the tape.
"""

import collections
import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decoupled.algorithm import outer as outer_lib
from decoupled.checkpoint.commit import Restored
from decoupled.checkpoint.syncer_store import GlobalSnapshot
from decoupled.syncer.merging import MergeJob
from decoupled.syncer.model import GlobalModel
from decoupled.syncer.rounds import Rounds
from decoupled.syncer.tape import Tape
from decoupled.types import Arrays

_LOG = logging.getLogger("decoupled.syncer")
_WAITING_BYTES = 256 << 20
_FLUSH_S = 30.0


class Recording:
  """Records the merges of `Rounds`, and what its term started from.

  Is the tape of `Rounds`, and a sink of its events; both on one thread.

  Args:
    tape: where to.
    waiting_bytes: most that may wait to be written.
  """

  def __init__(self, tape: Tape, waiting_bytes: int = _WAITING_BYTES):
    self._tape = tape
    self._limit = waiting_bytes
    self._waiting: collections.deque[tuple[int, Callable[[], None]]] = (
      collections.deque()
    )
    self._bytes = 0
    self._over = False
    self._changed = threading.Condition()
    self._rounds: Rounds | None = None
    self._term, self._begun = 0, False
    threading.Thread(target=self._run, name="tape", daemon=True).start()

  def watch(self, rounds: Rounds, restored: Restored | None) -> None:
    """Records from now on.

    Args:
      rounds: before it serves anybody.
      restored: what it goes on from; None where it begins with version 0.
    """
    self._rounds, self._term = rounds, rounds.term
    if restored is not None:
      assert rounds.model is not None
      reached = self._tape.has(restored.value.term)
      arrays = {} if reached else state_of(rounds.model)
      self._begin(rounds, origin(restored.value, restored.path), arrays)

  def emit(self, kind: str, **fields: object) -> None:
    """Version 0 is complete when training begins on a term of its own."""
    rounds = self._rounds
    training = kind == "phase" and fields["phase"] == "training"
    if training and rounds is not None and not self._begun:
      assert rounds.model is not None
      self._begin(rounds, None, state_of(rounds.model, outer=False))

  def record(self, job: MergeJob) -> None:
    """Takes a finished job; never waits."""
    size = sum(a.nbytes for c in job.contributions for a in c.arrays)
    self._put(size, lambda: self._tape.record(job))

  def flush(self, limit_s: float = _FLUSH_S) -> None:
    """Returns when everything handed over is written, or the limit is over."""
    with self._changed:
      if not self._changed.wait_for(lambda: not self._bytes, limit_s):
        _LOG.warning(
          "the tape is behind: %d bytes are not written after %g s",
          *(self._bytes, limit_s),
        )

  def close(self) -> None:
    """Ends the recording in order."""
    self._put(0, lambda: self._tape.end(self._term))
    self.flush()

  def _begin(
    self,
    rounds: Rounds,
    restored: dict[str, Any] | None,
    arrays: Mapping[str, np.ndarray],
  ) -> None:
    self._begun = True
    header = {
      "run_id": rounds.run_id,
      "rounds": rounds.rounds_closed,
      "restored": restored,
    }
    term = rounds.term
    size = sum(array.nbytes for array in arrays.values())
    self._put(size, lambda: self._tape.begin(term, header, arrays))

  def _put(self, size: int, work: Callable[[], None]) -> None:
    with self._changed:
      if self._over:
        return
      if self._bytes and self._bytes + size > self._limit:
        self._over = True
        why = f"the disk could not keep up: {self._bytes} bytes waited for it"
        size, work = 0, lambda: self._stop(why)
      self._bytes += size + 1  # so that nothing of it counts as nothing left
      self._waiting.append((size + 1, work))
      self._changed.notify_all()

  def _stop(self, why: str) -> None:
    self._tape.why = self._tape.why or why
    self._tape.end(self._term)
    _LOG.warning("the recording ends: %s", self._tape.why)

  def _run(self) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._waiting)
        size, work = self._waiting.popleft()
      try:
        work()
      except Exception:  # a fault of the program: the run goes on
        _LOG.exception("recording failed")
      del work  # holds the arrays
      with self._changed:
        self._bytes -= size
        self._changed.notify_all()


def recording(folder: Path, limit_mib: float) -> Recording:
  """A recording in `folder` that takes at most `limit_mib`."""
  return Recording(Tape(folder, int(limit_mib * (1 << 20))))


def origin(snapshot: GlobalSnapshot, path: str) -> dict[str, Any]:
  """Which snapshot it was: by its versions, and by what was in it."""
  return {
    "term": snapshot.term,
    "rounds": snapshot.rounds,
    "versions": [list(version) for version in snapshot.versions],
    "path": path,
    "digests": [
      [digest(snapshot.fragments[p]), digest(snapshot.outer[p])]
      for p in range(len(snapshot.fragments))
    ],
  }


def state_of(model: GlobalModel, outer: bool = True) -> dict[str, np.ndarray]:
  """What merges depend on, as flat arrays.

  Args:
    model: complete.
    outer: with the outer state; not needed where it is fresh.
  """
  found: dict[str, np.ndarray] = {}
  for p in range(len(model.fragments)):
    fragment = model.get(p)
    found |= {f"fragment.{p}.{i}": a for i, a in enumerate(fragment.arrays)}
    if outer:
      state = outer_lib.state_arrays(fragment.outer_state)
      found |= {f"outer.{p}.{i}": a for i, a in enumerate(state)}
  return found


def state_from(
  arrays: Mapping[str, np.ndarray], fragment: int
) -> tuple[Arrays, Arrays]:
  """Inverse of `state_of`: parameters and outer state of one fragment."""

  def group(name: str) -> Arrays:
    head = f"{name}.{fragment}."
    count = sum(key.startswith(head) for key in arrays)
    return tuple(arrays[f"{head}{i}"] for i in range(count))

  return group("fragment"), group("outer")


def digest(arrays: Sequence[np.ndarray]) -> str:
  """Of the bytes, shapes and dtypes of some arrays."""
  sha = hashlib.sha256()
  for array in arrays:
    sha.update(f"{array.dtype}{array.shape}".encode())
    sha.update(np.ascontiguousarray(array).data)
  return sha.hexdigest()
