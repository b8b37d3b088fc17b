"""The free extra wait for more reports, and the estimates it rests on.

Waiting is free while the merged fragment still lands inside the overlap that
learners grant anyway. Equation 3 of the paper:

  slack = tau x step - (quorum_wait + sync)
  grace <= gamma x slack,   gamma < 1

where `step` is one inner step, `quorum_wait` the time from the opening of the
round to its quorum, and `sync` what pull, merge, outer step and broadcast take.
The window is never negative and never above `max_grace_rounds` rounds, and it
is 0 while anything it needs is unknown.

Everything works on scalars and on arrays alike; unknown is NaN.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from decoupled.algorithm.policy import Exchange


class Estimates(NamedTuple):
  """Running estimates, in seconds; NaN while unknown.

  Attributes:
    step_s: [...] inner step of the median live learner.
    sync_s: [...] from the closing of a round to its result at the learners.
    round_s: [...] running length of a round.
  """

  step_s: ArrayLike = np.nan
  sync_s: ArrayLike = np.nan
  round_s: ArrayLike = np.nan


def ema(
  old: ArrayLike, sample: ArrayLike, weight: ArrayLike
) -> NDArray[np.float64]:
  """Running mean: old + weight x (sample - old).

  The first known sample is taken whole; an unknown one (NaN) changes nothing.
  """
  before = np.asarray(old, np.float64)
  now = np.asarray(sample, np.float64)
  mixed = before + np.asarray(weight, np.float64) * (now - before)
  return np.where(np.isnan(now), before, np.where(np.isnan(before), now, mixed))


def grace_s(
  policy: Exchange,
  step_s: ArrayLike,
  quorum_wait_s: ArrayLike,
  sync_s: ArrayLike,
  round_s: ArrayLike,
) -> NDArray[np.float64]:
  """Seconds to wait beyond the quorum; arguments broadcast, see Equation 3."""
  step = np.asarray(step_s, np.float64)
  spent = np.asarray(quorum_wait_s, np.float64) + np.asarray(sync_s, np.float64)
  # Below quorum the wait is infinite; 0 x inf then counts as unknown.
  with np.errstate(invalid="ignore"):
    free = policy.gamma * (policy.tau * step - spent)
    most = policy.max_grace_rounds * np.asarray(round_s, np.float64)
  unknown = np.isnan(free) | np.isnan(most)
  return np.where(unknown, 0.0, np.clip(free, 0.0, np.maximum(most, 0.0)))
