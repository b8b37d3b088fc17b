"""Simulates a job from one state change to the next.

Between two changes nothing happens but rounds, all alike: their pace and
quorum are decided once per state, for many states in one call, by the same
`decoupled.algorithm` that the syncer runs. Who is merged is decided the same
way on rounds sampled over the whole time.

Below its quorum a round stays open, and here learners then wait for it, as the
published goodput of K = M implies. The program itself lets them go on until
`Exchange.max_unsynced_steps`: a quorum above 1 costs it less than is shown.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoupled.algorithm import quorum, schedule, weights
from decoupled.algorithm.grace import Estimates
from decoupled.simulate import stops, traffic
from decoupled.simulate.failures import (
  DAY_S,
  Floats,
  absences,
  slow_spells,
)
from decoupled.simulate.outcome import Outcome, Summary, summarize
from decoupled.simulate.scenario import Scenario

_CHUNK = 8192  # states that are looked at together; bounds the memory
_SLOWEST_DRAW = 0.1  # of the nominal step: deviations are cut off there


def simulate(scenario: Scenario, seed: int = 0) -> Outcome:
  """One simulated job; the same seed gives the same outcome."""
  rng = np.random.default_rng(seed)
  gone = absences(scenario, rng)
  changes = stops.changes(scenario, gone, slow_spells(scenario, rng))
  pace = _Pace(scenario, rng)
  horizon = scenario.days * DAY_S
  sample_at = np.sort(rng.uniform(0.0, horizon, scenario.sampled_rounds))
  tally = _Tally()
  sampled = []
  for states in _states(scenario, changes, pace):
    tally.add(scenario, states)
    sampled.append(states.at(sample_at))
  rounds = _rounds(scenario, _joined(sampled), rng)
  return _outcome(scenario, tally, rounds, len(gone.start))


def repeat(scenario: Scenario, repeats: int = 5, seed: int = 0) -> Summary:
  """Means and 95 % intervals over independent simulations."""
  children = np.random.SeedSequence(seed).spawn(repeats)
  seeds = [int(child.generate_state(1, np.uint64)[0]) for child in children]
  return summarize([simulate(scenario, each) for each in seeds])


class _Pace:
  """Step times of all learners over time, but for slow spells."""

  def __init__(self, scenario: Scenario, rng: np.random.Generator):
    jobs = scenario.jobs
    speeds = np.asarray(scenario.speeds or (1.0,) * jobs, np.float64)
    # A data-parallel job waits for the slowest of its parts.
    speeds = np.full(jobs, speeds.max()) if jobs < len(speeds) else speeds
    horizon = scenario.days * DAY_S
    spread = scenario.speed_spread
    holds = math.ceil(horizon / scenario.speed_hold_s) if spread else 1
    draws = 1.0 + spread * rng.standard_normal((holds, jobs))
    self.step_s = scenario.step_s * speeds * np.maximum(draws, _SLOWEST_DRAW)
    self._hold_s = scenario.speed_hold_s if spread else math.inf
    self.changes = np.arange(1, holds) * scenario.speed_hold_s

  def at(self, time: Floats) -> Floats:
    """[S, M] quiet step times in the holds that begin by `time` [S]."""
    hold = np.minimum(time / self._hold_s, len(self.step_s) - 1)
    return self.step_s[hold.astype(np.int64)]


class _States(NamedTuple):
  """States in order of time; S states, M jobs.

  Attributes:
    begin, end: [S] seconds.
    chips: [S, M] chips present.
    away, serviced: [S, M] chips absent.
    stop: [S, M] index in `stops.STOPS`; 0 = running.
    lost: [S, M] bool, what is done now is thrown away later.
    quiet_s: [S, M] step time without slow spells.
    step_s: [S, M] step time.
  """

  begin: Floats
  end: Floats
  chips: NDArray[np.int64]
  away: NDArray[np.int64]
  serviced: NDArray[np.int64]
  stop: NDArray[np.int64]
  lost: NDArray[np.bool_]
  quiet_s: Floats
  step_s: Floats

  @property
  def running(self) -> NDArray[np.bool_]:
    return np.asarray((self.stop == 0) & (self.chips > 0))

  def at(self, times: Floats) -> "_States":
    """The states in force at those of the sorted `times` that fall here."""
    low, high = np.searchsorted(times, [self.begin[0], self.end[-1]])
    index = np.searchsorted(self.end, times[low:high], side="right")
    return _States._make(field[index] for field in self)


def _joined(parts: list[_States]) -> _States:
  columns = zip(*parts, strict=True)
  return _States._make(np.concatenate(column) for column in columns)


def _states(
  scenario: Scenario, changes: stops.Changes, pace: _Pace
) -> Iterator[_States]:
  """All states of the job, some thousands at a time."""
  horizon = scenario.days * DAY_S
  jobs, fields = scenario.jobs, len(stops.FIELDS)
  # Speed changes, and the start, are changes of nothing else.
  mark = np.concatenate([[0.0], pace.changes])
  order = np.argsort(np.concatenate([changes.time, mark]), kind="stable")
  column = changes.field * jobs + changes.job
  column = np.concatenate([column, np.zeros(len(mark), np.int64)])[order]
  delta = np.concatenate([changes.delta, np.zeros(len(mark), np.int64)])[order]
  time = np.concatenate([changes.time, mark])[order]
  keep = time < horizon
  time, column, delta = time[keep], column[keep], delta[keep]
  ends = np.append(time[1:], horizon)
  sizes = np.asarray(scenario.sizes, np.int64)
  slowdown = scenario.failures.stragglers.slowdown
  carry = np.zeros(fields * jobs, np.int64)
  for low in range(0, len(time), _CHUNK):
    part = slice(low, low + _CHUNK)
    count = len(time[part])
    table = np.zeros((count, fields * jobs), np.int64)
    table[np.arange(count), column[part]] = delta[part]
    table[0] += carry
    np.cumsum(table, axis=0, out=table)
    carry = table[-1].copy()
    state = table.reshape(count, fields, jobs)
    quiet = pace.at(time[part])
    slow = np.where(state[:, stops.SLOW] > 0, slowdown, 1.0)
    away, serviced = state[:, stops.AWAY], state[:, stops.SERVICED]
    yield _States(
      begin=time[part],
      end=ends[part],
      chips=sizes - away - serviced,
      away=away,
      serviced=serviced,
      stop=state[:, stops.STOP],
      lost=state[:, stops.LOST] > 0,
      quiet_s=quiet,
      step_s=quiet * slow,
    )


class _Tally:
  """Chip-seconds by what they were spent on, and seconds of progress."""

  def __init__(self) -> None:
    self.useful = 0.0
    self.progress_s = 0.0
    self.wasted = dict.fromkeys(
      (*stops.STOPS[1:], "away", "serviced", "quorum", "slow", "lost"), 0.0
    )

  def add(self, scenario: Scenario, states: _States) -> None:
    length = states.end - states.begin
    running = states.running
    # Nobody gains on the pace for long, since a result must arrive within tau
    # steps; below K nobody goes on at all.
    pace_s = _pace_s(scenario, states)[:, None]
    actual = np.maximum(states.step_s, pace_s)
    work = np.where(running, length[:, None] * states.chips, 0.0)
    done = work * (states.quiet_s / actual)
    unhindered = work * (states.quiet_s / states.step_s)
    kept = np.where(states.lost, 0.0, done)
    self.useful += float(kept.sum())
    self.progress_s += float(length @ (done > 0).any(axis=1))
    wasted = self.wasted
    wasted["lost"] += float(done.sum() - kept.sum())
    wasted["quorum"] += float(unhindered.sum() - done.sum())
    wasted["slow"] += float(work.sum() - unhindered.sum())
    wasted["away"] += float((length @ states.away).sum())
    wasted["serviced"] += float((length @ states.serviced).sum())
    still = np.bincount(
      states.stop.ravel(),
      weights=(length[:, None] * states.chips).ravel(),
      minlength=len(stops.STOPS),
    )
    for kind, name in enumerate(stops.STOPS):
      if kind:
        wasted[name] += float(still[kind])


def _pace_s(scenario: Scenario, states: _States) -> Floats:
  """[S] seconds per step at which rounds reach their quorum; inf: never.

  Where all start a step as a round opens, the quorum stands after the K-th
  fastest step.
  """
  opened = np.zeros(len(states.begin))
  return quorum.close_time(
    opened, states.step_s, states.running, Estimates(), scenario.rule
  ).quorum_at


class _Rounds(NamedTuple):
  """Means over sampled rounds: merged/live learners, their weights, length."""

  participation: float
  merged_weight: float
  round_s: float


def _rounds(
  scenario: Scenario, states: _States, rng: np.random.Generator
) -> _Rounds:
  """Decides rounds that open at random moments of the learners' steps."""
  rule = scenario.rule
  alive, step_s = states.running, states.step_s
  each = list(zip(step_s, alive, strict=True))
  median = np.asarray([schedule.median_step_s(*pair) for pair in each])
  floors = [schedule.round_floor_s(*pair, rule.H, rule.P) for pair in each]
  floor = np.asarray(floors, np.float64)  # None becomes NaN
  # A report follows the end of the step that is under way at the opening.
  reports = rng.random(step_s.shape) * step_s
  decided = quorum.close_time(
    np.zeros(len(floor)),
    reports,
    alive,
    Estimates(median, scenario.sync_s, floor),
    rule,
  )
  close_at = decided.close_at[:, None]
  merged = alive & ((reports <= close_at) | _early(scenario, step_s, floor))
  closed = np.isfinite(decided.close_at)
  if not closed.any():
    return _Rounds(0.0, 0.0, math.nan)
  tokens = states.chips * rule.H * alive
  weight = weights.token_weights(tokens, np.full_like(tokens, rule.H))
  length = np.maximum(floor, rule.H / rule.P * _pace_s(scenario, states))
  return _Rounds(
    _ratio(merged[closed], alive[closed]),
    _ratio((merged * weight)[closed], weight[closed]),
    float(length[closed].mean()),
  )


def _early(
  scenario: Scenario, step_s: Floats, floor: Floats
) -> NDArray[np.bool_]:
  """[S, M] who holds a copy of the round before it opens, being slower."""
  if not math.isfinite(scenario.early_slack):
    return np.zeros(step_s.shape, bool)
  limit = scenario.rule.P
  return np.asarray(
    [
      [
        schedule.rounds_ahead(one, pace, 0.0, limit, scenario.early_slack) > 0
        for one in steps
      ]
      for steps, pace in zip(step_s.tolist(), floor.tolist(), strict=True)
    ]
  )


def _ratio(part: NDArray[np.generic], whole: NDArray[np.generic]) -> float:
  """Mean over rounds of sum(part) / sum(whole)."""
  return float(np.mean(part.sum(axis=1) / whole.sum(axis=1)))


def _outcome(
  scenario: Scenario, tally: _Tally, rounds: _Rounds, interruptions: int
) -> Outcome:
  hours = scenario.days * 24
  total = scenario.chips * hours
  useful = tally.useful / 3600
  standby = scenario.standbys * scenario.chips_per_host * hours
  tokens = tally.useful * scenario.tokens_per_chip_s
  price = scenario.price_chip_hour
  bits = traffic.CODEC_BITS[scenario.exchange.codec]
  rule, params = scenario.rule, scenario.params
  if scenario.policy.startswith("dp_"):
    learner = shard = traffic.data_parallel_bps(
      params, bits, scenario.learners, scenario.step_s
    )
  else:
    learner = traffic.learner_bps(params, bits, rule, rounds.round_s)
    shard = traffic.shard_bps(
      params, bits, rule, rounds.round_s, scenario.learners
    )
  return Outcome(
    goodput=useful / total,
    uptime=tally.progress_s / (hours * 3600),
    wasted={cause: used / 3600 for cause, used in tally.wasted.items()},
    useful_chip_h=useful,
    total_chip_h=total,
    participation=rounds.participation,
    merged_weight=rounds.merged_weight,
    round_s=rounds.round_s,
    learner_bps=learner,
    shard_bps=shard,
    standby_chip_h=standby,
    cost_per_token=(
      (total + standby) * price / tokens if tokens and price else math.nan
    ),
    interruptions=float(interruptions),
  )
