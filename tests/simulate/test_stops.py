"""What single absences do to a job, told second by second."""

import math

import numpy as np
import pytest

from decoupled.simulate import stops
from decoupled.simulate.failures import Absences, Spells
from decoupled.simulate.scenario import Failures, Recovery, Scenario

NONE = Spells(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
RECOVERY = Recovery(
  detect_s=1.0,
  restart_s=50.0,
  scale_down_s=9.0,
  scale_up_s=20.0,
  swap_s=4.0,
  rejoin_s=60.0,
)


def told(*events, policy="dp_elastic", standbys=0, planned=False, **changes):
  """(time, field, delta) of all changes; events are (start, end, slice)."""
  job = Scenario(
    policy=policy,
    chips=changes.pop("chips", 12),
    learners=1,
    standbys=standbys,
    chips_per_host=4,
    slice_chips=4,
    days=0.1,
    failures=Failures(mtbi_chip_days=math.inf),
    recovery=changes.pop("recovery", RECOVERY),
  )
  start, end, where = np.array(events, np.float64).T
  count = len(start)
  gone = Absences(
    start,
    end,
    np.zeros(count, np.int64),
    where.astype(np.int64),
    np.ones(count, np.int64),
    np.full(count, planned),
  )
  found = stops.changes(job, gone, NONE)
  return [
    (time, stops.FIELDS[field], delta)
    for time, field, delta in zip(
      found.time.tolist(),
      found.field.tolist(),
      found.delta.tolist(),
      strict=True,
    )
  ]


def stopped(changes):
  """[(begin, end, kind)] of all stops."""
  ends = [t for t, field, delta in changes if field == "stop" and delta < 0]
  begins = [(t, d) for t, field, d in changes if field == "stop" and d > 0]
  return [
    (t, end, stops.STOPS[kind])
    for (t, kind), end in zip(begins, ends, strict=True)
  ]


def chips(changes, field="away"):
  """[(time, chips)] as they leave and join."""
  return [(t, -delta) for t, name, delta in changes if name == field]


def test_an_elastic_job_goes_on_with_less_and_takes_back_what_returns():
  found = told((100.0, 500.0, 1))
  assert stopped(found) == [
    (100.0, 110.0, "scale_down"),
    (560.0, 580.0, "scale_up"),
  ]
  assert chips(found) == [(100.0, -4), (560.0, 4)]


def test_one_stop_handles_what_happens_until_it_ends():
  found = told((100.0, 500.0, 1), (105.0, 109.0, 2))
  assert stopped(found)[0] == (100.0, 110.0, "scale_down")
  assert len(stopped(found)) == 2  # the second is for slice 1 alone
  assert chips(found)[:3] == [(100.0, -4), (105.0, -4), (109.0, 4)]


def test_returned_chips_ride_on_a_stop_that_happens_anyway():
  found = told((100.0, 500.0, 1), (530.0, 2000.0, 2))
  assert stopped(found)[1] == (530.0, 540.0, "scale_down")
  assert (530.0, 4) in chips(found)
  assert len(stopped(found)) == 3  # down, down, up for slice 2


def test_several_returns_make_one_stop():
  found = told((100.0, 500.0, 1), (300.0, 540.0, 2))
  assert stopped(found)[2:] == [(560.0, 580.0, "scale_up")]


def test_a_job_without_chips_takes_the_first_at_once():
  found = told((100.0, 500.0, 0), chips=4)
  assert stopped(found)[1] == (500.0, 520.0, "scale_up")
  # and has lost half of H = 24 steps of one second
  assert [(t, d) for t, f, d in found if f == "lost"] == [
    (88.0, 1),
    (100.0, -1),
  ]


def test_a_rigid_job_restarts_for_chips_once_that_is_worth_it():
  found = told((100.0, 500.0, 1), policy="dp_rigid")
  # A restart costs 50 s x 12 chips, doing without them 4 chips.
  assert stopped(found) == [
    (100.0, 151.0, "restart"),
    (650.0, 700.0, "restart"),
  ]
  both = told((100.0, 500.0, 1), (200.0, 575.0, 2), policy="dp_rigid")
  # 75 s x 4 chips, then 37.5 s x 8 chips.
  assert stopped(both)[2] == (612.5, 662.5, "restart")


def test_a_standby_takes_the_place_and_the_returned_host_becomes_one():
  found = told((100.0, 500.0, 1), (600.0, 900.0, 2), standbys=1)
  assert stopped(found) == [(100.0, 105.0, "swap"), (600.0, 605.0, "swap")]
  assert chips(found) == []


def test_a_free_standby_serves_the_slice_that_waits_longest():
  found = told(
    (100.0, 500.0, 0), (200.0, 9000.0, 1), (300.0, 9500.0, 2), standbys=1
  )
  # At 500 s the host of slice 0 takes the place in slice 1.
  assert (560.0, 4) in chips(found)
  assert (560.0, 580.0, "scale_up") in stopped(found)
  # At 9000 s the host of slice 1 comes free and serves slice 2.
  assert [t for t, delta in chips(found) if delta > 0] == [560.0, 9060.0]


def test_a_slice_is_out_until_its_last_host_is_back():
  found = told((100.0, 500.0, 1), (200.0, 800.0, 1))
  assert chips(found) == [(100.0, -4), (860.0, 4)]
  assert len(stopped(found)) == 2


def test_planned_absences_need_no_detection_and_lose_nothing():
  found = told((100.0, 500.0, 0), planned=True, chips=4)
  assert stopped(found)[0] == (100.0, 109.0, "scale_down")
  assert chips(found, "serviced") == [(100.0, -4), (500.0, 4)]
  assert not [row for row in found if row[1] == "lost"]


def test_a_rigid_job_rolls_back_to_its_last_checkpoint():
  recovery = Recovery(restart_s=50.0, checkpoint_interval_s=30.0)
  found = told((100.0, 110.0, 1), policy="dp_rigid", recovery=recovery)
  assert [(t, d) for t, f, d in found if f == "lost"] == [
    (90.0, 1),
    (100.0, -1),
  ]


def test_stops_grow_with_the_job():
  rule = Recovery(growth=0.5, growth_from=1000, scale_down_s=10.0)
  job = Scenario(policy="dp_elastic", recovery=rule, learners=1)
  assert stops.times(job, 1000).down == pytest.approx(10.0)
  assert stops.times(job, 4000).down == pytest.approx(20.0)
  assert stops.times(job, 200).down == 0.0
