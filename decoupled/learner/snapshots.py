"""A learner saves itself beside its loop.

At a boundary the loop dispatches a copy of the inner optimizer's state on its
own devices (the step that follows donates the original) and goes on. A thread
waits for the copy, brings it to the host and commits it. Parameters are not
saved: whoever goes on takes the run's own from the syncer.
"""

import dataclasses
import logging
import math
import threading
from collections.abc import Hashable
from typing import Any

import jax

from decoupled.checkpoint import learner_store
from decoupled.checkpoint.settings import Checkpoint
from decoupled.clock import Clock
from decoupled.errors import DecoupledError
from decoupled.learner.copies import Copies, StateCopy, uncopied
from decoupled.learner.loop import Trained
from decoupled.link import ops, workers
from decoupled.types import EventSink

_LOG = logging.getLogger("decoupled.learner")

# Multiples of it, modulo 1, lie far apart however many there are.
_GOLDEN = (5**0.5 - 1) / 2


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a learner's snapshots go.

  Attributes:
    store: folder or URL of the run's checkpoints.
    learner_id: whose.
    run_id: of the run they belong to.
  """

  store: str
  learner_id: int
  run_id: str


class Snapshots:
  """Saves a learner's inner optimizer state; at most one save at a time.

  The first interval is shorter, for each learner by another part: learners
  that share a machine or a store do not save at the same moment.

  Args:
    place: where they go.
    settings: how often.
    steps_per_round: H / P, the inner steps of a round.
    copies: of the optimizer state, shared with who else needs one.
    events: told of each save.
    clock: for intervals only.
  """

  def __init__(
    self,
    place: Place,
    settings: Checkpoint,
    steps_per_round: float,
    copies: Copies,
    events: EventSink,
    clock: Clock,
  ):
    self._place = place
    self._settings = settings
    self._steps_per_round = steps_per_round
    self._events = events
    self._clock = clock
    self._copies = copies
    ahead = place.learner_id * _GOLDEN % 1.0
    self._last_step = -ahead * settings.every_rounds * steps_per_round
    rest_s = max(settings.every_s, settings.least_s)
    self._last_s = clock.now() - ahead * rest_s
    self._idle = threading.Event()
    self._idle.set()
    self._next: StateCopy | None = None
    self._newest = -1  # what was saved last
    # made here: to start a thread is to wait for it
    self._worker = workers.Threaded("snapshot", self._beside, self._failed)

  def after_step(self, now: Trained) -> None:
    """Begins a save if one is due and none is under way; never waits."""
    if not self._idle.is_set():
      return
    rounds = (now.step - self._last_step) / self._steps_per_round
    if not self._settings.due(rounds, self._clock.now() - self._last_s):
      return
    copy = self._copies.take(now, self)
    if copy.schedule_step <= self._newest:
      self._copies.release(copy, self)
      return  # a slow donation still holds what is saved already
    self._last_step, self._last_s = now.step, self._clock.now()
    ops.begin_host_copies(jax.tree.leaves(copy.state))
    self._next = copy
    self._idle.clear()
    self._worker.put(now.schedule_step)

  def save(self, now: Trained, limit_s: float | None = None) -> bool:
    """Saves the state as it is, after whatever is under way; waits.

    Args:
      now: what to save.
      limit_s: for what is under way; without a limit by default.

    Returns:
      Whether it is saved.
    """
    if not self.finish(limit_s):
      _LOG.error(
        "a save to %s is still under way after %.1f s: the state at step %d is "
        "not saved",
        *(self._place.store, limit_s, now.schedule_step),
      )
      return False
    return self._save(uncopied(now))

  def finish(self, limit_s: float | None = None) -> bool:
    """Waits until nothing is under way; False if something is at the limit."""
    return self._idle.wait(limit_s)

  def close(self) -> None:
    """Saves no more; what is under way goes on."""
    self._worker.close(limit_s=0.0)

  def _beside(self, key: Hashable) -> None:
    del key  # at most one save waits
    assert self._next is not None
    copy, self._next = self._next, None
    try:
      self._save(copy)
    finally:
      self._copies.release(copy, self)
      self._idle.set()

  def _failed(self, error: BaseException) -> None:
    """A fault of the program: training goes on."""
    _LOG.error("a snapshot failed", exc_info=error)

  def _meta(self, copy: StateCopy) -> dict[str, Any]:
    return {
      "run_id": self._place.run_id,
      "schedule_step": copy.schedule_step,
      "step": copy.step,
      "tokens": copy.tokens,
      "position": list(copy.position),
      "loss": copy.loss if math.isfinite(copy.loss) else None,
    }

  def _save(self, copy: StateCopy) -> bool:
    """Commits a snapshot; failing is loud and counted, not fatal."""
    path, error, number = "", "", copy.schedule_step
    try:
      path = learner_store.save_learner(
        self._place.store,
        self._place.learner_id,
        number,
        {"opt_state": copy.state},
        self._meta(copy),
        self._settings.keep,
      )
      self._newest = number
    except DecoupledError as failure:
      error = str(failure)
      _LOG.error("%s", error)
    self._events.emit(
      "checkpoint",
      what="save",
      round=number,
      path=path,
      ok=not error,
      error=error,
      role=f"learner/{self._place.learner_id}",
    )
    return not error
