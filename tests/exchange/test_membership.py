"""Claims of learner ids: who may speak, until when, under which number."""

import pytest

from decoupled.errors import Refused
from decoupled.syncer.membership import Membership
from decoupled.types import (
  NO_VERSION,
  CopyHeader,
  CopyId,
  Hello,
  Report,
  Stage,
  Version,
)

LEASE_S = 5.0


def claim(members, now=0.0, learner_id=0, holder="here:1", previous=0):
  hello = Hello(
    learner_id=learner_id,
    holder=holder,
    run_id="",
    tensors=(),
    previous=previous,
  )
  return members.claim(now, hello)


def report(step, versions=(), copies=(), stage=Stage.TRAINING):
  return Report(
    learner_id=0,
    incarnation=1,
    seq=step,
    stage=stage,
    step=step,
    tokens=step,
    schedule_step=step,
    copies=copies,
    versions=versions,
  )


def test_a_second_claim_is_told_the_holder_and_what_is_left_of_its_lease():
  members = Membership(LEASE_S, {})
  claim(members, now=1.0)
  with pytest.raises(Refused) as caught:
    claim(members, now=3.5, holder="there:2")
  assert caught.value.reason == "claimed"
  said = str(caught.value)
  assert "here:1" in said
  assert "lease ends in 2.5 s" in said
  assert "there:2 must take another --learner_id or wait" in said
  assert members.live[0].holder == "here:1"


def test_a_refused_claim_does_not_prolong_the_lease_it_ran_into():
  members = Membership(LEASE_S, {})
  claim(members)
  with pytest.raises(Refused):
    claim(members, now=4.0, holder="there:2")
  assert [m.learner_id for m in members.lapsed(5.0)] == [0]


def test_a_lease_lapses_exactly_when_its_silence_is_over():
  members = Membership(LEASE_S, {})
  member = claim(members)
  members.renew(3.0, member)
  assert members.lapsed(7.9) == []
  assert members.lapsed(8.0) == [member]


def test_who_never_heard_of_its_grant_may_ask_again():
  """The connection broke between the grant and its arrival."""
  members = Membership(LEASE_S, {})
  claim(members)
  assert claim(members, now=0.1).incarnation == 2
  with pytest.raises(Refused, match="held by here:1"):
    claim(members, now=0.2, holder="there:2")
  members.live[0].clock_offset_s = 0.0  # it has spoken
  with pytest.raises(Refused, match="held by here:1"):
    claim(members, now=0.3)


def test_the_holder_itself_comes_back_without_waiting_for_its_own_lease():
  """A reset connection that the syncer has not noticed yet."""
  members = Membership(LEASE_S, {})
  claim(members)
  again = claim(members, now=1.0, previous=1)
  assert again.incarnation == 2
  assert members.live[0] is again
  assert again.lease_until == 6.0


@pytest.mark.parametrize(
  ("holder", "previous"), [("here:1", 0), ("here:1", 7), ("there:2", 1)]
)
def test_neither_name_nor_number_alone_takes_over_a_live_claim(
  holder, previous
):
  members = Membership(LEASE_S, {})
  claim(members).clock_offset_s = 0.0  # it has spoken
  with pytest.raises(Refused) as caught:
    claim(members, holder=holder, previous=previous)
  assert caught.value.reason == "claimed"


def test_an_incarnation_is_above_all_that_either_side_remembers():
  members = Membership(LEASE_S, {3: 8})
  assert claim(members, learner_id=3).incarnation == 9
  # a syncer restored from an older snapshot than its learners
  assert claim(members, learner_id=4, previous=12).incarnation == 13
  members.remove(4)
  assert claim(members, learner_id=4).incarnation == 14


def test_any_free_id_is_the_lowest_one():
  members = Membership(LEASE_S, {})
  for learner_id in (0, 1, 3):
    claim(members, learner_id=learner_id, holder=f"here:{learner_id}")
  assert claim(members, learner_id=-1).learner_id == 2
  assert claim(members, learner_id=-1).learner_id == 4
  assert [m.learner_id for m in members.members()] == [0, 1, 2, 3, 4]


def test_an_id_whose_holder_is_being_restarted_is_not_free():
  members = Membership(LEASE_S, {})
  anyone = Hello(learner_id=-1, holder="there:2", run_id="", tensors=())
  members.claim(0.0, anyone, reserved={0, 2})
  members.claim(0.0, anyone, reserved={0, 2})
  assert sorted(members.live) == [1, 3]
  claim(members, learner_id=2)  # it takes its own id whenever it is back


def test_the_fenced_are_told_both_incarnations():
  members = Membership(LEASE_S, {})
  claim(members)
  claim(members, previous=1)
  with pytest.raises(Refused, match="as incarnation 1, the run knows 2"):
    members.get(0, 1)
  members.remove(0)
  with pytest.raises(Refused, match="the run knows nobody") as caught:
    members.get(0, 2)
  assert caught.value.reason == "fenced"


def timed(reports):
  member = claim(Membership(LEASE_S, {}))
  for now, step in reports:
    member.time_step(now, step, ema=0.5)
  return member.step_s


def test_the_step_time_needs_two_timed_steps():
  assert timed([(0.0, 0)]) != timed([(0.0, 0)])  # NaN
  assert timed([(0.0, 0), (9.0, 1)]) != timed([(0.0, 0), (9.0, 1)])
  assert timed([(0.0, 0), (9.0, 1), (10.0, 2)]) == 1.0
  assert timed([(0.0, 0), (3.0, 2)]) == 1.5  # a report was lost


def test_reports_of_no_new_step_time_nothing():
  moving = [(0.0, 0), (1.0, 1), (2.0, 2)]
  assert timed([*moving, (2.9, 2), (3.0, 3)]) == 1.0


def test_one_stall_does_not_multiply_the_step_time():
  before = [(0.0, 0), (1.0, 1), (2.0, 2)]
  assert timed([*before, (102.0, 3)]) == 1.5
  assert timed([*before, (2.5, 3)]) == 0.75  # but it falls at once


def test_what_a_member_holds_and_has_done_comes_from_its_report():
  member = claim(Membership(LEASE_S, {}))
  assert member.holds(1) == NO_VERSION
  assert not member.drained
  assert not member.has_work
  held = (Version(1, 4), Version(1, 5))
  header = CopyHeader(CopyId(1, 1, 6, 0, 0), held[0], 0, 0, 0)
  member.report = report(3, held, (header,), Stage.DRAINED)
  member.copies = {Version(1, 6): header}
  assert member.holds(1) == Version(1, 5)
  assert member.drained
  assert not member.has_work  # a copy of no steps is none
