"""A recommended set-up: what it is, and how it is shown."""

import dataclasses
import textwrap

from decoupled.simulate import tables


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
      f"{tables.NAMES[p.policy]}, {p.standbys} standbys"
      + f", M = {p.learners}, K = {p.quorum}" * (p.policy == "decoupled"),
      p.price,
      p.price * p.goodput / p.high if p.high else p.price,
      p.price * p.goodput / p.low if p.low else p.price,
    )
    for p in found.curve
  ]
  plots.curve(
    points, found.chosen, "price of a useful chip-hour, standbys included", path
  )
