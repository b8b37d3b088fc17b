"""Syncers of in-memory jobs that save themselves, die and are succeeded."""

import numpy as np

from decoupled.algorithm.policy import Outer
from decoupled.checkpoint import syncer_store
from decoupled.checkpoint.settings import Checkpoint
from decoupled.launch.in_memory import Recorder
from decoupled.observe.events import Tee
from decoupled.syncer.rounds import Plan, Rounds
from decoupled.syncer.settings import Limits
from decoupled.syncer.snapshots import Snapshots, go_on


class Timed(Recorder):
  """Keeps events with their times, as the log of a run does."""

  clock = None

  def emit(self, kind, **fields):
    t = self.clock.now() if self.clock is not None else 0.0
    super().emit(kind, t=t, **fields)


def at_once(work):
  work()


def save_quickly(folder, tree):
  """What Orbax does, in a hundredth of the time; it has tests of its own."""
  np.savez(folder / "arrays.npz", **tree)


def restore_quickly(folder):
  with np.load(folder / "arrays.npz") as found:
    return dict(found)


def saving(made, store, start=at_once, **settings):
  """Lets the job's syncer save itself from now on."""
  snapshots = Snapshots(
    made.rounds,
    str(store),
    Checkpoint(**{"least_s": 0.0, "first_s": 0.0, **settings}),
    made.events,
    made.clock,
    start=start,
  )
  made.rounds._events = Tee(made.events, snapshots)
  return snapshots


def syncer_dies(made):
  """Its connections close; nobody answers until there is another."""
  for learner in made.learners.values():
    if learner.wire is not None:
      learner.wire.cut = True
      made.network.disconnected(learner.wire)
      if learner.wire._on_lost is not None:
        learner.wire._on_lost("connection reset")
  old = made.rounds
  made.rounds = made.network.rounds = Rounds(
    Plan("nobody"), made._exchange, Outer(), Limits(), 0, made.events
  )
  return old


def syncer_returns(made, old, store=None, outer=None):
  """A new one under the next term, from the newest snapshot in `store`.

  Returns:
    What was restored, None if nothing was.
  """
  restored = None
  if store is not None:
    restored = syncer_store.restore_newest(str(store))
  new = Rounds(
    Plan(
      old.run_id,
      old._plan.learners,
      old._plan.rounds,
      contract=tuple(old.contract.items()),
    ),
    made._exchange,
    outer or Outer(),
    Limits(),
    term=old.term + 1,
    events=made.events,
  )
  if restored is not None:
    go_on(new, restored.value, outer or Outer())
    made.events.emit(
      "checkpoint",
      what="restore",
      round=restored.value.rounds,
      path=restored.path,
      ok=True,
      error="",
      role="syncer",
      term=new.term,
      cut_by=restored.value.term,
    )
  made.rounds = made.network.rounds = new
  made.network._tick_at = np.inf
  for learner in made.learners.values():
    if learner.wire is not None:
      learner.wire.cut = False
  return restored
