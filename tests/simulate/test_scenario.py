"""What cannot be simulated is refused in one line with field and range."""

import math

import pytest

from decoupled.errors import ConfigError
from decoupled.simulate.scenario import (
  Correlated,
  Failures,
  Maintenance,
  Recovery,
  Scenario,
  Stragglers,
)


@pytest.mark.parametrize(
  ("make", "fields", "said"),
  [
    (Scenario, {"policy": "dp"}, ["Scenario.policy", "'dp'", "dp_elastic"]),
    (Scenario, {"chips": 0}, ["Scenario.chips", "0", "at least 1"]),
    (Scenario, {"chips": 1.5}, ["Scenario.chips", "1.5", "whole"]),
    (Scenario, {"learners": 0}, ["Scenario.learners", "0", "at least 1"]),
    (
      Scenario,
      {"chips": 4, "learners": 8},
      ["Scenario.learners = 8", "between 1", "Scenario.chips = 4"],
    ),
    (
      Scenario,
      {"learners": 4, "quorum": 5},
      ["Scenario.quorum = 5", "between 1", "Scenario.learners = 4"],
    ),
    (Scenario, {"quorum": 0}, ["Scenario.quorum", "0", "at least 1"]),
    (Scenario, {"standbys": -1}, ["Scenario.standbys", "-1", "at least 0"]),
    (Scenario, {"days": 0.0}, ["Scenario.days", "0.0", "above 0"]),
    (Scenario, {"days": math.inf}, ["Scenario.days", "inf", "finite"]),
    (Scenario, {"step_s": -1.0}, ["Scenario.step_s", "-1.0", "above 0"]),
    (Scenario, {"speed_spread": 0.5}, ["speed_spread", "0.5", "[0, 0.3)"]),
    (Scenario, {"speeds": (1.0,)}, ["Scenario.speeds", "1", "learners = 8"]),
    (
      Scenario,
      {"learners": 1, "speeds": (-1.0,)},
      ["Scenario.speeds", "-1.0", "above 0"],
    ),
    (Scenario, {"price_chip_hour": -2.0}, ["price_chip_hour", "-2.0"]),
    (Failures, {"mtbi_chip_days": 0.0}, ["mtbi_chip_days", "0.0", "above 0"]),
    (Failures, {"mtbi_chip_days": -3.0}, ["mtbi_chip_days", "-3.0"]),
    (Failures, {"mtbi_chip_days": math.nan}, ["mtbi_chip_days", "nan"]),
    (Failures, {"return_s": 0.0}, ["Failures.return_s", "0.0", "above 0"]),
    (Failures, {"shape": -1.0}, ["Failures.shape", "-1.0", "above 0"]),
    (Recovery, {"restart_s": -1.0}, ["Recovery.restart_s", "-1.0"]),
    (Recovery, {"detect_s": math.nan}, ["Recovery.detect_s", "nan"]),
    (
      Correlated,
      {"chips": 8, "mtbi_days": 0.0},
      ["Correlated.mtbi_days", "0.0", "above 0"],
    ),
    (
      Maintenance,
      {"chips": 8, "every_days": 0.01, "lasts_s": 900.0},
      ["Maintenance.lasts_s = 900.0", "every_days = 0.01", "864 s"],
    ),
    (
      Scenario,
      {"days": 1000.0, "chips": 2_400_000},
      ["Scenario.days = 1000", "6.57e+06 failures", "days up to 304"],
    ),
    (Stragglers, {"slowdown": 0.5}, ["Stragglers.slowdown", "0.5", "1"]),
  ],
)
def test_bad_values_are_refused_in_one_line(make, fields, said):
  with pytest.raises(ConfigError) as refused:
    make(**fields)
  line = str(refused.value)
  assert "\n" not in line
  for part in said:
    assert part in line


def test_chips_are_shared_out_among_learners():
  assert Scenario(chips=10, learners=4).sizes == (3, 3, 2, 2)
  assert Scenario(policy="dp_rigid", chips=10, learners=4).sizes == (10,)


def test_each_policy_waits_for_its_quorum():
  assert Scenario(learners=8, quorum=3).rule.quorum == 3
  assert Scenario(policy="diloco", learners=8).rule.quorum == 8
  assert Scenario(policy="dp_elastic", learners=8).rule.quorum == 1
  assert Scenario(grace=False).rule.max_grace_rounds == 0
