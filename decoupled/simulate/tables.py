"""Figures as text: aligned columns that read the same in a pipe."""

import math
import sys
import textwrap
from collections.abc import Iterable, Sequence

from decoupled.simulate.outcome import Summary
from decoupled.simulate.result import Cell, PresetResult
from decoupled.simulate.scenario import Scenario

NAMES = {
  "dp_rigid": "data-parallel",
  "dp_elastic": "data-parallel, elastic",
  "diloco": "DiLoCo",
  "decoupled": "decoupled",
}


def preset(result: PresetResult) -> str:
  """Published beside simulated, a cell a line; only columns that vary."""
  cells = result.cells
  columns: dict[str, list[str]] = {
    "policy": [NAMES[c.policy] for c in cells],
    "learners": [str(c.learners) for c in cells],
    "chips": [f"{c.chips:,}" for c in cells],
    "mode": [c.mode for c in cells],
    "whose": [c.subject for c in cells],
    "quantity": [c.quantity + f" ({c.unit})" * bool(c.unit) for c in cells],
  }
  same = [
    f"{name} {values[0]}"
    for name, values in columns.items()
    if len(set(values)) == 1 and values[0]
  ]
  columns = {k: v for k, v in columns.items() if len(set(v)) > 1}
  left = {"policy", "mode", "whose", "quantity", "remark"}
  columns |= {
    "simulated": [_figure(c, c.simulated) for c in cells],
    "95 % interval": [_interval(c) for c in cells],
    "published": [_figure(c, c.published) for c in cells],
    "difference": [_difference(c) for c in cells],
    "remark": [
      ", ".join(["fitted"] * c.fitted + [c.note] * bool(c.note)) for c in cells
    ],
  }
  columns = {k: v for k, v in columns.items() if any(v)}
  right = [n for n, name in enumerate(columns) if name not in left]
  rows = [list(row) for row in zip(*columns.values(), strict=True)]
  lines = [f"{result.preset}, in {result.wall_s:.1f} s"]
  lines += ["everywhere: " + ", ".join(same)] if same else []
  lines += ["", *aligned(list(columns), rows, right)]
  lines += _mean_errors(cells)
  lines += ["", *_constants(result.constants)]
  lines += ["", *textwrap.wrap(result.note, 80)] if result.note else []
  return "\n".join(lines) + "\n"


def summary(scenario: Scenario, found: Summary, wall_s: float) -> str:
  """One scenario of one's own: figures with intervals, waste by cause."""
  sides = [
    NAMES[scenario.policy],
    f"{scenario.chips:,} chips",
    f"{scenario.jobs} learners" if scenario.jobs > 1 else "",
    f"quorum {scenario.quorum}" if scenario.policy == "decoupled" else "",
    f"{scenario.standbys} standbys",
    f"{scenario.days:g} days x {found.repeats}, in {wall_s:.1f} s",
  ]
  rows = [
    [
      name,
      number(getattr(found, name)),
      _ends(getattr(found, f"{name}_low"), getattr(found, f"{name}_high")),
    ]
    for name in ("goodput", "uptime", "participation")
  ]
  rows += [
    [f"wasted: {cause.replace('_', ' ')}", number(hours, "chip-h"), ""]
    for cause, hours in found.wasted.items()
    if hours
  ]
  rows.append(["useful", number(found.useful_chip_h, "chip-h"), ""])
  rows.append(["interruptions", f"{found.interruptions:,.0f}", ""])
  if scenario.standbys:
    hours = found.standby_chip_h
    rows.append(["standbys", number(hours, "chip-h"), ""])
  if scenario.jobs > 1 and scenario.params:
    rows += [
      ["each way, a learner", _rate(found.learner_bps), ""],
      ["each way, busiest syncer shard", _rate(found.shard_bps), ""],
    ]
  if math.isfinite(found.cost_per_token):
    cost = f"{1e6 * found.cost_per_token:.4g}"
    rows.append(["price of a million useful tokens", cost, ""])
  head = ["", "mean", "95 % interval"]
  lines = [", ".join(filter(None, sides)), ""]
  return "\n".join([*lines, *aligned(head, rows, right=(1, 2))]) + "\n"


def aligned(
  head: Sequence[str],
  rows: Iterable[Sequence[str]],
  right: Iterable[int] = (),
) -> list[str]:
  """Lines of columns under their heads, `right` ones flush right."""
  table = [list(head), *map(list, rows)]
  flush = set(right)
  width = [max(map(len, column)) for column in zip(*table, strict=True)]
  lines = [
    "  ".join(
      word.rjust(w) if n in flush else word.ljust(w)
      for n, (word, w) in enumerate(zip(row, width, strict=True))
    ).rstrip()
    for row in table
  ]
  return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def write(text: str) -> None:
  """Prints, and flushes so that a closed pipe is noticed here."""
  sys.stdout.write(text)
  sys.stdout.flush()


def number(value: float, unit: str = "") -> str:
  """A figure with its unit; a fraction, which has none, in per cent."""
  if not unit:
    return f"{100 * value:.1f} %"
  if value == int(value) or abs(value) >= 1000:
    return f"{value:,.0f} {unit}"
  return f"{value:.3g} {unit}"


def _figure(cell: Cell, value: float | None) -> str:
  if value is None:
    return ""
  return number(value) if not cell.unit else number(value, " ").strip()


def _interval(cell: Cell) -> str:
  if cell.low == cell.high:
    return ""
  if not cell.unit:
    return _ends(cell.low, cell.high)
  return f"{cell.low:.4g} to {cell.high:.4g}"


def _ends(low: float, high: float) -> str:
  return f"{100 * low:.1f} to {100 * high:.1f}"


def _rate(bits_s: float) -> str:
  return f"{bits_s / 1e9:.3g} Gbit/s"


def _difference(cell: Cell) -> str:
  """In points for fractions, else in per cent of the published figure."""
  error = cell.error()
  if error is None or cell.published is None:
    return ""
  if not cell.unit:
    return f"{100 * error:+.1f}"
  return f"{100 * error / cell.published:+.1f} %" if cell.published else ""


def _mean_errors(cells: Sequence[Cell]) -> list[str]:
  """How far the goodputs are off, fitted and predicted ones apart."""
  known = [
    (c, error)
    for c in cells
    if c.quantity == "goodput" and (error := c.error()) is not None
  ]
  lines = [""] if known else []
  for name, fitted in (("fitted", True), ("predicted", False)):
    off = [100 * abs(error) for c, error in known if c.fitted == fitted]
    if off:
      lines.append(
        f"{name + ':':<10} {len(off)} cells, {sum(off) / len(off):.1f} points "
        f"off on average, {max(off):.1f} at most"
      )
  return lines


def _constants(constants: dict[str, float]) -> list[str]:
  words = [f"{name} = {value:g}" for name, value in constants.items()]
  lines, line = [], "constants:"
  for word in words:
    if len(line) + len(word) > 76:
      lines.append(line)
      line = "  "
    line += f" {word};"
  return [*lines, line.rstrip(";")] if words else []
