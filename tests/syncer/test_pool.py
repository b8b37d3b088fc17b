"""Who takes the id of a dead learner, and that it is always one."""

import dataclasses

import pytest

from decoupled.algorithm.policy import Exchange, Outer
from decoupled.errors import Refused
from decoupled.launch.in_memory import Recorder
from decoupled.syncer.membership import Membership
from decoupled.syncer.pool import Pool
from decoupled.syncer.rounds import Plan, Rounds
from decoupled.syncer.settings import Limits
from decoupled.types import HANDED_OVER, Hello, Phase, Standing, TensorSpec

LIMITS = Limits(lease_s=5.0)
PROGRAM = (("devices", "2 x cpu"), ("jax", "0.10.2"))
TENSORS = (TensorSpec("w", (4,), "float32"), TensorSpec("v", (4,), "float32"))


def standing(number, missing="", program=PROGRAM, **changes):
  return Standing(
    f"standby/{number}",
    f"h:9{number}",
    "",
    (),
    program,
    "abc",
    missing,
    **changes,
  )


class Run:
  """Learners that claim and lose ids, beside a pool."""

  def __init__(self, learners=(0, 1)):
    self.membership = Membership(LIMITS.lease_s, {})
    self.events = Recorder()
    self.pool = Pool(LIMITS, self.events)
    for learner in learners:
      self.claim(0.0, learner, f"h:{learner}")

  def claim(self, now, learner, holder, previous=0, program=PROGRAM):
    hello = Hello(learner, holder, "", (), previous=previous, program=program)
    self.pool.check(hello)
    member = self.membership.claim(now, hello)
    self.pool.claimed(now, member, hello)
    return member

  def lose(self, now, learner, why="closed", detail=""):
    member = self.membership.live[learner]
    self.membership.remove(learner)
    self.pool.lost(now, member, why, detail)
    self.pool.tick(now)

  def offered(self, number):
    offer = self.pool.offer(number)
    return None if offer is None else offer.learner_id

  def decided(self):
    return [(e["learner"], e["standby"]) for e in self.events.of("decided")]


def test_the_one_that_has_been_ready_longest_takes_over():
  run = Run()
  first = run.pool.entered(1.0, standing(0, "it compiles"))
  second = run.pool.entered(2.0, standing(1))
  run.pool.said(3.0, first, standing(0))
  run.lose(4.0, 1)
  assert [run.offered(n) for n in (first, second)] == [None, 1]
  member = run.claim(4.1, 1, "h:91")
  assert member.incarnation == 2
  [promoted] = run.events.of("promoted")
  assert (promoted["learner"], promoted["standby"]) == (1, "standby/1")
  # it is a learner now, and no standby
  assert [s.name for s in run.pool.status(5.0)] == ["standby/0"]
  assert run.pool.vacancies(5.0) == ()


@pytest.mark.parametrize(
  ("why", "detail", "taken"),
  [
    ("closed", "its control connection closed", True),
    ("lease", "silent", True),
    ("left", "stopped by SIGTERM", True),
    ("left", "stopped by SIGINT", False),
    ("left", "", False),
    ("drained", "ended", False),
  ],
)
def test_only_who_was_not_told_to_stay_away_is_replaced(why, detail, taken):
  run = Run()
  number = run.pool.entered(1.0, standing(0))
  run.lose(2.0, 0, why, detail)
  assert run.offered(number) == (0 if taken else None)


def test_one_that_dies_or_says_nothing_while_promoted_loses_to_the_next():
  run = Run()
  numbers = [run.pool.entered(1.0, standing(n)) for n in range(3)]
  run.lose(2.0, 0)
  assert run.offered(numbers[0]) == 0
  run.pool.gone(2.5, numbers[0], "its connection closed")
  assert run.offered(numbers[1]) == 0
  for now in (4.0, 6.0, 8.0):
    for n in (1, 2):
      run.pool.said(now, numbers[n], standing(n))
  # it lives, but has not claimed the id within its lease
  assert run.pool.wake_at() == 13.0
  assert [run.offered(n) for n in numbers[1:]] == [None, 0]
  # the late one may still be the first: there is one owner, not none
  run.claim(8.5, 0, "h:91")
  assert run.offered(numbers[2]) is None
  with pytest.raises(Refused, match="is held by h:91"):
    run.claim(8.6, 0, "h:92")
  run.pool.said(9.0, numbers[2], standing(2, declined=3))
  run.lose(9.5, 1)
  assert run.offered(numbers[2]) == 1


def test_fewer_standbys_than_dead_learners_is_a_queue():
  run = Run((0, 1, 2))
  number = run.pool.entered(1.0, standing(0))
  run.lose(2.0, 2)
  run.lose(2.0, 0)
  run.lose(2.0, 1)
  assert run.offered(number) == 2
  assert run.decided() == [(2, "standby/0"), (0, None), (1, None)]
  assert run.pool.reserved == {2}
  said = run.pool.vacancies(3.0)
  assert [line.split(":")[0][:9] for line in said] == [
    *("learner 0", "learner 1", "learner 2")
  ]
  assert "no standby is free: standby/0 (h:90) takes over another" in said[0]
  assert "standby/0 (h:90) takes it over" in said[2]
  run.claim(3.0, 2, "h:90")
  # another one comes late, and is not ready at first
  late = run.pool.entered(4.0, standing(1, "it compiles"))
  assert run.offered(late) is None
  assert (
    "standby/1 (h:91) is not ready: it compiles" in (run.pool.vacancies(4.0)[0])
  )
  run.pool.said(5.0, late, standing(1))
  assert run.offered(late) == 0


def test_another_program_is_not_ready_for_it_and_says_why():
  run = Run()
  other = (("devices", "2 x cpu"), ("jax", "0.12.0"))
  number = run.pool.entered(1.0, standing(0, program=other))
  run.lose(2.0, 0)
  assert run.offered(number) is None
  [line] = run.pool.vacancies(2.0)
  assert "standby/0 (h:90) has jax = 0.12.0, learner 0 had 0.10.2" in line
  fits = run.pool.entered(3.0, standing(1))
  assert run.offered(fits) == 0


def test_the_original_that_comes_back_first_keeps_its_id():
  run = Run()
  number = run.pool.entered(1.0, standing(0))
  run.lose(2.0, 0)
  run.claim(2.1, 0, "h:0", previous=1)
  assert run.offered(number) is None
  with pytest.raises(Refused, match="is held by h:0"):
    run.claim(2.2, 0, "h:90")
  assert [s.name for s in run.pool.status(3.0)] == ["standby/0"]


def test_the_original_that_comes_back_second_hears_why_it_is_refused():
  run = Run()
  run.pool.entered(1.0, standing(0))
  run.lose(2.0, 0)
  assert run.claim(2.1, 0, "h:90").incarnation == 2
  with pytest.raises(Refused) as caught:
    run.claim(9.0, 0, "h:0", previous=1)
  assert caught.value.reason == "replaced"
  # also once the successor has gone; it itself may come back
  run.lose(9.5, 0)
  with pytest.raises(Refused, match="took learner 0 over from incarnation 1"):
    run.claim(9.6, 0, "h:0", previous=1)
  assert run.claim(9.7, 0, "h:90", previous=2).incarnation == 3


def test_one_that_is_silent_leaves_the_pool():
  run = Run()
  number = run.pool.entered(1.0, standing(0))
  assert run.pool.wake_at() == 6.0
  run.pool.tick(6.0)
  assert run.pool.status(6.0) == ()
  with pytest.raises(Refused, match="silent for 5 s"):
    run.pool.said(6.1, number, standing(0))
  with pytest.raises(Refused, match="silent for 5 s"):
    run.pool.offer(number)
  assert run.events.of("standby")[-1]["state"] == "gone"


def rounds(learners=1):
  return Rounds(
    Plan("r", learners=learners, contract=(("Exchange.H", "4"),)),
    Exchange(H=4, P=2),
    Outer(),
    LIMITS,
    1,
    Recorder(),
  )


def test_a_standby_of_another_run_or_contract_is_refused():
  run = rounds()
  good = standing(0)
  assert run.enter_pool(0.0, good) == 1
  other = dataclasses.replace(good, contract=(("Exchange.H", "8"),))
  with pytest.raises(Refused, match=r"Exchange\.H = 8 at h:90.* = 4"):
    run.enter_pool(0.0, other)
  with pytest.raises(Refused, match="belongs to run q, this syncer serves"):
    run.enter_pool(0.0, dataclasses.replace(good, run_id="q"))


def test_a_run_does_not_end_or_drain_into_a_promotion():
  run = rounds()
  number = run.enter_pool(0.0, standing(0))
  welcome = run.hello(0.0, Hello(0, "h:0", "", TENSORS, program=PROGRAM))
  run.disconnected(1.0, 0, welcome.incarnation, "closed")
  assert run.pool.offer(number).learner_id == 0
  # nobody else gets the id that is spoken for
  other = run.hello(1.1, Hello(-1, "h:5", "", TENSORS, program=PROGRAM))
  assert other.learner_id == 1
  run.drain(1.2, "enough")
  assert run.pool.offer(number) is None
  run.disconnected(1.3, 1, other.incarnation, "closed")
  assert run.pool.offer(number) is None
  assert run.phase is Phase.ENDED


# --- planned swaps ---------------------------------------------------------


class Planned(Run):
  """A run in which learners have stepped, and may be handed over."""

  def __init__(self, learners=(0, 1)):
    self.told = []
    super().__init__(learners)
    self.pool = Pool(LIMITS, self.events, relieve=self.told.append)
    for learner in learners:
      self.membership.remove(learner)
      self.claim(0.0, learner, f"h:{learner}")

  def claim(self, now, learner, holder, previous=0, program=PROGRAM):
    member = super().claim(now, learner, holder, previous, program)
    member.gives_state = member.stepped = True
    return member

  def plan(self, now, learner):
    return self.pool.swap(now, self.membership.live[learner])

  def states(self):
    return [e["state"] for e in self.events.of("handover")]


def test_a_standby_prepares_while_the_learner_trains_and_then_takes_its_id():
  run = Planned()
  number = run.pool.entered(1.0, standing(0))
  plan = run.plan(2.0, 1)
  incarnation = run.membership.live[1].incarnation
  offer = run.pool.offer(number)
  assert (offer.learner_id, offer.prepare) == (1, incarnation)
  assert not run.pool.relieved(1)
  assert "learner 1 is handed over to standby/0" in run.pool.vacancies(2.0)[0]
  run.pool.said(3.0, number, standing(0, prepared=offer.number))
  assert run.pool.relieved(1)
  assert run.told == [1]
  run.lose(4.0, 1, "left", HANDED_OVER)
  # the same offer, to be claimed now
  assert run.pool.offer(number) == offer._replace(prepare=0)
  assert plan.over is None
  member = run.claim(4.1, 1, "h:90")
  assert member.incarnation == incarnation + 1
  assert plan.over == ""
  assert run.states() == ["preparing", "prepared", "done"]
  with pytest.raises(Refused, match="standby took learner 1 over"):
    run.claim(5.0, 1, "h:1", previous=incarnation)


def test_a_learner_that_dies_while_its_standby_prepares_is_replaced_by_it():
  run = Planned()
  numbers = [run.pool.entered(1.0, standing(n)) for n in range(2)]
  plan = run.plan(2.0, 0)
  run.lose(2.5, 0)
  assert [run.offered(n) for n in numbers] == [0, None]
  # and if that one dies, too, by the next
  run.pool.gone(3.0, numbers[0], "its connection closed")
  assert "waits for the next standby" in plan.over
  assert run.offered(numbers[1]) == 0


@pytest.mark.parametrize("how", ["gone", "declined", "silent", "late"])
def test_a_plan_whose_standby_fails_leaves_the_learner_where_it_is(how):
  run = Planned()
  number = run.pool.entered(1.0, standing(0))
  plan = run.plan(2.0, 0)
  offer = run.pool.offer(number)
  if how == "gone":
    run.pool.gone(3.0, number, "its connection closed")
  elif how == "declined":
    run.pool.said(3.0, number, standing(0, declined=offer.number))
    assert run.pool.offer(number) is None
  elif how == "silent":
    run.pool.tick(6.0)
  else:
    for now in range(3, 40):
      run.pool.said(float(now), number, standing(0))
  assert "learner 0 is not swapped" in plan.over
  assert not run.pool.relieved(0)
  assert run.states() == ["preparing", "given_up"]
  assert run.pool.vacancies(50.0) == ()


def test_a_death_needs_a_standby_more_than_a_plan_does():
  run = Planned()
  number = run.pool.entered(1.0, standing(0))
  plan = run.plan(2.0, 0)
  run.lose(3.0, 1)
  assert "learner 1 has died" in plan.over
  assert run.offered(number) == 1
  assert run.pool.offer(number).prepare == 0


def test_what_cannot_be_swapped_is_refused_with_the_reason():
  run = Planned()
  with pytest.raises(Refused, match="trains on: there is no standby"):
    run.plan(1.0, 0)
  number = run.pool.entered(1.0, standing(0, "it compiles"))
  with pytest.raises(Refused, match=r"standby/0 .* is not ready: it compiles"):
    run.plan(1.0, 0)
  other = (("devices", "2 x cpu"), ("jax", "0.12.0"))
  run.pool.said(1.5, number, standing(0, program=other))
  with pytest.raises(Refused, match=r"has jax = 0\.12\.0, learner 0 had 0\.10"):
    run.plan(2.0, 0)
  run.pool.said(2.5, number, standing(0))
  run.membership.live[0].stepped = False
  with pytest.raises(Refused, match="has not finished a step"):
    run.plan(3.0, 0)
  run.membership.live[0].hosts = 2
  with pytest.raises(Refused, match="has 2 hosts"):
    run.plan(3.0, 0)
  run.plan(3.0, 1)
  with pytest.raises(Refused, match="already being swapped: standby/0"):
    run.plan(3.5, 1)


def test_the_end_of_the_run_gives_plans_up():
  run = Planned()
  run.pool.entered(1.0, standing(0))
  plan = run.plan(2.0, 0)
  run.pool.close()
  assert "the run ends" in plan.over


@pytest.mark.parametrize(
  ("key", "value"),
  [("devices", "4 x cpu"), ("jax", "0.12.0"), ("jaxlib", "0.12.0")],
)
def test_what_differs_of_a_program_is_named_with_both_sides(key, value):
  run = Run()
  program = (*((k, v) for k, v in PROGRAM if k != key), (key, value))
  number = run.pool.entered(1.0, standing(0, program=program))
  run.lose(2.0, 0)
  assert run.offered(number) is None
  had = dict(PROGRAM).get(key, "nothing")
  assert (
    f"has {key} = {value}, learner 0 had {had}" in (run.pool.vacancies(3.0)[0])
  )
