"""Saving the run while it goes on, and going on from what was saved.

A snapshot is cut on the event loop, between two events: the global fragments
are immutable, so that a cut only takes hold of them. Everything that takes
time, also the conversion of the outer state, happens on another thread.
"""

import logging
import threading
from collections.abc import Callable
from typing import TypeAlias

from decoupled import background
from decoupled.algorithm import outer as outer_lib
from decoupled.algorithm.policy import Outer
from decoupled.checkpoint import syncer_store
from decoupled.checkpoint.settings import Checkpoint
from decoupled.checkpoint.syncer_store import GlobalSnapshot, LearnerPlace
from decoupled.clock import Clock
from decoupled.errors import DecoupledError
from decoupled.syncer.rounds import Rounds
from decoupled.types import EventSink, Phase

Work: TypeAlias = Callable[[], None]

_LOG = logging.getLogger("decoupled.syncer")


def cut(rounds: Rounds) -> Callable[[], GlobalSnapshot]:
  """Takes hold of everything that a later syncer needs to go on from here.

  Returns:
    Makes the snapshot, later and on any thread.
  """
  model = rounds.model
  assert model is not None
  fragments = [model.get(p) for p in range(len(model.fragments))]
  versions, manifest = model.versions, model.manifest
  closed = 0 if rounds.phase is Phase.WAITING else rounds.rounds_closed
  common_step, fullest = rounds.common_step, rounds.fullest
  contract = tuple(sorted(rounds.contract.items()))
  run_id, term = rounds.run_id, rounds.term
  incarnations = dict(rounds.membership.incarnations)
  tokens, positions = dict(rounds.tokens), dict(rounds.positions)
  units = rounds.units.state()

  def snapshot() -> GlobalSnapshot:
    return GlobalSnapshot(
      run_id=run_id,
      term=term,
      rounds=closed,
      common_step=common_step,
      fullest=fullest,
      versions=versions,
      manifest=manifest,
      contract=contract,
      fragments=tuple(f.arrays for f in fragments),
      outer=tuple(outer_lib.state_arrays(f.outer_state) for f in fragments),
      learners={
        i: LearnerPlace(
          incarnation=incarnations.get(i, 0),
          tokens=tokens.get(i, 0),
          position=positions.get(i, (0, 0)),
        )
        for i in sorted({*incarnations, *positions})
      },
      units=units,
    )

  return snapshot


def go_on(rounds: Rounds, snapshot: GlobalSnapshot, outer: Outer) -> None:
  """Continues a snapshot under the term of `rounds`.

  Raises:
    Refused: it was made under another contract; both sides are named.
  """
  rounds.restore(
    snapshot.manifest,
    [
      (arrays, outer_lib.state_from_arrays(outer, saved))
      for arrays, saved in zip(snapshot.fragments, snapshot.outer, strict=True)
    ],
    snapshot.rounds,
    dict(snapshot.contract),
    {i: place.incarnation for i, place in snapshot.learners.items()},
    {i: place.position for i, place in snapshot.learners.items()},
    snapshot.fullest,
    {i: place.tokens for i, place in snapshot.learners.items()},
    snapshot.units,
  )


class Snapshots:
  """An event sink that saves the run as its rounds close.

  Version 0 is saved when it is complete, the young run at growing distances,
  then whatever the intervals ask for,
  and once more when the last round has closed, before learners are let go. At
  most one save is under way and one waits; a cut that would have to wait
  behind that one takes its place.

  Args:
    rounds: what is saved; events come from it, on one thread.
    store: folder or URL of the run's checkpoints.
    settings: how often.
    events: told of each save.
    clock: for intervals only.
    may_commit: raises where this syncer has been replaced.
    start: has work done elsewhere; a thread by default.
  """

  def __init__(
    self,
    rounds: Rounds,
    store: str,
    settings: Checkpoint,
    events: EventSink,
    clock: Clock,
    *,
    may_commit: Work = lambda: None,
    start: Callable[[Work], None] | None = None,
  ):
    self.saved = 0
    self.failed = 0
    self._rounds = rounds
    self._store = store
    self._settings = settings
    self._events = events
    self._clock = clock
    self._may_commit = may_commit
    self._start = start or _on_a_thread
    self._idle = threading.Condition()
    self._running = False
    self._waiting: Work | None = None
    # what is saved already: what was restored, or nothing
    self._last_rounds = rounds.rounds_closed
    self._last_s = clock.now()
    self._version0 = rounds.has_history
    self._began_s: float | None = None  # with version 0, not with a restore

  def emit(self, kind: str, **fields: object) -> None:
    """Acts on the events of `rounds`, which are told where they happen."""
    if kind == "phase" and fields["phase"] == "training":
      if not self._version0:
        self._version0 = True
        self._began_s = self._clock.now()
        self._begin()
    elif kind == "phase" and fields["phase"] == "draining":
      if self._rounds.rounds_closed != self._last_rounds:
        self._begin()
    elif kind == "round" and fields["counted"] and self._due():
      self._begin()

  def _due(self) -> bool:
    """Whether an interval is over; never while the last save is under way."""
    if self._running:
      return False
    rounds = self._rounds.rounds_closed - self._last_rounds
    seconds = self._clock.now() - self._last_s
    if self._began_s is not None and self._settings.due_early(
      seconds, self._last_s - self._began_s
    ):
      return True
    return self._settings.due(rounds, seconds)

  def save(self, limit_s: float | None = None) -> bool:
    """Saves the state as it is now, after whatever is under way.

    Args:
      limit_s: for what is under way; without a limit by default.

    Returns:
      Whether it is saved.
    """
    if not self.finish(limit_s):
      _LOG.error(
        "a save to %s is still under way after %.1f s: the state at round %d "
        "is not saved",
        *(self._store, limit_s, self._rounds.rounds_closed),
      )
      return False
    return self._save(cut(self._rounds))

  def finish(self, limit_s: float | None = None) -> bool:
    """Waits until nothing is under way; False if something is at the limit."""
    with self._idle:
      return self._idle.wait_for(lambda: not self._running, limit_s)

  def _begin(self) -> None:
    """Cuts here and now; writes elsewhere."""
    state = cut(self._rounds)
    self._last_rounds = self._rounds.rounds_closed
    self._last_s = self._clock.now()

    def work() -> None:
      self._save(state)

    with self._idle:
      if self._running:
        self._waiting = work
        return
      self._running = True
    self._start(lambda: self._work(work))

  def _work(self, first: Work) -> None:
    following: Work | None = first
    while following is not None:
      try:
        following()
      except Exception:  # a fault of the program: training goes on
        _LOG.exception("a snapshot failed")
      with self._idle:
        following, self._waiting = self._waiting, None
        if following is None:
          self._running = False
          self._idle.notify_all()

  def _save(self, state: Callable[[], GlobalSnapshot]) -> bool:
    """Commits a snapshot; failing is loud and counted, not fatal."""
    path, error = "", ""
    snapshot = state()
    try:
      path = syncer_store.save_global(
        self._store,
        snapshot.rounds,
        snapshot,
        self._settings.keep,
        self._may_commit,
      )
      self.saved += 1
    except DecoupledError as failure:
      self.failed += 1
      error = str(failure)
      _LOG.error("%s; training goes on", error)
    self._events.emit(
      "checkpoint",
      what="save",
      round=snapshot.rounds,
      path=path,
      ok=not error,
      error=error,
      role="syncer",
    )
    return not error


def _on_a_thread(work: Work) -> None:
  """It gives way to merges here, and to learners on the same machine."""

  def beside() -> None:
    background.give_way()
    work()

  threading.Thread(target=beside, name="snapshot", daemon=True).start()
