"""When chips leave and come back: everything that the job does not decide.

Absences are drawn beforehand, job by job, as arrays. What they do to a job is
told by `stops`.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoupled.simulate.scenario import Failures, Scenario

DAY_S = 86400.0

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Absences(NamedTuple):
  """Spells of failed or serviced hosts; all arrays are [E].

  Attributes:
    start: seconds, when they leave.
    end: seconds, when they are back; may lie beyond the simulated time.
    job: whose they are.
    slice: index of their slice within the job.
    hosts: how many hosts of that slice.
    planned: announced beforehand.
  """

  start: Floats
  end: Floats
  job: Ints
  slice: Ints
  hosts: Ints
  planned: NDArray[np.bool_]


class Spells(NamedTuple):
  """Slow spells: seconds, seconds and the job that is slowed; all [E]."""

  start: Floats
  end: Floats
  job: Ints


def absences(scenario: Scenario, rng: np.random.Generator) -> Absences:
  """Draws every absence that begins within the simulated time."""
  parts = []
  for job, chips in enumerate(scenario.sizes):
    parts.append(_single(scenario, job, chips, rng))
    parts.extend(_groups(scenario, job, chips, rng))
  parts.extend(_maintenance(scenario))
  return Absences(
    *(np.concatenate(column) for column in zip(*parts, strict=True))
  )


def slow_spells(scenario: Scenario, rng: np.random.Generator) -> Spells:
  """Draws the stragglers' spells."""
  rule = scenario.failures.stragglers
  horizon = scenario.days * DAY_S
  starts, jobs = [], []
  for job, chips in enumerate(scenario.sizes):
    count = rng.poisson(chips * scenario.days / rule.mtbi_chip_days)
    starts.append(rng.uniform(0.0, horizon, count))
    jobs.append(np.full(count, job))
  start = np.concatenate(starts)
  end = start + rng.exponential(rule.lasts_s, len(start))
  return Spells(start, end, np.concatenate(jobs))


def _single(
  scenario: Scenario, job: int, chips: int, rng: np.random.Generator
) -> Absences:
  """Failures of single chips: a renewal process each, met in mid-life."""
  rule = scenario.failures
  horizon = scenario.days * DAY_S
  which, when = _first_failures(rule, chips, horizon, rng)
  starts: list[Floats] = []
  ends: list[Floats] = []
  slices: list[Ints] = []
  while len(when):
    back = when + _weibull(rule.return_s, rule.return_shape, len(when), rng)
    starts.append(when)
    ends.append(back)
    slices.append(which // scenario.slice_chips)
    mean = rule.mtbi_chip_days * DAY_S
    when = back + _weibull(mean, rule.shape, len(back), rng)
    again = when < horizon
    which, when = which[again], when[again]
  if not starts:
    return _absences([], [], job, [], 1, False)
  return _absences(
    np.concatenate(starts),
    np.concatenate(ends),
    job,
    np.concatenate(slices),
    1,
    False,
  )


def _first_failures(
  rule: Failures, chips: int, horizon: float, rng: np.random.Generator
) -> tuple[Ints, Floats]:
  """Chips that fail within the horizon, and when they do so first."""
  mean = rule.mtbi_chip_days * DAY_S
  if math.isinf(mean):
    return np.zeros(0, np.int64), np.zeros(0)
  if rule.shape == 1.0:
    # Without memory the few that fail can be drawn alone: a draw for each of
    # millions of chips would take longer than the simulation.
    share = -math.expm1(-horizon / mean)
    which = rng.choice(chips, rng.binomial(chips, share), replace=False)
    uniform = rng.random(len(which))
    return which, -mean * np.log1p(-uniform * share)
  # Residual life of a renewal process long after its start: a uniform share
  # of a length-biased life, and (life / scale) ** shape of such a life is
  # Gamma(1 + 1 / shape).
  scale = mean / math.gamma(1 + 1 / rule.shape)
  life = rng.standard_gamma(1 + 1 / rule.shape, chips) ** (1 / rule.shape)
  first = scale * life * rng.random(chips)
  which = np.flatnonzero(first < horizon)
  return which, first[which]


def _weibull(
  mean: float, shape: float, count: int, rng: np.random.Generator
) -> Floats:
  scale = mean / math.gamma(1 + 1 / shape)
  return np.asarray(scale * rng.weibull(shape, count), np.float64)


def _groups(
  scenario: Scenario, job: int, chips: int, rng: np.random.Generator
) -> list[Absences]:
  """Correlated failures: a Poisson process for each group."""
  found = []
  for rule in scenario.failures.correlated:
    groups = -(-chips // rule.chips)
    count = rng.poisson(groups * scenario.days / rule.mtbi_days)
    start = rng.uniform(0.0, scenario.days * DAY_S, count)
    end = start + rng.exponential(rule.return_s, count)
    group = rng.integers(0, groups, count)
    found.append(
      _spread(scenario, job, chips, rule.chips, group, start, end, False)
    )
  return found


def _maintenance(scenario: Scenario) -> list[Absences]:
  """Groups of all jobs leave in turn, evenly over each period."""
  found = []
  horizon = scenario.days * DAY_S
  for rule in scenario.failures.maintenance:
    if math.isinf(rule.every_days):
      continue
    every = rule.every_days * DAY_S
    groups = [-(-chips // rule.chips) for chips in scenario.sizes]
    before = 0
    for job, chips in enumerate(scenario.sizes):
      phase = (before + np.arange(groups[job]) + 0.5) / sum(groups) * every
      periods = np.arange(math.ceil(horizon / every)) * every
      start = (phase[:, None] + periods).ravel()
      group = np.repeat(np.arange(groups[job]), len(periods))
      inside = start < horizon
      start, group = start[inside], group[inside]
      end = start + rule.lasts_s
      found.append(
        _spread(scenario, job, chips, rule.chips, group, start, end, True)
      )
      before += groups[job]
  return found


def _spread(
  scenario: Scenario,
  job: int,
  chips: int,
  size: int,
  group: Ints,
  start: Floats,
  end: Floats,
  planned: bool,
) -> Absences:
  """One absence per slice that a group of `size` chips touches."""
  low = group * size
  high = np.minimum(low + size, chips)
  first = low // scenario.slice_chips
  count = -(-high // scenario.slice_chips) - first
  event = np.repeat(np.arange(len(group)), count)
  nth = np.arange(len(event)) - np.repeat(np.cumsum(count) - count, count)
  where = first[event] + nth
  begin = np.maximum(low[event], where * scenario.slice_chips)
  stop = np.minimum(high[event], (where + 1) * scenario.slice_chips)
  hosts = -(-(stop - begin) // scenario.chips_per_host)
  return _absences(start[event], end[event], job, where, hosts, planned)


def _absences(
  start: object,
  end: object,
  job: int,
  slice_: object,
  hosts: object,
  planned: bool,
) -> Absences:
  begin = np.asarray(start, np.float64)
  shape = begin.shape
  return Absences(
    begin,
    np.asarray(end, np.float64),
    np.full(shape, job, np.int64),
    np.asarray(slice_, np.int64),
    np.broadcast_to(np.asarray(hosts, np.int64), shape),
    np.full(shape, planned),
  )
