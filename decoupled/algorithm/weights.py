"""How much each contribution counts.

w = tokens x (tokens / steps) = tokens^2 / steps, counted since the learner last
adopted the fragment: the quantity of data times the mean batch, which stands
for the quality of the direction (a larger batch has a smaller variance).
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

LARGEST_COUNT = 2**53  # beyond it float64 no longer counts exactly


def token_weights(tokens: ArrayLike, steps: ArrayLike) -> NDArray[np.float64]:
  """tokens^2 / steps in float64, 0 where no step was taken.

  Args:
    tokens: [...] tokens since the last adoption.
    steps: [...] inner steps since then.
  """
  count = np.asarray(tokens, np.float64)
  taken = np.asarray(steps, np.float64)
  return np.where(taken > 0, count * count / np.where(taken > 0, taken, 1), 0.0)


def check_counters(tokens: float, steps: float) -> str:
  """Says what is wrong with a contribution's counters; "" if nothing is."""
  for name, value in (("tokens", tokens), ("steps", steps)):
    if not math.isfinite(value):
      return f"{name} = {value} is not finite"
    if value < 0:
      return f"{name} = {value} is negative"
    if value > LARGEST_COUNT:
      return f"{name} = {value} is above 2**53"
  if tokens > 0 and steps == 0:
    return f"tokens = {tokens} without a step (steps = 0)"
  return ""
