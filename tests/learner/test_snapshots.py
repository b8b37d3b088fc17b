"""A learner saves the state of a step boundary, and its loop never waits."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from decoupled.checkpoint import learner_store
from decoupled.checkpoint.settings import Checkpoint
from decoupled.clock import ManualClock
from decoupled.errors import DecoupledError
from decoupled.launch.in_memory import Recorder
from decoupled.learner.copies import Copies, compile_copy
from decoupled.learner.loop import Trained
from decoupled.learner.snapshots import Place, Snapshots
from decoupled.learner.step import TrainState

LIMIT_S = 20.0


@pytest.fixture
def sharding():
  return NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), P("fsdp"))


class Loop:
  """A loop that donates its state to every step, as the real one does."""

  def __init__(self, tmp_path, sharding, learner=0, **settings):
    self.clock, self.events = ManualClock(), Recorder()
    state = jax.device_put(jnp.zeros(64), sharding)
    self.specs = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      {"mu": state},
    )
    self.copies = Copies(compile_copy(self.specs))
    self.snapshots = Snapshots(
      Place(str(tmp_path), learner, "run-1"),
      Checkpoint(**{"least_s": 0.0, **settings}),
      2.0,
      self.copies,
      self.events,
      self.clock,
    )
    self.store = str(tmp_path)
    self.done = Trained(
      TrainState(None, {"mu": state}, jnp.uint32(0)), 100, (0, 0)
    )
    self._bump = jax.jit(
      lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0
    )

  def run(self, steps):
    with jax.transfer_guard("disallow"):
      for _ in range(steps):
        state = self._bump(self.done.state.opt_state)
        self.done.state = self.done.state._replace(opt_state=state)
        self.done.step += 1
        self.done.tokens += 8
        self.done.schedule_step += 1
        self.done.position = (0, 8 * self.done.step)
        self.clock.advance(1.0)
        self.snapshots.after_step(self.done)

  def settle(self):
    assert self.snapshots._idle.wait(LIMIT_S)

  def restored(self):
    return learner_store.restore_learner(
      self.store, 0, {"opt_state": self.specs}
    )


def test_what_is_saved_is_the_state_of_a_boundary(tmp_path, sharding):
  loop = Loop(tmp_path, sharding, every_rounds=5)
  loop.run(10)
  loop.settle()
  loop.run(9)  # donates what was current at the save, nine times
  found = loop.restored()
  assert (np.asarray(found.tree["opt_state"]["mu"]) == 10).all()
  assert found.tree["opt_state"]["mu"].sharding == sharding
  assert found.meta == {
    "run_id": "run-1",
    "schedule_step": 110,
    "step": 10,
    "tokens": 80,
    "position": [0, 80],
    "loss": None,
  }
  loop.snapshots.save(loop.done)
  assert (np.asarray(loop.restored().tree["opt_state"]["mu"]) == 19).all()
  assert [e["round"] for e in loop.events.of("checkpoint")] == [110, 119]
  assert all(e["role"] == "learner/0" for e in loop.events.of("checkpoint"))


def test_a_slow_disk_holds_up_no_step(tmp_path, sharding, monkeypatch):
  disk, save = threading.Event(), learner_store.save_learner

  def slow(*arguments):
    assert disk.wait(LIMIT_S)
    return save(*arguments)

  monkeypatch.setattr(learner_store, "save_learner", slow)
  loop = Loop(tmp_path, sharding, every_rounds=0, every_s=4.0)
  loop.run(20)  # five saves are due, one is under way
  assert not loop.events.of("checkpoint")
  disk.set()
  loop.settle()
  assert (np.asarray(loop.restored().tree["opt_state"]["mu"]) == 4).all()
  loop.run(1)
  loop.settle()
  assert [e["round"] for e in loop.events.of("checkpoint")] == [104, 121]


def test_a_save_that_hangs_is_not_waited_for_without_limit(
  tmp_path, sharding, monkeypatch, caplog
):
  disk = threading.Event()
  monkeypatch.setattr(
    learner_store, "save_learner", lambda *_: disk.wait(LIMIT_S) and ""
  )
  loop = Loop(tmp_path, sharding, every_rounds=2)
  loop.run(4)
  assert not loop.snapshots.save(loop.done, limit_s=0.01)
  assert "still under way after 0.0 s: the state at step 104 is" in caplog.text
  disk.set()
  assert loop.snapshots.finish(LIMIT_S)


def test_a_failing_save_is_counted_and_the_next_one_comes(
  tmp_path, sharding, monkeypatch, caplog
):
  save, failing = learner_store.save_learner, [True]

  def full(*arguments):
    if failing.pop() if failing else False:
      raise DecoupledError("cannot save: No space left on device")
    return save(*arguments)

  monkeypatch.setattr(learner_store, "save_learner", full)
  loop = Loop(tmp_path, sharding, every_rounds=2)
  for _ in range(2):
    loop.run(4)
    loop.settle()
  said = loop.events.of("checkpoint")
  assert [(e["round"], e["ok"]) for e in said] == [(104, False), (108, True)]
  assert "No space left" in said[0]["error"]
  assert "No space left" in caplog.text


def test_without_an_interval_there_is_only_the_last_one(tmp_path, sharding):
  loop = Loop(tmp_path, sharding, every_rounds=0)
  loop.run(50)
  assert not loop.events.of("checkpoint")
  loop.snapshots.save(loop.done)
  assert loop.restored().step == 150


def test_learners_do_not_all_save_at_the_same_moment(tmp_path, sharding):
  first = {}
  for learner in range(4):
    loop = Loop(tmp_path, sharding, learner=learner, every_rounds=10)
    while not loop.events.of("checkpoint"):
      loop.run(1)
      loop.settle()
    first[learner] = loop.done.step
  # an interval of 20 steps; each begins elsewhere in it
  assert first == {0: 20, 1: 8, 2: 16, 3: 3}


def test_nor_where_the_rounds_are_short(tmp_path, sharding):
  first = set()
  for learner in range(4):
    loop = Loop(
      tmp_path, sharding, learner=learner, every_rounds=1, least_s=20.0
    )
    while not loop.events.of("checkpoint"):
      loop.run(1)  # 1 s
      loop.settle()
    first.add(loop.done.step)
  assert first == {20, 8, 16, 3}


def test_short_rounds_do_not_make_it_save_all_the_time(tmp_path, sharding):
  loop = Loop(tmp_path, sharding, every_rounds=2, least_s=16.0)
  for _ in range(10):
    loop.run(4)  # 4 s
    loop.settle()
  assert [e["round"] for e in loop.events.of("checkpoint")] == [116, 132]


def test_who_needs_a_copy_shares_the_one_that_is_in_use(tmp_path, sharding):
  loop = Loop(tmp_path, sharding, every_rounds=5)
  loop.run(3)
  given = loop.copies.take(loop.done, "donor")  # at step 3, for a slow joiner
  loop.run(7)  # a save is due at step 10
  loop.settle()
  [saved] = loop.events.of("checkpoint")
  assert saved["round"] == 103
  assert (np.asarray(loop.restored().tree["opt_state"]["mu"]) == 3).all()
  assert loop.restored().meta["step"] == 3
  loop.run(20)  # what is saved already is not saved again
  loop.settle()
  assert len(loop.events.of("checkpoint")) == 1
  assert (np.asarray(given.state["mu"]) == 3).all()
  loop.copies.release(given, "donor")
  loop.run(1)
  loop.settle()
  assert loop.events.of("checkpoint")[-1]["round"] == 131
  assert loop.copies._held is None
