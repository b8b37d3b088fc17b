"""Who gives a joiner its optimizer state, and what happens if that fails."""

import pytest

from decoupled.errors import Refused
from decoupled.launch.in_memory import Recorder
from decoupled.syncer.donors import NOBODY, Donors
from decoupled.syncer.membership import Membership
from decoupled.syncer.settings import Limits
from decoupled.types import Hello, Report, Stage

LIMITS = Limits(lease_s=5.0, transfer_s=30.0)


class Run:
  """Learners, by the steps that they have taken, and a joiner, 9."""

  def __init__(self, steps, **changes):
    self.membership = Membership(LIMITS.lease_s, {})
    self.events, self.changed = Recorder(), []
    self.donors = Donors(
      self.membership,
      LIMITS,
      self.events,
      lambda member: self.changed.append(member.learner_id),
    )
    for learner, count in steps.items():
      self.join(learner, count, **changes)
    self.join(9, 0)

  def join(self, learner, steps, gives=True, stage=Stage.TRAINING, previous=0):
    hello = Hello(
      learner, f"h:{learner}", "", (), previous=previous, gives_state=gives
    )
    member = self.membership.claim(0.0, hello)
    member.stepped = steps > 0
    report = Report(learner, member.incarnation, 1, stage, steps, 0, 0, (), ())
    member.report = report if steps else None
    return member

  def ask(self, now=0.0, joiner=9):
    incarnation = self.membership.live[joiner].incarnation
    return self.donors.ask(now, joiner, incarnation)

  def leave(self, learner):
    self.membership.remove(learner)
    self.donors.left(learner, "closed")

  def told(self, learner):
    return self.donors.asked_of(learner)

  def errors(self):
    return [e["error"] for e in self.events.of("donation")]


def test_the_one_that_has_stepped_longest_gives_of_those_the_lowest_id():
  run = Run({0: 3, 1: 8, 2: 8})
  donation = run.ask()
  assert donation.donor == 1
  assert [run.told(i) for i in (0, 1, 2, 9)] == [0, donation.request, 0, 0]
  assert run.changed == [1]


@pytest.mark.parametrize(
  "unfit",
  [
    {"gives": False},
    {"stage": Stage.PAUSED},
    {"stage": Stage.DRAINED},
  ],
)
def test_who_cannot_give_is_not_asked(unfit):
  run = Run({0: 3})
  run.join(1, 100, **unfit)
  assert run.ask().donor == 0


def test_who_has_not_stepped_or_joins_itself_is_not_asked():
  run = Run({0: 3})
  run.join(1, 0)
  assert run.ask().donor == 0
  with pytest.raises(Refused, match="of 2 others") as caught:
    run.ask(joiner=0)  # 9 joins, 1 has not stepped
  assert caught.value.reason == "no_donor"


def test_without_history_of_anybody_nobody_is_waited_for():
  run = Run({})
  with pytest.raises(Refused, match="no learner can give"):
    run.ask()
  assert not run.events.of("donation")


def test_one_whose_connection_was_lost_still_has_what_it_trained():
  run = Run({})
  run.join(1, 0, previous=4)
  assert run.ask().donor == 1


def test_a_fenced_joiner_gets_nothing():
  run = Run({0: 3})
  with pytest.raises(Refused) as caught:
    run.donors.ask(0.0, 9, 77)
  assert caught.value.reason == "fenced"


def test_a_donor_dies_half_way_and_the_next_one_gives():
  run = Run({0: 3, 1: 8})
  first, over = run.ask(), []
  first.told = lambda: over.append(first.over)
  run.donors.moved(1.0, first.request, 1, 1, 1000)
  run.leave(1)
  assert over == ["learner 1 has gone (closed)"]
  second = run.ask(2.0)
  assert (second.donor, second.request > first.request) == (0, True)
  run.donors.moved(3.0, second.request, 0, 1, 4000)
  run.donors.done(4.0, second.request)
  assert second.over == ""
  [failed, given] = run.events.of("donation")
  assert (failed["learner"], failed["donor"], failed["ok"]) == (9, 1, False)
  assert (given["donor"], given["ok"], given["bytes"]) == (0, True, 4000)
  assert run.told(0) == 0


def test_each_donor_is_tried_once_then_nobody_is_left():
  run = Run({0: 3, 1: 8})
  donors = []
  for now in (0.0, 1.0):
    donation = run.ask(now)
    donors.append(donation.donor)
    run.donors.fail(now, donation.request, "it does not fit")
  assert donors == [1, 0]
  with pytest.raises(Refused, match="2 have been asked"):
    run.ask(2.0)
  # another incarnation of the joiner begins anew
  run.leave(9)
  run.join(9, 0)
  assert run.ask(3.0).donor == 1


def test_a_donor_that_does_not_begin_is_given_up_after_the_limit():
  run = Run({1: 8})
  donation = run.ask(10.0)
  assert run.donors.wake_at() == 40.0
  run.donors.tick(39.9)
  assert donation.over is None
  run.donors.tick(40.0)
  assert "learner 1 has moved nothing" in donation.over
  assert run.changed == [1, 1]  # asked, and asked no more
  assert run.donors.wake_at() == float("inf")


def test_slow_steps_get_the_time_they_need():
  run = Run({1: 8})
  run.membership.live[1].step_s = 50.0
  run.ask(10.0)
  assert run.donors.wake_at() == 140.0


def test_a_donor_that_stalls_half_way_is_given_up_sooner():
  run = Run({1: 8})
  donation = run.ask(0.0)
  for now in range(1, 200):
    run.donors.moved(float(now), donation.request, 1, 1, 10)
    run.donors.tick(float(now))
  assert donation.over is None  # however long it takes, if it moves
  run.donors.tick(199 + 10.0)
  assert "1990 bytes came" in donation.over


def test_late_bytes_and_bytes_of_others_are_refused():
  run = Run({0: 3, 1: 8})
  donation = run.ask()
  for donor, incarnation, reason in ((0, 1, "late"), (1, 2, "fenced")):
    with pytest.raises(Refused) as caught:
      run.donors.moved(0.0, donation.request, donor, incarnation, 1)
    assert caught.value.reason == reason
  run.leave(9)
  with pytest.raises(Refused) as caught:
    run.donors.moved(0.0, donation.request, 1, 1, 1)
  assert caught.value.reason == "late"
  assert run.errors() == ["its joiner has gone (closed)"]


def test_one_donor_serves_joiners_one_by_one():
  run = Run({1: 8})
  run.join(8, 0)
  first, second = run.ask(), run.ask(joiner=8)
  assert (first.donor, second.donor) == (1, NOBODY)
  run.donors.done(5.0, first.request)
  run.donors.tick(5.0)
  assert second.donor == 1
  assert run.told(1) == second.request


def test_waiting_for_a_busy_donor_has_a_limit():
  run = Run({1: 8})
  run.join(8, 0)
  first, second = run.ask(), run.ask(joiner=8)
  run.donors.moved(29.0, first.request, 1, 1, 5)
  run.donors.tick(30.0)
  assert first.over is None
  assert "busy for 30 s" in second.over
  assert run.events.of("donation")[0]["donor"] is None


def test_asking_anew_ends_what_was_asked_before():
  run = Run({0: 3, 1: 8})
  first = run.ask()
  second = run.ask()
  assert "asked anew" in first.over
  assert second.donor == 0


def test_a_learner_gives_its_own_state_to_the_standby_that_relieves_it():
  run = Run({0: 3, 1: 8})
  incarnation = run.membership.live[0].incarnation
  donation = run.donors.ask_itself(1.0, 0, incarnation)
  assert run.told(0) == donation.request
  # others that join find another donor meanwhile
  assert run.ask(1.0).donor == 1
  run.donors.moved(1.5, donation.request, 0, incarnation, 100)
  run.donors.done(2.0, donation.request)
  assert donation.over == ""
  assert run.told(0) == 0
  # one that goes in the middle of it does not leave the standby waiting
  again = run.donors.ask_itself(3.0, 0, incarnation)
  run.leave(0)
  assert "has gone" in again.over
  with pytest.raises(Refused, match="join again"):
    run.donors.ask_itself(4.0, 0, incarnation)
  with pytest.raises(Refused, match="no optimizer state to give yet"):
    run.donors.ask_itself(4.0, 9, run.membership.live[9].incarnation)
