"""What came out of a simulated job, and of several."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
_T_MORE = 2.1


@dataclasses.dataclass(frozen=True)
class Outcome:
  """One simulation. Conservation: useful + sum of wasted = total.

  Attributes:
    goodput: share of the training chips' time spent on work that counts.
    uptime: share of the time in which somebody makes progress.
    wasted: chip-hours by cause: `restart`, `scale_down`, `scale_up`, `swap`
      (standing still), `away` (failed, and the rest of their slices),
      `serviced` (maintenance), `quorum` (waiting for other learners), `slow`
      (waiting for a straggler), `lost` (work thrown away).
    useful_chip_h: chip-hours of work that counts.
    total_chip_h: chip-hours of the training chips, without standbys.
    participation: mean over rounds of merged learners / live learners; 1 for
      the data-parallel policies.
    merged_weight: the same of token weights.
    round_s: mean length of a round.
    learner_bps: bits per second that a learner sends, and receives.
    shard_bps: bits per second that the busiest syncer shard receives.
    standby_chip_h: chip-hours of the standbys.
    cost_per_token: price of training and standby chips per useful token; NaN
      without a price or a speed.
    interruptions: absences that began.
  """

  goodput: float
  uptime: float
  wasted: dict[str, float]
  useful_chip_h: float
  total_chip_h: float
  participation: float
  merged_weight: float
  round_s: float
  learner_bps: float
  shard_bps: float
  standby_chip_h: float
  cost_per_token: float
  interruptions: float


@dataclasses.dataclass(frozen=True)
class Summary(Outcome):
  """Means of several simulations with 95 % intervals of the means.

  Attributes:
    repeats: how many. The intervals of a single one are points.
    goodput_low: lower end; likewise the others.
  """

  repeats: int
  goodput_low: float
  goodput_high: float
  uptime_low: float
  uptime_high: float
  participation_low: float
  participation_high: float


def summarize(outcomes: Sequence[Outcome]) -> Summary:
  """Means over at least one outcome, field by field."""
  means = {
    field.name: _mean([getattr(o, field.name) for o in outcomes])
    for field in dataclasses.fields(Outcome)
    if field.name != "wasted"
  }
  wasted = {
    cause: _mean([o.wasted[cause] for o in outcomes])
    for cause in outcomes[0].wasted
  }
  ends = {}
  for name in ("goodput", "uptime", "participation"):
    half = _half_interval([getattr(o, name) for o in outcomes])
    ends[f"{name}_low"] = max(0.0, means[name] - half)
    ends[f"{name}_high"] = min(1.0, means[name] + half)
  return Summary(**means, wasted=wasted, repeats=len(outcomes), **ends)


def _mean(values: Sequence[float]) -> float:
  return float(np.mean(values))


def _half_interval(values: Sequence[float]) -> float:
  count = len(values)
  if count < 2:
    return 0.0
  quantile = _T[count - 2] if count - 2 < len(_T) else _T_MORE
  return quantile * float(np.std(values, ddof=1)) / math.sqrt(count)
