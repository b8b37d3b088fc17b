"""Finds a set-up: learners, quorum, standbys, codec and H.

Codec and H follow from the link, the number of standbys from a closed form;
learners and quorum, and whether the standbys pay, from simulations.
"""

import dataclasses
import math
from typing import Any

from decoupled.errors import ConfigError
from decoupled.simulate import engine, link_budget, projection
from decoupled.simulate.outcome import Summary
from decoupled.simulate.plan import Choice, Plan, Point
from decoupled.simulate.scenario import Scenario

_MOST_LEARNERS = 64
# Twice the learners have to save this share of the price to be worth it: each
# then has half the chips, hence half the batch or twice the step.
_WORTH = 0.01
# Goodput that a larger quorum may cost.
_FREE = 0.0002
# Simulated failures per figure beyond which its interval is narrow enough.
_FAILURES = 5_000


class _Simulations:
  """Points of the curve; the same set-up is simulated once."""

  def __init__(self, scenario: Scenario, repeats: int, seed: int):
    self.scenario, self.repeats, self.seed = scenario, repeats, seed
    self.points: list[Point] = []

  def at(self, **changes: Any) -> Point:
    """The figures of the scenario with these changes."""
    scenario = dataclasses.replace(self.scenario, **changes)
    for point in self.points:
      if _key(point) == _key(scenario):
        return point
    summary = engine.repeat(scenario, self.repeats, self.seed)
    self.points.append(_point(scenario, summary))
    return self.points[-1]


def plan(
  scenario: Scenario,
  link_gbps: float,
  *,
  repeats: int | None = None,
  seed: int = 0,
  quick: bool = False,
) -> Plan:
  """Recommends a set-up for a job.

  Args:
    scenario: chips, failures, recovery and prices; its policy, learners,
      quorum and standbys are what is looked for.
    link_gbps: of one learner to the syncer, each way.
    repeats: simulations a point is averaged over (None = 3).
    seed: of all of them.
    quick: fewer points and shorter simulations.

  Raises:
    ConfigError: a link that carries nothing.
  """
  if not (math.isfinite(link_gbps) and link_gbps > 0):
    raise ConfigError(
      f"--link_gbps={link_gbps:g} must be above 0 and finite (Gbit/s)"
    )
  exchange, wire, warnings = link_budget.fitted(scenario, link_gbps)
  base = dataclasses.replace(
    scenario,
    policy="decoupled",
    learners=1,
    quorum=1,
    standbys=0,
    exchange=exchange,
    days=_days(scenario, quick),
    price_chip_hour=scenario.price_chip_hour or 1.0,
  )
  simulations = _Simulations(base, repeats or (1 if quick else 3), seed)
  learners = _learners(simulations, 8 if quick else _MOST_LEARNERS)
  standbys = _standbys(simulations, int(learners.value))
  # A failure that costs little wants fewer learners, hence another pool.
  fewer = _fewer(simulations, int(learners.value), int(standbys.value))
  if fewer is not None:
    learners = fewer
    standbys = _standbys(simulations, int(fewer.value))
  many, spare = int(learners.value), int(standbys.value)
  quorum = _quorum(simulations, many, spare)
  best = simulations.at(learners=many, standbys=spare, quorum=int(quorum.value))
  for policy in ("dp_elastic", "dp_rigid"):  # what it is an improvement on
    simulations.at(policy=policy)
  if best.goodput < 0.5:
    warnings.append(
      f"goodput is {100 * best.goodput:.0f} %: chips fail faster than the job "
      "recovers; shorten Recovery, or use fewer chips"
    )
  return Plan(
    choices=(learners, quorum, standbys, *wire),
    curve=tuple(simulations.points),
    chosen=simulations.points.index(best),
    bindings=(
      f"Exchange.quorum={quorum.value}",
      f"Exchange.H={exchange.H}",
      f"Exchange.P={exchange.P}",
      f"Exchange.codec={exchange.codec}",
    ),
    inputs={
      "chips": float(scenario.chips),
      "mtbi_days": scenario.failures.mtbi_chip_days,
      "repair_h": scenario.failures.return_s / 3600,
      "price": base.price_chip_hour,
      "link_gbps": link_gbps,
      "step_s": scenario.step_s,
      "params": scenario.params,
      "simulated_days": base.days,
      "repeats": float(simulations.repeats),
    },
    warnings=tuple(warnings),
  )


def _learners(simulations: _Simulations, most: int) -> Choice:
  scenario = simulations.scenario
  most = min(most, max(1, scenario.chips // scenario.chips_per_host))
  best = simulations.at(learners=1)
  while (many := 2 * best.learners) <= most:
    twice = simulations.at(learners=many)
    saved = 1 - twice.price / best.price
    if saved < _WORTH:
      reason = (
        f"goodput {_percent(best)}; {many} would save {100 * saved:.1f} % "
        f"more, less than {100 * _WORTH:.0f} %, and halve each learner"
      )
      return Choice("learners", str(best.learners), reason)
    best = twice
  reason = f"goodput {_percent(best)}; more were not tried"
  return Choice("learners", str(best.learners), reason)


def _fewer(
  simulations: _Simulations, learners: int, standbys: int
) -> Choice | None:
  """Fewer learners where, with standbys, that costs next to nothing."""
  chosen, saved = learners, 0.0
  while standbys and chosen > 1:
    twice = simulations.at(learners=chosen, standbys=standbys)
    half = simulations.at(learners=chosen // 2, standbys=standbys)
    if 1 - twice.price / half.price >= _WORTH:
      break
    chosen, saved = chosen // 2, 1 - twice.price / half.price
  if chosen == learners:
    return None
  point = simulations.at(learners=chosen, standbys=standbys)
  return Choice(
    "learners",
    str(chosen),
    f"goodput {_percent(point)} with standbys; {2 * chosen} would save "
    f"{100 * saved:.1f} % more, less than {100 * _WORTH:.0f} %, and halve "
    "each learner",
  )


def _standbys(simulations: _Simulations, learners: int) -> Choice:
  scenario = simulations.scenario
  failures, recovery = scenario.failures, scenario.recovery
  size = scenario.chips // learners
  per_s = scenario.chips / (failures.mtbi_chip_days * 86_400)
  # A swap instead of a stop to shrink and, unless another stop of the learner
  # comes first, one to grow; meanwhile the failed host's slice would be idle.
  alone = math.exp(-per_s / learners * recovery.rejoin_s)
  stop_s = recovery.scale_down_s + alone * recovery.scale_up_s - recovery.swap_s
  saved = (
    size * stop_s * recovery.factor(size)
    + min(scenario.slice_chips, size) * failures.return_s
  )
  without = simulations.at(learners=learners)
  if per_s == 0 or saved <= 0:
    return Choice("standbys", "0", "a swap is no quicker than going on without")
  count, served = projection.best_pool(
    per_s, failures.return_s, saved, scenario.chips_per_host
  )
  if count == 0:
    reason = "one that waits costs more chip time than it saves"
    return Choice("standbys", "0", reason)
  best, tried = without, [count, *[2 * count, count // 2] * (count > 1)]
  for standbys in tried:
    point = simulations.at(learners=learners, standbys=standbys)
    if point.price < best.price:
      best = point
  if best.standbys == 0:
    reason = (
      f"{count} would meet {100 * served:.0f} % of failures, but in the "
      f"simulation they cost more than they save (goodput {_percent(without)} "
      "without)"
    )
    return Choice("standbys", "0", reason)
  saving = 100 * (1 - best.price / without.price)
  reason = (
    f"goodput {_percent(best)}, {_percent(without)} without; "
    f"{saving:.1f} % cheaper a useful chip-hour; the closed form says {count}, "
    f"for {100 * served:.0f} % of failures"
  )
  return Choice("standbys", str(best.standbys), reason)


def _quorum(simulations: _Simulations, learners: int, standbys: int) -> Choice:
  one = simulations.at(learners=learners, standbys=standbys)
  if learners == 1:
    return Choice("quorum", "1", "there is one learner")
  lost = 0.0
  chosen, refused = one, 0
  for quorum in sorted({learners // 4, learners // 2, learners - 1, learners}):
    if quorum <= 1:
      continue
    point = simulations.at(learners=learners, standbys=standbys, quorum=quorum)
    if one.goodput - point.goodput > _FREE:
      lost, refused = one.goodput - point.goodput, quorum
      break
    chosen = point
  reason = f"with grace {100 * chosen.participation:.0f} % take part in a merge"
  if refused:
    reason += (
      f"; a quorum of {refused} would make learners wait for absent ones and "
      f"cost {100 * lost:.1f} points of goodput"
    )
  else:
    reason += ", and waiting for all costs nothing"
  return Choice("quorum", str(chosen.quorum), reason)


def _key(setup: Point | Scenario) -> tuple[str, int, int, int]:
  return setup.policy, setup.learners, setup.quorum, setup.standbys


def _point(scenario: Scenario, summary: Summary) -> Point:
  spare = scenario.standbys * scenario.chips_per_host
  paid = (scenario.chips + spare) / scenario.chips
  return Point(
    *_key(scenario),
    goodput=summary.goodput,
    low=summary.goodput_low,
    high=summary.goodput_high,
    uptime=summary.uptime,
    participation=summary.participation,
    price=scenario.price_chip_hour * paid / max(summary.goodput, 1e-9),
  )


def _days(scenario: Scenario, quick: bool) -> float:
  """Days that hold enough failures for a narrow interval, and no more."""
  failures = 500 if quick else _FAILURES
  enough = failures * scenario.failures.mtbi_chip_days / scenario.chips
  return min(scenario.days, max(enough, 0.1))


def _percent(point: Point) -> str:
  return f"{100 * point.goodput:.1f} %"
