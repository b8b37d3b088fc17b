"""The ledger in time: who keeps its units, and who may have new ones."""

import pytest

from decoupled.syncer.membership import Member
from decoupled.syncer.settings import Limits
from decoupled.syncer.units import Units
from decoupled.types import Claim, Hello, Report, Stage

LIMITS = Limits()
CONTRACT = {"Corpus.epochs": "2", "Corpus.units": "5"}


class Events:
  def __init__(self):
    self.told = []

  def emit(self, kind, **fields):
    self.told.append((kind, fields))


class Syncer:
  """Units, and the learners that speak to them."""

  def __init__(self, state=None, takes_over=False):
    self.events = Events()
    self.units = Units(self.events, LIMITS, takes_over)
    if state is not None:
      self.units.restore(state)
    self.members = {}

  def join(self, now, learner, incarnation=1, previous=0):
    member = Member(learner, incarnation, "here:1", 1, now + 5, now)
    self.members[learner] = member
    hello = Hello(learner, "here:1", "", (), previous=previous)
    self.units.joined(now, member, hello, CONTRACT)

  def report(self, now, learner, seq, *claims, wants=2, unclaimed=0):
    member = self.members[learner]
    return self.units.reported(
      now,
      Report(
        learner, member.incarnation, seq, Stage.TRAINING, 1, 1, 1, (), (),
        claims=claims, wants=wants, unclaimed=unclaimed,
      ),
    )  # fmt: skip

  def has(self, learner):
    return [claim.place for claim in self.units.word(learner)[0]]


def test_a_learner_is_told_when_its_units_change_and_not_at_every_step():
  syncer = Syncer()
  syncer.join(0.0, 0)
  assert syncer.report(1.0, 0, 1)
  assert syncer.has(0) == [0, 1]
  assert not syncer.report(2.0, 0, 2, Claim(0, 3), Claim(1))
  assert not syncer.report(3.0, 0, 3, Claim(0, 4), Claim(1))
  assert syncer.report(4.0, 0, 4, Claim(0, 8, True), Claim(1))
  assert syncer.has(0) == [1, 2]
  # a loop with data of its own hears nothing of all this
  syncer.join(5.0, 1)
  assert not syncer.report(6.0, 1, 1, wants=0)


def test_everybody_is_told_that_nothing_is_left():
  syncer = Syncer()
  syncer.join(0.0, 0)
  syncer.join(0.0, 1)
  syncer.report(1.0, 1, 1, wants=2)
  assert not syncer.units.word(1)[1]
  syncer.report(1.0, 0, 1, wants=8)
  assert syncer.units.word(1)[1]
  assert syncer.report(2.0, 1, 2, Claim(0), Claim(1))


@pytest.mark.parametrize(("why", "at_once"), [("left", True), ("lease", False)])
def test_units_of_the_dead_are_kept_for_a_lease(why, at_once):
  syncer = Syncer()
  syncer.join(0.0, 0)
  syncer.join(0.0, 1)
  syncer.report(1.0, 0, 1)
  syncer.units.gone(2.0, syncer.members[0], why)
  syncer.report(2.5, 1, 1)
  assert syncer.has(1) == ([0, 1] if at_once else [2, 3])
  syncer.report(2.0 + LIMITS.lease_s, 1, 2, wants=4)
  assert syncer.has(1) == [0, 1, 2, 3]


def test_a_successor_hands_out_nothing_before_all_have_spoken():
  first = Syncer()
  for learner in (0, 1):
    first.join(0.0, learner)
    first.report(1.0, learner, 1)
  state = first.units.state()
  second = Syncer(state)
  second.join(10.0, 0, 2, previous=1)
  second.report(10.1, 0, 1, Claim(0, 8, True), Claim(1, 2), Claim(4))
  assert second.has(0) == [1, 4]
  second.report(10.2, 0, 2, Claim(1, 8, True), Claim(4))
  assert second.has(0) == [4]
  second.join(10.3, 1, 2, previous=1)
  second.report(10.4, 1, 1, Claim(2, 8, True), Claim(3, 1), Claim(5))
  second.report(10.5, 0, 3, Claim(1, 8, True), Claim(4))
  assert second.has(0) == [4, 6]
  # nobody else comes: it waits for a lease, and keeps what is theirs longer
  third = Syncer(state)
  third.join(10.0, 0, 2)
  third.report(10.1, 0, 1, wants=4)
  assert third.has(0) == [0, 1]
  third.report(10.0 + LIMITS.lease_s, 0, 2, wants=4)
  assert third.has(0) == [0, 1, 4, 5]
  third.report(10.0 + LIMITS.restart_s, 0, 3, wants=6)
  assert third.has(0) == [0, 1, 2, 3, 4, 5]


def test_units_without_a_claim_are_counted_over_all_processes():
  syncer = Syncer()
  syncer.join(0.0, 0)
  syncer.report(1.0, 0, 1, unclaimed=2)
  syncer.join(2.0, 0, 2, previous=1)  # the same process
  syncer.report(3.0, 0, 1, unclaimed=3)
  syncer.join(4.0, 0, 3)
  syncer.report(5.0, 0, 1, unclaimed=1)
  assert syncer.units.unclaimed == 4
  again = Syncer(syncer.units.state())
  again.join(6.0, 0, 4, previous=3)
  again.report(7.0, 0, 1, unclaimed=2)
  assert again.units.unclaimed == 5


def test_events_are_batched():
  syncer = Syncer()
  syncer.join(0.0, 0)
  seq = 1
  syncer.report(0.0, 0, seq)
  while syncer.has(0):
    seq += 1
    syncer.report(0.1 * seq, 0, seq, Claim(syncer.has(0)[0], 8, True))
  assert syncer.units.ledger.finished
  assert seq > 10
  syncer.units.flush()
  assert 2 <= len(syncer.events.told) <= 4
  kind, last = syncer.events.told[-1]
  assert (kind, last["completed"], last["claimed"]) == ("units", 10, 10)
