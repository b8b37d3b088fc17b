"""Pictures of what was simulated; matplotlib is loaded when one is asked for.

Points are published figures, lines and bars simulated ones with their 95 %
intervals.
"""

import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from decoupled.errors import DecoupledError
from decoupled.simulate.result import Cell, PresetResult
from decoupled.simulate.tables import NAMES

_DPI = 120


def available() -> None:
  """Raises DecoupledError, with the command to type, without matplotlib."""
  try:
    importlib.import_module("matplotlib")
  except ImportError:
    raise DecoupledError(
      "--plot needs matplotlib: pip install 'decoupled-diloco[plots]', or pip "
      "install matplotlib"
    ) from None


def writable(path: str) -> Path:
  """The path of a PNG that can be written.

  Raises:
    DecoupledError: it is no .png, or its folder is not there.
  """
  target = Path(path)
  if target.suffix.lower() != ".png":
    raise DecoupledError(f"--plot={path} must end in .png")
  if not target.parent.is_dir():
    raise DecoupledError(f"--plot={path}: there is no folder {target.parent}")
  return target


def preset(result: PresetResult, path: str) -> None:
  """Writes the picture of a preset.

  Quantities that change over chips are lines; others are bars, a cell each.

  Raises:
    DecoupledError: no matplotlib, or a path that cannot be written.
  """
  available()
  save(figure(result), path)


def png(result: PresetResult) -> bytes:
  """The picture of a preset as the bytes of a PNG, for notebooks."""
  available()
  data = io.BytesIO()
  figure(result).savefig(data, format="png", dpi=_DPI)
  return data.getvalue()


def figure(result: PresetResult) -> Any:
  """The picture of a preset as a matplotlib figure."""
  panels = _panels(result.cells)
  plot, axes = _new(len(panels))
  for axis, (title, cells) in zip(axes, panels.items(), strict=True):
    series = _series(cells)
    if all(len({c.chips for c in each}) > 1 for each in series.values()):
      _lines(axis, series)
    else:
      _bars(axis, cells)
    axis.set_title(title, fontsize=10)
  plot.suptitle(f"{result.preset}: simulated, and published as points")
  plot.tight_layout()
  return plot


def curve(
  points: Sequence[tuple[str, float, float, float]],
  chosen: int,
  title: str,
  path: str,
) -> None:
  """Writes a trade-off curve.

  Args:
    points: (label, value, low, high), in the order of the axis.
    chosen: which of them is marked.
    title: of the picture, with the unit.
    path: PNG.
  """
  available()
  plot, (axis,) = _new(1)
  y = list(range(len(points)))
  x = [value for _, value, _, _ in points]
  # Whiskers of a point that is its own interval may differ in the last bit.
  ends = [
    [max(0.0, value - low) for _, value, low, _ in points],
    [max(0.0, high - value) for _, value, _, high in points],
  ]
  axis.errorbar(x, y, xerr=ends, fmt="o", color="C0", ms=5)
  axis.plot([x[chosen]], [y[chosen]], "o", ms=13, mfc="none", color="C3")
  axis.set_yticks(y, [label for label, *_ in points], fontsize=8)
  axis.invert_yaxis()
  axis.set_title(title, fontsize=10)
  axis.grid(alpha=0.3)
  plot.tight_layout()
  save(plot, path)


def save(plot: Any, path: str) -> None:
  """Writes a figure as a PNG that says nothing about who made it when."""
  target = writable(path)
  try:
    plot.savefig(target, dpi=_DPI, metadata={"Software": None})
  except OSError as error:
    raise DecoupledError(f"--plot={path}: {error.strerror}") from None


def _new(panels: int) -> tuple[Any, list[Any]]:
  """A figure with its axes; no window, whatever the environment says."""
  figures = importlib.import_module("matplotlib.figure")
  columns = min(2, panels)
  rows = -(-panels // columns)
  plot = figures.Figure(figsize=(7.5 * columns, 4.6 * rows))
  axes = plot.subplots(rows, columns, squeeze=False).ravel().tolist()
  for axis in axes[panels:]:
    axis.set_visible(False)
  return plot, axes[:panels]


def _panels(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
  """Cells by what they are a figure of."""
  panels: dict[str, list[Cell]] = {}
  for cell in cells:
    title = cell.quantity + f" ({cell.unit})" * bool(cell.unit)
    panels.setdefault(title, []).append(cell)
  return panels


def _series(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
  """Cells by everything but their number of chips."""
  series: dict[str, list[Cell]] = {}
  for cell in cells:
    series.setdefault(_label(cell, cells), []).append(cell)
  return {
    label: sorted(group, key=lambda c: c.chips)
    for label, group in series.items()
  }


def _label(cell: Cell, cells: Sequence[Cell]) -> str:
  """What tells a cell from the others of its picture, chips aside."""
  same = [c for c in cells if (c.mode, c.subject) == (cell.mode, cell.subject)]
  words = []
  if len({c.policy for c in same}) > 1:
    words.append(NAMES[cell.policy])
  if len({c.learners for c in same}) > 1 and cell.learners > 1:
    words.append(f"M = {cell.learners}")
  words += [w for w in (cell.mode, cell.subject) if w]
  return ", ".join(words) or NAMES[cell.policy]


def _lines(axis: Any, series: Mapping[str, Sequence[Cell]]) -> None:
  cells = [cell for group in series.values() for cell in group]
  # One colour a series, whatever its mode, which is the style of its line.
  modes = list(dict.fromkeys(c.mode for c in cells))
  colors: dict[tuple[str, int, str], str] = {}
  for label, group in series.items():
    first = group[0]
    key = first.policy, first.learners, first.subject
    color = colors.setdefault(key, f"C{len(colors) % 10}")
    style = ("-", "--", ":", "-.")[modes.index(first.mode) % 4]
    chips = [c.chips for c in group]
    axis.plot(
      chips, [c.simulated for c in group], style, color=color, label=label
    )
    axis.fill_between(
      chips,
      [c.low for c in group],
      [c.high for c in group],
      color=color,
      alpha=0.2,
    )
    known = [(c.chips, c.published) for c in group if c.published is not None]
    if known:
      axis.plot(*zip(*known, strict=True), "o", ms=4, color=color)
  axis.set_xscale("log", base=2)
  ticks = sorted({c.chips for c in cells})
  axis.set_xticks(ticks, [_short(n) for n in ticks])
  axis.minorticks_off()
  axis.set_xlabel("chips")
  axis.yaxis.set_major_formatter(_ticks(cells[0]))
  axis.grid(alpha=0.3)
  axis.legend(fontsize=7)


def _bars(axis: Any, cells: Sequence[Cell]) -> None:
  # Cells that differ in their remark alone are told apart by it.
  labels = [_label(c, cells) for c in cells]
  if len(set(labels)) < len(labels):
    labels = [
      f"{label}, {c.note}" if c.note else label
      for label, c in zip(labels, cells, strict=True)
    ]
  y = list(range(len(cells)))
  axis.barh(
    y,
    [c.simulated for c in cells],
    xerr=[
      [max(0.0, c.simulated - c.low) for c in cells],
      [max(0.0, c.high - c.simulated) for c in cells],
    ],
    color="C0",
    alpha=0.6,
  )
  known = [
    (c.published, n) for n, c in enumerate(cells) if c.published is not None
  ]
  if known:
    axis.plot(*zip(*known, strict=True), "o", color="C3")
  axis.set_yticks(y, labels, fontsize=8)
  axis.invert_yaxis()
  axis.xaxis.set_major_formatter(_ticks(cells[0]))
  axis.grid(alpha=0.3, axis="x")


def _ticks(cell: Cell) -> Callable[[float, int], str]:
  """How figures of that kind are written along an axis."""
  if cell.unit:
    return lambda value, _: f"{value:,g}"
  return lambda value, _: f"{100 * value:.0f} %"


def _short(chips: int) -> str:
  """1_200_000 -> 1.2M, 150_000 -> 150k, 65_536 -> 64K."""
  if chips % 1024 == 0:
    return f"{chips // 1024}K"
  if chips >= 1_000_000:
    return f"{chips / 1e6:g}M"
  return f"{chips / 1e3:.0f}k" if chips >= 1000 else str(chips)
