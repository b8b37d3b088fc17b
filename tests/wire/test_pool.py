"""A standby and the real syncer: the pool's stream, and what it follows."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from decoupled.algorithm.policy import Exchange, Outer
from decoupled.errors import Refused, Unreachable
from decoupled.syncer.rounds import Plan, Rounds
from decoupled.syncer.settings import Limits
from decoupled.types import (
  HANDED_OVER,
  NO_VERSION,
  Contribution,
  CopyHeader,
  CopyId,
  Leaf,
  Offer,
  Phase,
  Standing,
  StateHeader,
  Version,
)
from decoupled.wire.client import AdminClient, GrpcLearnerWire
from tests.wire import fakes
from tests.wire.fakes import LIMIT_S, TOKEN, Events, Server, wait_until

LIMITS = Limits(lease_s=3.0, heartbeat_s=0.2)
PROGRAM = (("jax", "1"),)
READY = Standing("standby/0", "s:1", "", (), PROGRAM, "abc")


@pytest.fixture
def syncer():
  rounds = Rounds(
    Plan("run", contract=(("Exchange.H", "2"),)),
    Exchange(H=2, P=2, tau=1),
    Outer(),
    LIMITS,
    1,
    Events(),
  )
  with Server(rounds) as running:
    yield running


@pytest.fixture
def dial(syncer):
  made = []

  def make():
    made.append(GrpcLearnerWire(syncer.address, TOKEN))
    return made[-1]

  yield make
  for one in made:
    one.close()


def join(wire, learner_id=0, said=None):
  hello = fakes.hello(learner_id, contract=(), holder=f"h:{learner_id}")
  welcome = wire.hello(
    dataclasses.replace(hello, program=PROGRAM, gives_state=True)
  )
  said = [] if said is None else said
  wire.listen(said.append, said.append)
  wait_until(lambda: said, "the control stream")
  return welcome


def word(pool, wanted):
  """The first word that is as wanted."""
  known, deadline = None, time.monotonic() + LIMIT_S
  while known is None or not wanted(known):
    assert time.monotonic() < deadline, f"the last word was {known}"
    known = pool.wait(known, 0.2)
  return known


def seed(wire, welcome, fragment):
  copy = CopyId(welcome.incarnation, 1, 0, fragment, 0)
  manifest = welcome.manifest
  arrays = tuple(
    np.full(manifest.shape(unit), fragment + 0.5, np.float32)
    for unit in manifest.fragments[fragment]
  )
  header = CopyHeader(copy, NO_VERSION, 0, 0, 0)
  assert wire.contribute(Contribution(0, header, arrays), None) == ""
  return arrays


def test_a_standby_follows_the_run_and_is_offered_a_dead_learners_id(
  syncer, dial
):
  learner, standby = dial(), dial()
  assert standby.contract("s:1").manifest is None
  pool = standby.pool(dataclasses.replace(READY, missing="it compiles"))
  assert word(pool, lambda w: True).versions == ()
  welcome = join(learner)
  asked = standby.contract("s:1")
  assert asked.manifest == welcome.manifest
  with pytest.raises(Refused, match="no version yet"):
    standby.follow(asked.manifest, 0, NO_VERSION, None)
  sent = [seed(learner, welcome, p) for p in (0, 1)]
  said = word(pool, lambda w: w.phase is Phase.TRAINING)
  assert said.versions == (Version(1, 0), Version(1, 0))
  for p in (0, 1):
    merged = standby.follow(asked.manifest, p, NO_VERSION, None)
    assert (merged.fragment, merged.version) == (p, Version(1, 0))
    for mine, theirs in zip(merged.arrays, sent[p], strict=True):
      np.testing.assert_array_equal(mine, theirs)

  learner.close()  # a silent death
  wait_until(lambda: not syncer.rounds.membership.live, "the death")
  with AdminClient(syncer.address, TOKEN) as admin:
    status = admin.status()
  [waiting] = status.standbys
  assert (waiting.name, waiting.missing) == ("standby/0", "it compiles")
  assert "standby/0 (s:1) is not ready: it compiles" in status.vacant[0]
  pool.say(READY)
  offer = word(pool, lambda w: w.offer).offer
  assert offer == Offer(1, 0)
  hello = fakes.hello(0, contract=(), holder="s:1")
  promoted = standby.hello(dataclasses.replace(hello, program=PROGRAM))
  assert promoted.incarnation == 2
  pool.close()
  [(_, event)] = [e for e in syncer.rounds._events.seen if e[0] == "promoted"]
  assert event["standby"] == "standby/0"


def test_a_standby_that_is_refused_hears_why(dial):
  other = dataclasses.replace(READY, contract=(("Exchange.H", "8"),))
  pool = dial().pool(other)
  with pytest.raises(Refused, match=r"Exchange\.H = 8 at s:1.* = 2") as caught:
    word(pool, lambda w: True)
  assert caught.value.reason == "contract"
  pool.close()
  pool = dial().pool(dataclasses.replace(READY, protocol=99))
  with pytest.raises(Refused, match="wire protocol 99"):
    word(pool, lambda w: True)
  pool.close()


def test_the_end_of_the_run_and_of_the_syncer_are_heard(syncer, dial):
  pool = dial().pool(READY)
  word(pool, lambda w: w.phase is Phase.WAITING)
  # it has beaten for longer than the lease: it is still there
  (standby,) = syncer.rounds.pool._standbys.values()
  since = standby.heard_at
  fakes.wait_until(
    lambda: standby.heard_at > since + LIMITS.lease_s, "beats beyond the lease"
  )
  assert [s.name for s in syncer.rounds.pool.status(0.0)] == ["standby/0"]
  with AdminClient(syncer.address, TOKEN) as admin:
    admin.drain("enough")
  word(pool, lambda w: w.phase is Phase.ENDED)
  syncer.run(syncer.service.stop(0))
  with pytest.raises((Refused, Unreachable)):
    word(pool, lambda w: False)
  pool.close()


def test_a_planned_swap_from_the_operators_call_to_the_claim(syncer, dial):
  learner, standby, said = dial(), dial(), []
  welcome = join(learner, said=said)
  for p in (0, 1):
    seed(learner, welcome, p)
  pool = standby.pool(READY)
  word(pool, lambda w: w.phase is Phase.TRAINING)
  held = (Version(1, 0), Version(1, 0))
  learner.report(fakes.report(1, versions=held))
  wait_until(lambda: syncer.rounds.membership.live[0].stepped, "a step")
  count = np.arange(5, dtype=np.int32)

  def give():
    wait_until(lambda: said[-1].donate, "the request")
    leaf = Leaf("count", count.shape, "int32")
    learner.give_state(
      StateHeader(said[-1].donate, 0, 1, 9, 11, (leaf,)), [count]
    )

  with (
    AdminClient(syncer.address, TOKEN, limit_s=LIMIT_S) as admin,
    ThreadPoolExecutor(2) as threads,
  ):
    with pytest.raises(Refused, match=r"learner 7 is not in the run; .*: 0"):
      admin.swap(7)
    swapped = threads.submit(admin.swap, 0)
    offer = word(pool, lambda w: w.offer).offer
    assert (offer.learner_id, offer.prepare) == (0, 1)
    with pytest.raises(Refused, match="already being swapped: standby/0"):
      admin.swap(0)
    assert "it prepares while the learner trains" in admin.status().vacant[0]
    given = threads.submit(give)
    with standby.take_state((0, 1)) as incoming:
      assert incoming.header.schedule_step == 11
      [taken] = incoming.arrays()
      np.testing.assert_array_equal(taken, count)
    given.result(LIMIT_S)
    assert not said[-1].relieved
    pool.say(dataclasses.replace(READY, prepared=offer.number))
    wait_until(lambda: said[-1].relieved, "the relief")
    learner.leave(HANDED_OVER)
    word(pool, lambda w: w.offer == Offer(offer.number, 0))
    assert not swapped.done()
    hello = fakes.hello(0, contract=(), holder="s:1")
    assert standby.hello(hello).incarnation == 2
    assert swapped.result(LIMIT_S) == "standby/0 (s:1)"
