"""When rounds open and which fragment each of them visits.

Rounds count from 1 and round r visits fragment (r - 1) mod P. A round lasts
about H/P inner steps of the median live learner, so that every fragment is
visited once in H steps whatever the other learners do.
"""

import math

import numpy as np
from numpy.typing import ArrayLike


def fragment_of(round_number: int, P: int) -> int:
  """The fragment that a round (from 1) visits."""
  return (round_number - 1) % P


def max_open(tau: int, P: int, H: int) -> int:
  """Rounds that may be open at once: min(P, max(1, ceil(tau P / H))).

  At most P, so that no fragment is ever open twice.
  """
  return min(P, max(1, -(-tau * P // H)))


def round_floor_s(
  step_s: ArrayLike, alive: ArrayLike, H: int, P: int
) -> float | None:
  """Shortest time from the opening of one round to that of the next.

  Args:
    step_s: [M] running step times in seconds, NaN where unknown.
    alive: [M] bool.
    H: inner steps between two visits of a fragment.
    P: number of fragments.

  Returns:
    H/P times the median step time of the live learners that have an estimate
    (the lower one of an even number), or None where there is none yet.
  """
  step = median_step_s(step_s, alive)
  return None if math.isnan(step) else H / P * step


def median_step_s(step_s: ArrayLike, alive: ArrayLike) -> float:
  """Lower median of the live learners' known step times; NaN if none."""
  steps = np.asarray(step_s, np.float64)
  known = np.sort(steps[np.asarray(alive, bool) & ~np.isnan(steps)])
  return float(known[(len(known) - 1) // 2]) if len(known) else math.nan


def rounds_ahead(
  step_s: float,
  pace_s: float,
  next_open_in_s: float,
  limit: int,
  slack: float = 1.1,
) -> int:
  """How many rounds not yet open a slow learner must extract for right now.

  A learner whose step outlasts a round would find some rounds opened and
  closed again between two of its boundaries, always the same fragments where
  its step is a whole multiple of the pace. So it extracts early whatever will
  open before its next boundary, which is one step away.

  Args:
    step_s: its running step time in seconds; NaN or 0 while unknown.
    pace_s: running length of a round in seconds; NaN or 0 while unknown.
    next_open_in_s: seconds until the next round may open; less than 0 if due.
    limit: most rounds to look ahead.
    slack: how much longer than a round a step must be to count as slower.

  Returns:
    A number from 0 (not slower, or not known) to `limit`.
  """
  if not (pace_s > 0 and slack * pace_s < step_s < math.inf):
    return 0
  remaining = step_s - max(0.0, next_open_in_s)
  # A round that opens at the very boundary is found open there; the margin
  # keeps rounding of exact multiples from counting it.
  opening = math.ceil(remaining / pace_s - 1e-9)
  return max(0, min(limit, opening))


def common_step(rounds: int, H: int, P: int) -> int:
  """The run's step of the learning-rate schedule: rounds x H/P."""
  return rounds * H // P
