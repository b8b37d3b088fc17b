"""Rounds open in turn, at a pace that no slow learner falls out of."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled.algorithm.schedule import (
  common_step,
  fragment_of,
  max_open,
  median_step_s,
  round_floor_s,
  rounds_ahead,
)

NAN = math.nan


def test_rounds_count_from_one_and_visit_every_fragment_in_turn():
  assert [fragment_of(r, 3) for r in range(1, 8)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
  ("tau", "P", "H", "expected"),
  [
    (2, 24, 24, 2),
    (0, 24, 24, 1),
    (2, 1, 1, 1),  # a fragment is never open twice
    (2, 12, 24, 1),
    (3, 12, 24, 2),  # ceil(1.5)
    (100, 6, 24, 6),
  ],
)
def test_open_rounds_cover_the_overlap(tau, P, H, expected):
  assert max_open(tau, P, H) == expected


@given(st.integers(0, 200), st.integers(1, 50), st.integers(1, 10))
def test_open_rounds_never_reach_a_fragment_twice(tau, P, multiple):
  limit = max_open(tau, P, P * multiple)
  assert 1 <= limit <= P
  assert len({fragment_of(r, P) for r in range(7, 7 + limit)}) == limit


def test_floor_follows_the_lower_median_of_live_learners():
  steps = [0.1, 0.2, 0.3, 0.4, NAN, 9.0]
  alive = [True] * 5 + [False]
  assert median_step_s(steps, alive) == 0.2
  assert round_floor_s(steps, alive, H=24, P=12) == 0.4
  assert round_floor_s(steps[:3], alive[:3], H=5, P=5) == 0.2


def test_no_floor_before_anybody_was_timed():
  assert round_floor_s([NAN, NAN], [True, True], 24, 24) is None
  assert round_floor_s([0.1], [False], 24, 24) is None
  assert round_floor_s([], [], 24, 24) is None


@pytest.mark.parametrize(
  ("step", "pace", "next_open", "limit", "expected"),
  [
    (1.0, 1.0, 0.5, 9, 0),  # at the pace
    (1.1, 1.0, 0.0, 9, 0),  # within the slack
    (2.0, 1.0, 0.5, 9, 2),  # opens at 0.5 and 1.5
    (2.0, 1.0, 0.0, 9, 2),  # 0 and 1; the one at 2 is found open there
    (3.0, 1.0, 0.25, 9, 3),
    (4.0, 1.0, 0.5, 2, 2),  # limit
    (2.0, 1.0, 2.5, 9, 0),  # nothing opens in time
    (2.0, 1.0, -7.0, 9, 2),  # due already
    (0.3, 0.1, 0.0, 9, 3),  # 0.3 / 0.1 is a little below 3 in floats
    (0.6, 0.1, 0.0, 9, 6),  # ... and this one above 5
    (NAN, 1.0, 0.0, 9, 0),
    (2.0, NAN, 0.0, 9, 0),
    (2.0, 0.0, 0.0, 9, 0),
    (math.inf, 1.0, 0.0, 9, 0),
    (2.0, 1.0, 0.0, 0, 0),
  ],
)
def test_rounds_ahead(step, pace, next_open, limit, expected):
  assert rounds_ahead(step, pace, next_open, limit) == expected


@given(
  slower=st.sampled_from((1.25, 1.5, 2, 3, 4, 7)),
  phase=st.integers(0, 15),
  life=st.sampled_from((0.25, 0.5, 1.0)),
)
@settings(max_examples=100, deadline=None)
def test_a_slow_learner_extracts_for_every_round(slower, phase, life):
  """Round k opens at phase + k and closes `life` later; boundaries are
  `slower` apart. Without looking ahead whole fragments would be missed."""
  first = phase / 16
  covered = set()
  boundary = 0.0
  while boundary < 40:
    upcoming = max(0, math.ceil(boundary - first + 1e-12))
    if first + upcoming <= boundary:
      upcoming += 1
    covered |= {
      k for k in range(upcoming) if first + k <= boundary < first + k + life
    }
    ahead = rounds_ahead(slower, 1.0, first + upcoming - boundary, limit=8)
    covered |= set(range(upcoming, upcoming + ahead))
    boundary += slower
  assert set(range(30)) <= covered


@pytest.mark.parametrize(
  ("rounds", "H", "P", "expected"),
  [(0, 24, 24, 0), (7, 24, 24, 7), (7, 6, 2, 21)],
)
def test_common_step(rounds, H, P, expected):
  assert common_step(rounds, H, P) == expected
