"""When the faults of a plan come due."""

from hypothesis import given
from hypothesis import strategies as st

from decoupled.chaos.plan import parse
from decoupled.chaos.schedule import Schedule


def due(schedule, now_s, rounds=0):
  return [str(fault) for fault in schedule.due(now_s, rounds)]


def test_each_fault_comes_once_and_not_early():
  plan = parse("kill learner/1 @5s; kill learner/0 @2s; kill learner/2 @3r")
  schedule = Schedule(plan, 3, seed=0)
  assert schedule.next_at_s == 2
  assert due(schedule, 1.9) == []
  assert due(schedule, 2.0) == ["kill learner/0 @2s"]
  assert due(schedule, 4.0, rounds=2) == []
  assert schedule.waits_for_round
  assert due(schedule, 9.0, rounds=4) == [
    "kill learner/1 @5s",
    "kill learner/2 @3r",
  ]
  assert due(schedule, 99.0, rounds=99) == []
  assert not schedule.waits_for_round
  assert schedule.next_at_s == float("inf")


def test_a_continued_run_does_not_repeat_the_faults_of_earlier_rounds():
  plan = parse("kill learner/1 @150r; kill learner/1 @700r")
  schedule = Schedule(plan, 3, seed=0, rounds_before=600)
  assert due(schedule, 1.0, rounds=600) == []
  assert due(schedule, 2.0, rounds=700) == ["kill learner/1 @700r"]


@given(st.integers(0, 99), st.integers(1, 5))
def test_a_storm_is_decided_by_its_seed(seed, learners):
  storm = parse(f"storm 3600/h for 50s seed {seed}")
  at_once = Schedule(storm, learners, seed=1).due(100.0, 0)
  schedule, bit_by_bit = Schedule(storm, learners, seed=2), []
  for now_s in range(101):
    bit_by_bit += schedule.due(float(now_s), 0)
  assert at_once == bit_by_bit
  assert all(fault.at <= 50 for fault in at_once)
  assert all(0 <= fault.target.index < learners for fault in at_once)


def test_a_storm_has_about_its_rate():
  faults = Schedule(parse("storm 3600/h"), 4, seed=3).due(2000.0, 0)
  assert 1800 < len(faults) < 2200
  counts = [sum(f.target.index == i for f in faults) for i in range(4)]
  assert min(counts) > 400
