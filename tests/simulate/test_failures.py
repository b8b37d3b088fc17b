"""Absences: how many, when, and where."""

import dataclasses
import math

import numpy as np
import pytest

from decoupled.simulate.failures import DAY_S, absences, slow_spells
from decoupled.simulate.scenario import (
  Correlated,
  Failures,
  Maintenance,
  Scenario,
  Stragglers,
)

NEVER = Failures(mtbi_chip_days=math.inf)


def drawn(rule, seed=0, **fields):
  job = Scenario(failures=rule, **fields)
  return absences(job, np.random.default_rng(seed))


@pytest.mark.parametrize("shape", [0.6, 1.0, 2.5])
def test_chips_fail_at_one_rate_from_the_first_day_to_the_last(shape):
  rule = Failures(mtbi_chip_days=10.0, shape=shape, return_s=0.1)
  gone = drawn(rule, chips=20_000, learners=4, days=20.0)
  per_day, _ = np.histogram(gone.start, bins=20, range=(0, 20 * DAY_S))
  assert per_day == pytest.approx(np.full(20, 2000.0), rel=0.1)
  assert per_day.mean() == pytest.approx(2000.0, rel=0.015)
  assert np.bincount(gone.job) == pytest.approx(np.full(4, 10_000), rel=0.05)


def test_the_life_of_a_chip_begins_with_its_return():
  rule = Failures(mtbi_chip_days=1.0, return_s=3 * DAY_S)
  gone = drawn(rule, chips=1000, learners=1, days=400.0, slice_chips=1)
  assert len(gone.start) == pytest.approx(1000 * 400 / 4, rel=0.02)
  order = np.lexsort((gone.start, gone.slice))
  same = np.diff(gone.slice[order]) == 0
  assert np.all(gone.start[order][1:][same] >= gone.end[order][:-1][same])


@pytest.mark.parametrize("shape", [0.7, 1.0, 3.0])
def test_returns_take_their_mean_whatever_the_shape(shape):
  rule = Failures(mtbi_chip_days=1.0, return_s=500.0, return_shape=shape)
  gone = drawn(rule, chips=5000, days=5.0)
  assert np.mean(gone.end - gone.start) == pytest.approx(500.0, rel=0.03)


def test_chips_belong_to_slices_in_order():
  rule = Failures(mtbi_chip_days=0.1)
  gone = drawn(rule, chips=100, learners=1, days=5.0, slice_chips=16)
  assert set(gone.slice.tolist()) == set(range(7))
  # The last slice has 4 chips of 16.
  counts = np.bincount(gone.slice)
  assert counts[6] / counts[:6].mean() == pytest.approx(4 / 16, rel=0.3)


def test_a_group_takes_all_slices_that_it_touches_at_once():
  rule = dataclasses.replace(
    NEVER, correlated=(Correlated(chips=24, mtbi_days=1.0, return_s=100.0),)
  )
  gone = drawn(
    rule, chips=64, learners=1, days=50.0, slice_chips=16, chips_per_host=4
  )
  groups = {}
  for start, index, hosts in zip(
    gone.start, gone.slice, gone.hosts, strict=True
  ):
    groups.setdefault(float(start), []).append((int(index), int(hosts)))
  # Chips 0-23, 24-47, 48-63, cut at 16, 32 and 48; hosts of four chips.
  assert {tuple(sorted(found)) for found in groups.values()} == {
    ((0, 4), (1, 2)),
    ((1, 2), (2, 4)),
    ((3, 4),),
  }
  assert len(groups) == pytest.approx(3 * 50, rel=0.25)


def test_maintenance_comes_round_in_turn():
  rule = dataclasses.replace(
    NEVER,
    maintenance=(Maintenance(chips=32, every_days=2.0, lasts_s=600.0),),
  )
  gone = drawn(rule, chips=128, learners=2, days=4.0, slice_chips=32)
  assert sorted(gone.start / DAY_S) == pytest.approx(
    [0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.25, 3.75]
  )
  assert np.all(gone.planned)
  assert np.allclose(gone.end - gone.start, 600.0)


def test_slow_spells_are_as_many_as_chips_make_them():
  rule = dataclasses.replace(
    NEVER, stragglers=Stragglers(mtbi_chip_days=10.0, lasts_s=60.0)
  )
  job = Scenario(failures=rule, chips=1000, learners=2, days=30.0)
  spells = slow_spells(job, np.random.default_rng(0))
  assert len(spells.start) == pytest.approx(3000, rel=0.06)
  assert np.mean(spells.end - spells.start) == pytest.approx(60.0, rel=0.06)
