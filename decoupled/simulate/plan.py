"""Recommends a set-up: learners, quorum, standbys, codec and H.

Codec and H follow from the link, the number of standbys from a closed form;
learners and quorum, and whether the standbys pay, from simulations.
"""

import dataclasses
import math
import textwrap
from typing import Any

from decoupled.algorithm.policy import CODECS, Exchange
from decoupled.errors import ConfigError
from decoupled.simulate import engine, projection, tables
from decoupled.simulate.outcome import Summary
from decoupled.simulate.scenario import Scenario
from decoupled.simulate.traffic import CODEC_BITS

_MOST_LEARNERS = 64
_MOST_H = 1536
# Twice the learners have to save this share of the price to be worth it: each
# then has half the chips, hence half the batch or twice the step.
_WORTH = 0.01
# Goodput that a larger quorum may cost.
_FREE = 0.001
# A link is planned to be busy for this share of the time.
_BUSY = 0.8
# Simulated failures per figure beyond which its interval is narrow enough.
_FAILURES = 20_000


@dataclasses.dataclass(frozen=True)
class Choice:
  """One recommendation: what, which value, and why."""

  name: str
  value: str
  reason: str


@dataclasses.dataclass(frozen=True)
class Point:
  """One simulated set-up of the trade-off curve.

  Attributes:
    policy: see `result.POLICIES`.
    learners: M.
    quorum: K.
    standbys: idle hosts.
    goodput: share of the training chips' time that is useful, with its 95 %
      interval.
    uptime: share of the time in which something makes progress.
    participation: share of the learners in a merge.
    price: of a useful chip-hour, standbys included.
  """

  policy: str
  learners: int
  quorum: int
  standbys: int
  goodput: float
  low: float
  high: float
  uptime: float
  participation: float
  price: float


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is recommended, and what it rests on.

  Attributes:
    choices: the recommendations.
    curve: every set-up that was simulated.
    chosen: the recommended one of them.
    bindings: the configuration's part of it, as the command line takes it.
    inputs: what was asked, by name.
    warnings: what stands against the plan.
  """

  choices: tuple[Choice, ...]
  curve: tuple[Point, ...]
  chosen: int
  bindings: tuple[str, ...]
  inputs: dict[str, float]
  warnings: tuple[str, ...] = ()


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
  exchange, wire, warnings = _wire(scenario, link_gbps)
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
  many = int(learners.value)
  standbys = _standbys(simulations, many)
  spare = int(standbys.value)
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


# ---- the recommendations -----------------------------------------------------


def needed_gbps(exchange: Exchange, params: float, step_s: float) -> float:
  """Gbit/s that a learner's link must carry each way.

  The larger of two needs: fragments on average, one in H/P steps; and one
  fragment up and its merge down within the overlap budget of tau steps.
  """
  bits = CODEC_BITS[exchange.codec] * params / exchange.P
  average_s = exchange.H / exchange.P * step_s
  overlap_s = max(exchange.tau, 1) * step_s / 2  # half for each way
  return bits / min(average_s, overlap_s) / _BUSY / 1e9


def _wire(
  scenario: Scenario, link_gbps: float
) -> tuple[Exchange, list[Choice], list[str]]:
  """The most precise codec at the smallest H that the link can carry."""
  own = scenario.exchange
  each = own.H // own.P
  codecs = sorted(CODECS, key=lambda codec: -CODEC_BITS[codec])
  tried = own
  for h in _doublings(own.H, _MOST_H):
    for codec in codecs:
      tried = dataclasses.replace(own, H=h, P=h // each, codec=codec)
      need = needed_gbps(tried, scenario.params, scenario.step_s)
      if need <= link_gbps:
        return tried, _wire_choices(own, tried, need, link_gbps), []
  need = needed_gbps(tried, scenario.params, scenario.step_s)
  short = (
    f"the link is too slow: {need:.3g} Gbit/s are needed even with "
    f"{tried.codec} and H = {tried.H}, there are {link_gbps:g}; raise "
    "--link_gbps or --step_s"
  )
  return tried, _wire_choices(own, tried, need, link_gbps), [short]


def _wire_choices(
  own: Exchange, chosen: Exchange, need: float, link: float
) -> list[Choice]:
  of_link = f"{need:.3g} Gbit/s needed of the {link:g} that the link has"
  why_codec = "the most precise that fits: " + of_link
  if chosen.H == own.H:
    why_h = "as configured: merging more seldom only helps a slow link"
  else:
    why_h = (
      f"H = {own.H} does not fit with any codec; P goes with it, so that the "
      "fragments are smaller, if the model has as many tensors"
    )
  return [
    Choice("codec", chosen.codec, why_codec),
    Choice("H", str(chosen.H), why_h),
  ]


def _learners(simulations: _Simulations, most: int) -> Choice:
  scenario = simulations.scenario
  most = min(most, max(1, scenario.chips // scenario.chips_per_host))
  best = simulations.at(learners=1)
  for many in _doublings(2, most):
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


# ---- showing it --------------------------------------------------------------


def text(found: Plan) -> str:
  """The plan as people read it."""
  asked = ", ".join(f"{k} {v:g}" for k, v in found.inputs.items())
  lines = [*textwrap.wrap(f"for {asked}", 80), ""]
  for choice in found.choices:
    lines += textwrap.wrap(
      f"{choice.name:<9} {choice.value:<9} {choice.reason}",
      80,
      subsequent_indent=" " * 20,
    )
  lines += ["", "in the configuration: " + " ".join(found.bindings), ""]
  best = min(p.price for p in found.curve)
  head = ["", "policy", "learners", "quorum", "standbys", "goodput"]
  head += ["95 % interval", "uptime", "participation", "price", "over best"]
  rows = [
    [
      "->" if n == found.chosen else "",
      p.policy,
      str(p.learners),
      str(p.quorum),
      str(p.standbys),
      tables.number(p.goodput),
      f"{100 * p.low:.1f} to {100 * p.high:.1f}",
      tables.number(p.uptime),
      tables.number(p.participation),
      f"{p.price:.4g}",
      f"{100 * (p.price / best - 1):+.1f} %",
    ]
    for n, p in enumerate(found.curve)
  ]
  lines += tables.aligned(head, rows, right=range(2, len(head)))
  lines += ["", "price: of a useful chip-hour, standbys included"]
  lines += [f"warning: {warning}" for warning in found.warnings]
  return "\n".join(lines) + "\n"


def plot(found: Plan, path: str) -> None:
  """The trade-off curve as a PNG."""
  from decoupled.simulate import plots

  points = [
    (
      f"{p.policy.replace('_', ' ')} M={p.learners} K={p.quorum} +{p.standbys}",
      p.price,
      p.price * p.goodput / p.high,
      p.price * p.goodput / p.low,
    )
    for p in found.curve
  ]
  plots.curve(
    points, found.chosen, "price of a useful chip-hour, standbys included", path
  )


# ---- small things ------------------------------------------------------------


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


def _doublings(first: int, most: int) -> list[int]:
  """first, 2 x first, … up to `most`; at least the first."""
  count = max(0, int(math.log2(max(1.0, most / first))))
  return [first << n for n in range(count + 1) if first << n <= most or not n]


def _percent(point: Point) -> str:
  return f"{100 * point.goodput:.1f} %"
