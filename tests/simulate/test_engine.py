"""The fast engine against closed forms, a slow one, and itself."""

import dataclasses
import math

import numpy as np
import pytest

from decoupled.algorithm.policy import Exchange
from decoupled.simulate import engine
from decoupled.simulate.engine import repeat, simulate
from decoupled.simulate.failures import DAY_S, absences
from decoupled.simulate.result import POLICIES
from decoupled.simulate.scenario import (
  Correlated,
  Failures,
  Maintenance,
  Recovery,
  Scenario,
  Stragglers,
)
from tests.simulate import literal

NEVER = Failures(mtbi_chip_days=math.inf)
# One interruption in 200 s.
BUSY = Scenario(
  policy="dp_elastic",
  chips=8192,
  learners=8,
  days=2.0,
  slice_chips=1,
  chips_per_host=1,
  failures=Failures(mtbi_chip_days=8192 * 200 / DAY_S, return_s=300.0),
  sampled_rounds=100,
)
EVERYTHING = Scenario(
  chips=1003,
  learners=4,
  quorum=3,
  days=3.0,
  chips_per_host=4,
  slice_chips=16,
  speed_spread=0.05,
  failures=Failures(
    mtbi_chip_days=20.0,
    shape=0.8,
    return_s=1200.0,
    correlated=(Correlated(chips=64, mtbi_days=10.0),),
    maintenance=(Maintenance(chips=100, every_days=1.0, lasts_s=1800.0),),
    stragglers=Stragglers(mtbi_chip_days=100.0),
  ),
  recovery=Recovery(
    detect_s=5.0, checkpoint_interval_s=60.0, growth=0.05, growth_from=100
  ),
  sampled_rounds=100,
)


def with_policy(scenario, policy, **changes):
  return dataclasses.replace(scenario, policy=policy, **changes)


# Closed forms


@pytest.mark.parametrize("policy", POLICIES)
def test_without_failures_everything_is_useful(policy):
  found = simulate(with_policy(BUSY, policy, failures=NEVER, quorum=8))
  assert found.goodput == pytest.approx(1.0)
  assert found.uptime == pytest.approx(1.0)
  assert found.participation == pytest.approx(1.0)
  assert sum(found.wasted.values()) == pytest.approx(0.0, abs=1e-6)


def test_one_failing_chip_alternates_between_life_and_return():
  life, away, up = 900.0, 100.0, 30.0
  found = simulate(
    Scenario(
      policy="dp_elastic",
      chips=1,
      learners=1,
      days=100.0,
      step_s=1e-6,  # nothing to speak of is lost with the last chip
      failures=Failures(mtbi_chip_days=life / DAY_S, return_s=away),
      recovery=Recovery(scale_down_s=0.0, scale_up_s=up),
    )
  )
  expected = life * math.exp(-up / life) / (life + away)
  assert found.goodput == pytest.approx(expected, abs=0.01)
  assert found.wasted["away"] / found.total_chip_h == pytest.approx(
    away / (life + away), abs=0.01
  )


def test_a_rigid_job_loses_one_restart_per_failure_that_finds_it_running():
  recovery = Recovery(restart_s=100.0)
  found = repeat(with_policy(BUSY, "dp_rigid", recovery=recovery), 4)
  # Poisson events of one in 200 s, those within a restart handled by it.
  assert found.goodput == pytest.approx(1 / (1 + 100 / 200), abs=0.015)


def test_an_elastic_job_stops_for_failures_and_for_returns():
  recovery = Recovery(scale_down_s=20.0, scale_up_s=10.0, rejoin_s=0.0)
  found = repeat(with_policy(BUSY, "dp_elastic", recovery=recovery), 4)
  assert found.goodput == pytest.approx(1 / (1 + 30 / 200), abs=0.01)


def test_rollback_is_half_a_checkpoint_interval_where_failures_are_rare():
  recovery = Recovery(restart_s=0.0, checkpoint_interval_s=20.0)
  found = repeat(with_policy(BUSY, "dp_rigid", recovery=recovery), 4)
  # Of a life X with mean m the part X mod c: m - c / (exp(c / m) - 1).
  lost = 200 - 20 / math.expm1(20 / 200)
  assert lost == pytest.approx(20 / 2, rel=0.05)
  share = found.wasted["lost"] / found.total_chip_h
  assert share == pytest.approx(lost / 200, abs=0.005)


@pytest.mark.parametrize("learners", [2, 8])
def test_m_learners_on_n_chips_are_one_elastic_job_on_n_over_m(learners):
  whole = repeat(with_policy(BUSY, "decoupled", learners=learners), 4)
  part = repeat(dataclasses.replace(BUSY, chips=8192 // learners), 8)
  assert whole.goodput == pytest.approx(part.goodput, abs=0.01)


def test_lock_step_needs_all_learners_at_once():
  part = repeat(dataclasses.replace(BUSY, chips=8192 // 4), 6)
  whole = repeat(with_policy(BUSY, "diloco", learners=4), 6)
  assert whole.goodput == pytest.approx(part.uptime**4, abs=0.015)
  free = repeat(with_policy(BUSY, "decoupled", learners=4), 6)
  assert free.uptime == pytest.approx(1 - (1 - part.uptime) ** 4, abs=0.005)
  assert free.uptime > free.goodput > whole.goodput


def test_a_quorum_lies_between_nobody_and_lock_step():
  found = [
    repeat(with_policy(BUSY, "decoupled", learners=4, quorum=k), 3).goodput
    for k in (1, 2, 3, 4)
  ]
  assert found == sorted(found, reverse=True)
  assert found[-1] == repeat(with_policy(BUSY, "diloco", learners=4), 3).goodput


def test_fast_learners_wait_for_the_slowest_only_under_a_full_quorum():
  job = Scenario(learners=4, speeds=(1.0, 1.0, 1.0, 2.0), failures=NEVER)
  assert simulate(job).goodput == pytest.approx(1.0)
  full = simulate(dataclasses.replace(job, quorum=4))
  assert full.goodput == pytest.approx((3 * 0.5 + 1) / 4)
  assert full.wasted["quorum"] == pytest.approx(3 / 8 * full.total_chip_h)
  assert full.round_s == pytest.approx(2.0)


def test_a_straggler_slows_its_learner_alone():
  slow = Stragglers(mtbi_chip_days=20.0, slowdown=2.0, lasts_s=600.0)
  job = Scenario(
    chips=64,
    learners=4,
    days=20.0,
    failures=dataclasses.replace(NEVER, stragglers=slow),
  )
  # A learner of 16 chips is slow unless no chip is: Poisson occupancy.
  expected = -0.5 * math.expm1(-16 * 600.0 / (20.0 * DAY_S))
  found = repeat(job, 4)
  assert found.wasted["slow"] / found.total_chip_h == pytest.approx(
    expected, rel=0.15
  )
  assert found.wasted["quorum"] == pytest.approx(0.0)


# The slow one


@pytest.mark.parametrize("standbys", [0, 3])
@pytest.mark.parametrize(
  ("policy", "quorum"),
  [("dp_rigid", 1), ("dp_elastic", 1), ("diloco", 1), ("decoupled", 3)],
)
def test_agrees_with_a_simulation_tick_by_tick(policy, quorum, standbys):
  job = Scenario(
    policy=policy,
    chips=130,
    learners=4,
    quorum=quorum,
    standbys=standbys,
    chips_per_host=2,
    slice_chips=8,
    days=0.1,
    step_s=1e-3,
    failures=Failures(
      mtbi_chip_days=0.15,
      return_s=400.0,
      correlated=(Correlated(chips=16, mtbi_days=1.0, return_s=300.0),),
    ),
    recovery=Recovery(
      restart_s=70.0, scale_down_s=15.0, scale_up_s=25.0, rejoin_s=40.0
    ),
    sampled_rounds=10,
  )
  for seed in range(2):
    gone = absences(job, np.random.default_rng(seed))
    expected = literal.goodput(job, gone, tick=0.5)
    assert simulate(job, seed).goodput == pytest.approx(expected, abs=0.01)


# Itself


@pytest.mark.parametrize("standbys", [0, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_useful_and_wasted_add_up_to_the_total(policy, standbys):
  found = simulate(with_policy(EVERYTHING, policy, standbys=standbys), 3)
  assert found.total_chip_h == pytest.approx(1003 * 72)
  assert found.useful_chip_h + sum(found.wasted.values()) == pytest.approx(
    found.total_chip_h
  )
  assert min(found.wasted.values()) >= -1e-6
  for cause in ("away", "serviced", "slow"):
    assert found.wasted[cause] > 0, cause
  assert 0 < found.goodput < found.uptime <= 1
  assert found.standby_chip_h == standbys * 4 * 72


def test_a_seed_is_a_simulation():
  assert simulate(EVERYTHING, 1).wasted == simulate(EVERYTHING, 1).wasted
  assert simulate(EVERYTHING, 1).wasted != simulate(EVERYTHING, 2).wasted
  assert repeat(EVERYTHING, 2, 5).goodput == repeat(EVERYTHING, 2, 5).goodput


def test_the_size_of_the_batches_of_states_changes_nothing(monkeypatch):
  expected = simulate(EVERYTHING, 4)
  monkeypatch.setattr(engine, "_CHUNK", 7)
  found = simulate(EVERYTHING, 4)
  assert found.wasted == pytest.approx(expected.wasted)
  assert found.participation == pytest.approx(expected.participation)


@pytest.mark.parametrize("policy", POLICIES)
def test_more_failures_never_help(policy):
  found = []
  for factor in (8, 4, 2, 1, 0.5):
    rule = dataclasses.replace(
      BUSY.failures, mtbi_chip_days=factor * BUSY.failures.mtbi_chip_days
    )
    job = with_policy(BUSY, policy, failures=rule, days=1.0)
    found.append(repeat(job, 2).goodput)
  assert found == sorted(found, reverse=True)
  assert found[0] - found[-1] > 0.03


def test_standbys_help_until_none_is_missing():
  rule = Failures(mtbi_chip_days=20.0, return_s=3600.0)
  job = Scenario(
    policy="dp_elastic", chips=1024, days=3.0, failures=rule, sampled_rounds=1
  )
  few, some, many = (
    repeat(dataclasses.replace(job, standbys=count), 3) for count in (0, 2, 40)
  )
  assert few.wasted["away"] > some.wasted["away"] > many.wasted["away"]
  assert many.wasted["away"] == 0
  assert many.goodput > some.goodput > few.goodput
  assert many.standby_chip_h == 40 * 4 * 72


def test_standbys_and_waste_are_paid_for_by_useful_tokens():
  job = dataclasses.replace(
    BUSY, standbys=16, price_chip_hour=2.0, tokens_per_chip_s=100.0
  )
  found = simulate(job)
  paid = 2.0 * (found.total_chip_h + found.standby_chip_h)
  tokens = found.useful_chip_h * 3600 * 100.0
  assert found.cost_per_token == pytest.approx(paid / tokens)
  assert math.isnan(simulate(BUSY).cost_per_token)


def test_intervals_hold_their_mean_and_shrink_with_repeats():
  few, many = repeat(BUSY, 3), repeat(BUSY, 12)
  for found in (few, many):
    assert found.goodput_low < found.goodput < found.goodput_high
  assert many.goodput_high - many.goodput_low < few.goodput_high - (
    few.goodput_low
  )
  one = repeat(BUSY, 1)
  assert one.goodput_low == one.goodput == one.goodput_high


# The algorithm decides


def test_rounds_are_decided_by_the_algorithm(monkeypatch):
  decide = engine.quorum.close_time

  def never(*arguments):
    decision = decide(*arguments)
    endless = np.full_like(decision.close_at, np.inf)
    return decision._replace(quorum_at=endless, close_at=endless)

  monkeypatch.setattr(engine.quorum, "close_time", never)
  found = simulate(with_policy(BUSY, "decoupled"))
  assert found.goodput == 0
  assert found.participation == 0


def test_grace_and_early_copies_bring_in_those_who_report_late():
  job = Scenario(
    learners=8, failures=NEVER, speeds=(1.0,) * 4 + (1.2,) * 4, days=0.1
  )
  paper = dataclasses.replace(job, early_slack=math.inf)
  alone = simulate(dataclasses.replace(paper, grace=False))
  assert alone.participation == pytest.approx(1 / 8)
  assert simulate(paper).participation > 0.9
  # The slower half extracts ahead and is merged without being waited for.
  early = simulate(dataclasses.replace(job, grace=False))
  assert 0.5 < early.participation < 0.7
  assert alone.merged_weight == pytest.approx(1 / 8)


def test_bandwidths_follow_from_size_codec_and_pace():
  job = Scenario(learners=8, failures=NEVER, params=24e9, days=0.1)
  found = simulate(job)
  assert found.learner_bps == pytest.approx(32e9)  # a billion float32 a second
  assert found.shard_bps == pytest.approx(32e9)  # 1/8 of 8 learners
  half = simulate(dataclasses.replace(job, exchange=Exchange(codec="bfloat16")))
  assert half.learner_bps == pytest.approx(16e9)
  uneven = simulate(dataclasses.replace(job, learners=5, quorum=1))
  assert uneven.shard_bps == pytest.approx(32e9 * 5 * 5 / 24)
  ring = simulate(dataclasses.replace(job, policy="dp_elastic"))
  assert ring.learner_bps == pytest.approx(2 * 7 / 8 * 24e9 * 32)
