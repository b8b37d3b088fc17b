"""report.html: one static page, drawn from the event log.

No script, no network, nothing outside the file. Everything that comes from
the log is escaped. Colours are told apart by people with colour blindness,
never carry a meaning alone, and follow the reader's light or dark setting.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from decoupled.errors import DecoupledError
from decoupled.observe import report as report_lib
from decoupled.observe import summary
from decoupled.observe.events import Event, EventReader
from decoupled.observe.report import Learner, Timeline, write_atomically

_WIDTH, _LEFT, _RIGHT = 960, 92, 16  # of every drawing, in its own units
_INNER = _WIDTH - _LEFT - _RIGHT
_HUES = 7  # colours of the style sheet; then they repeat, dashed
_POINTS = 300  # per curve at most
_BINS = 160  # of the lane of rounds

_STYLE = """
:root { color-scheme: light dark;
  --bg: #fbfbfa; --card: #ffffff; --ink: #1d2125; --soft: #5b6570;
  --line: #d9dde1; --grid: #eceef0; --bad: #b3261e; --good: #1a6e3c;
  --c0: #0b6bb3; --c1: #b4530a; --c2: #0d7a5f; --c3: #8c4a93;
  --c4: #7a6400; --c5: #bb3a4a; --c6: #4d5a68; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #15181b; --card: #1d2125; --ink: #e8eaec; --soft: #a3adb6;
  --line: #373d44; --grid: #282d32; --bad: #ff8a80; --good: #7fd4a0;
  --c0: #62b5f2; --c1: #f2a05c; --c2: #54cfae; --c3: #d79bdd;
  --c4: #dcc65a; --c5: #f58e99; --c6: #aab6c2; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, Helvetica, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 2px; }
h2 { font-size: 16px; margin: 34px 0 8px; }
p { margin: 4px 0 10px; } .soft, figcaption, caption { color: var(--soft); }
.tiles { display: grid; gap: 12px; margin-top: 18px;
  grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); }
.tile { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 21px; font-weight: 600;
  line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
figure, .box { margin: 0; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; padding: 12px;
  overflow-x: auto; }
figcaption { font-size: 13px; margin-top: 6px; }
svg { display: block; width: 100%; min-width: 640px; height: auto;
  font: 12px system-ui, "Segoe UI", Roboto, Helvetica, sans-serif; }
svg text { fill: var(--soft); } svg .name { fill: var(--ink); }
.grid { stroke: var(--grid); } .axis { stroke: var(--line); }
.fault { stroke: var(--bad); stroke-dasharray: 3 3; }
svg .fault-name { fill: var(--bad); font-weight: 600; }
.down { fill: none; stroke: var(--bad); stroke-dasharray: 3 3; }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.share { fill: var(--c0); fill-opacity: .55; shape-rendering: crispEdges; }
.box + .box { margin-top: 12px; }
.drain { fill: var(--grid); }
table { border-collapse: collapse; width: 100%; font-size: 14px;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; font-size: 13px; padding-bottom: 6px; }
th, td { text-align: right; padding: 5px 10px; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child, .left { text-align: left; }
tr:last-child td { border-bottom: 0; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
.key { display: inline-flex; flex-wrap: wrap; gap: 4px 18px; }
.key svg { display: inline; width: 26px; min-width: 0; height: 10px; }
""" + "".join(
  f".s{i} {{ stroke: var(--c{i}); }} .f{i} {{ fill: var(--c{i}); }}\n"
  for i in range(_HUES)
)


def write(workdir: str | os.PathLike[str]) -> Path:
  """Draws report.html from events.jsonl and report.json.

  Raises:
    DecoupledError: there is no log, or the page cannot be written.
  """
  workdir = Path(workdir)
  path = workdir / "report.html"
  try:
    events = EventReader(workdir / "events.jsonl").rest()
    try:
      said = json.loads((workdir / "report.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
      said = report_lib.build(events)
    write_atomically(path, build(events, said))
  except OSError as error:
    raise DecoupledError(f"cannot write {path}: {error}") from None
  return path


def build(events: Sequence[Event], report: dict[str, Any]) -> str:
  """The page as text.

  Args:
    events: of the run.
    report: as `observe.report.build` makes it.
  """
  line = Timeline(events)
  title = f"decoupled: {report['status']}"
  reason = report["exit_reason"]
  head = [
    ("run", report.get("run_id")),
    ("seed", report.get("seed")),
    ("started", line.last("start").get("wall_time")),
    ("took", f"{report['wall_s']:,.0f} s"),
  ]
  parts = [
    f"<h1>{_text(title)}</h1>",
    f"<p class='bad'>{_text(reason)}</p>" if reason else "",
    "<p class='soft'>"
    + " · ".join(f"{k} {_text(v)}" for k, v in head if v is not None)
    + "</p>",
    _tiles(report),
    "<h2>Training loss</h2>",
    _losses(line, report),
    "<h2>Learners and rounds</h2>",
    _lanes(line),
    "<h2>Failures</h2>",
    _failures(report),
    "<h2>Learners</h2>",
    _learners(report),
    "<h2>Tokens, rounds, wire, data</h2>",
    _numbers(report),
  ]
  return (
    "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
    "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    f"<title>{_text(title)}</title><style>{_STYLE}</style></head>"
    "<body><main>\n"
    + "\n".join(filter(None, parts))
    + "\n</main></body></html>\n"
  )


# --- numbers ---------------------------------------------------------------


def _tiles(report: dict[str, Any]) -> str:
  rounds = report["rounds"]
  gaps = [
    row["gap_s"]
    for failure in report["failures"]
    for row in failure["survivors"]
    if row["gap_s"] is not None
  ]
  downs = [
    f["downtime_s"] for f in report["failures"] if f["downtime_s"] is not None
  ]
  before, after = report["initial_loss"], report["eval_loss"]
  tiles = [
    (
      "held-out loss, before → after",
      f"{_n(before, '.3f')} → {_n(after, '.3f')}",
    ),
    ("rounds closed", f"{rounds['closed']:,}"),
    ("participation", _percent(rounds["participation"])),
    ("goodput", _percent(report["goodput"])),
    ("tokens", f"{report['tokens_total']:,}"),
    ("failures", f"{len(report['failures'])}"),
  ]
  if downs:
    tiles.append(("longest downtime", f"{max(downs):.1f} s"))
  if gaps:
    tiles.append(("survivors' longest gap", _ms(max(gaps))))
  return (
    "<div class='tiles'>"
    + "".join(
      f"<div class='tile'><b>{_text(value)}</b><span>{_text(name)}</span></div>"
      for name, value in tiles
    )
    + "</div>"
  )


def _failures(report: dict[str, Any]) -> str:
  if not report["failures"]:
    return "<p class='soft'>Nothing failed.</p>"
  rows = [
    [
      _text(summary.failure_line(f)),
      *(_seconds(f[k]) for k in ("at_s", "detected_s", "state_s")),
      *(_seconds(f[k]) for k in ("first_step_s", "downtime_s")),
      _text({True: "cold", False: "warm", None: "–"}[f["cold"]]),
    ]
    for f in report["failures"]
  ]
  head = ["what", "at", "detected", "joined", "first step", "down", "start"]
  table = _table("Times are seconds from the job's start.", head, rows)
  rows = [
    [
      _text(f"learner/{row['id']}"),
      _text(f"{f['kind']} {f['target']} at {f['at_s']:.1f} s"),
      *(_ms(row[k]) for k in ("gap_s", "median_step_s", "quiet_gap_s")),
      _verdict(row["undisturbed"]),
    ]
    for f in report["failures"]
    for row in f["survivors"]
  ]
  if not rows:
    return table
  head = ["survivor", "of", "longest gap", "median step"]
  head += ["quiet gap", "undisturbed"]
  return table + _table(
    "Longest time without a finished step from the event until 10 s after "
    "the replacement's first step; quiet gap: the same over as long a "
    "stretch in which nothing happened.",
    head,
    rows,
    left=(1,),
  )


def _learners(report: dict[str, Any]) -> str:
  rows = [
    [
      f"learner/{x['id']}",
      *(f"{x[k]:,}" for k in ("incarnation", "inner_steps", "tokens")),
      *(_ms(x[k]) for k in ("median_step_s", "p99_step_s", "max_gap_s")),
      _n(x["final_loss"], ".3f"),
    ]
    for x in report["learners"]
  ]
  head = ["learner", "incarnation", "inner steps", "tokens", "median step"]
  head += ["p99 step", "longest gap", "last loss"]
  return _table("Over all incarnations of an id.", head, rows)


def _numbers(report: dict[str, Any]) -> str:
  rounds, wire, data = report["rounds"], report["wire"], report["data"]
  saved = report["checkpoints"]
  rows = [
    ("tokens discarded", _counts(report["discarded"])),
    ("contributions refused", _counts(rounds["refused"])),
    ("learners merged, mean", _n(rounds["mean_participants"], ".2f")),
    ("grace used, mean", _ms(rounds["grace_used_s_mean"])),
    ("rounds lost", f"{rounds['lost']:,}"),
    ("bytes from learners", f"{wire['bytes_up']:,} ({_n(wire['codec'], '')})"),
    ("bytes to learners", f"{wire['bytes_down']:,}"),
    ("units of the corpus", _counts(data)),
    ("checkpoints saved", f"{saved['saved']} ({saved['failed_saves']} failed)"),
    ("restored from", _n(saved["restored_from"], "")),
    ("evaluated on", f"{_n(report['eval_tokens'], ',')} held-out tokens"),
  ]
  return _table("", ["", ""], [[_text(k), _text(v)] for k, v in rows])


# --- drawings --------------------------------------------------------------


class _Axis:
  """Maps [low, high] onto [at, at + length] of a drawing."""

  def __init__(self, low: float, high: float, at: float, length: float):
    self.low, self.high = low, high if high > low else low + 1
    self._at, self._length = at, length

  def __call__(self, value: float) -> float:
    share = (value - self.low) / (self.high - self.low)
    return round(self._at + share * self._length, 1)

  def ticks(self, about: int) -> list[float]:
    raw = (self.high - self.low) / about
    size = 10 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw)
    first = math.ceil(self.low / step - 1e-9)
    last = math.floor(self.high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def _losses(line: Timeline, report: dict[str, Any]) -> str:
  curves = {
    number: _thinned([(t, loss) for t, _, loss in learner.losses], line.end)
    for number, learner in sorted(line.learners.items())
  }
  curves = {number: curve for number, curve in curves.items() if curve}
  values = [loss for curve in curves.values() for _, loss in curve]
  if not values:
    return "<p class='soft'>No loss was reported.</p>"
  held = [report["initial_loss"], report["eval_loss"]]
  followed = _followed(line)
  values += [v for v in (*held, *(v for _, v in followed)) if v is not None]
  height = 300
  pad = 0.05 * (max(values) - min(values) or 1.0)
  x = _Axis(0, line.end, _LEFT, _INNER)
  y = _Axis(min(values) - pad, max(values) + pad, height - 34, 52 - height)
  parts = [_frame(x, y, height)]
  parts += [_fault_lines(line, x, 18, height - 34)]
  for number, curve in curves.items():
    for part in _pieces(curve, line.learners[number]):
      points = " ".join(f"{x(t)},{y(loss)}" for t, loss in part)
      parts.append(
        f"<polyline class='curve s{number % _HUES}'{_dash(number)} "
        f"points='{points}'><title>learner/{number}</title></polyline>"
      )
  for loss, t, what in zip(
    held, (0.0, line.end), ("version 0", "final"), strict=True
  ):
    if loss is not None:
      parts.append(
        f"<circle cx='{x(t)}' cy='{y(loss)}' r='4.5' class='f6'>"
        f"<title>held-out loss, {what}: {loss:.4f}</title></circle>"
      )
  if followed:
    points = " ".join(f"{x(t)},{y(loss)}" for t, loss in followed)
    parts.append(
      f"<polyline class='curve s6' points='{points}'><title>held-out loss of "
      f"{len(followed)} snapshots</title></polyline>"
    )
  key = [
    f"<span><svg viewBox='0 0 26 10' aria-hidden='true'><path d='M0 5H26' "
    f"class='curve s{n % _HUES}'{_dash(n)}/></svg> learner/{n}</span>"
    for n in curves
  ]
  if followed or any(v is not None for v in held):
    key.append(
      "<span><svg viewBox='0 0 26 10' aria-hidden='true'><circle cx='13' "
      "cy='5' r='4.5' class='f6'/></svg> held-out loss of the global "
      "parameters</span>"
    )
  drawing = _svg(height, "Training loss of each learner over time", parts)
  return (
    f"<figure>{drawing}<figcaption class='key'>{''.join(key)}"
    "</figcaption></figure>"
  )


def _followed(line: Timeline) -> list[tuple[float, float]]:
  """(t, held-out loss) of the snapshots that were followed, as of their saving.

  What was evaluated later than that is drawn where it was saved.
  """
  saved = {e.get("path"): float(e["t"]) for e in line.of("checkpoint")}
  curve = [
    (min(saved.get(e.get("path"), float(e["t"])), line.end), float(e["loss"]))
    for e in line.of("heldout")
    if isinstance(e.get("loss"), int | float)
  ]
  return sorted(curve)


def _lanes(line: Timeline) -> str:
  if not line.learners:
    return "<p class='soft'>No learner ever joined.</p>"
  lane, top = 34, 26
  learners = sorted(line.learners.items())
  rounds_at = top + lane * len(learners) + 8
  height = rounds_at + 40 + 34
  x = _Axis(0, line.end, _LEFT, _INNER)
  parts = []
  if line.training_until < line.end:
    left = x(line.training_until)
    parts.append(
      f"<rect class='drain' x='{left}' y='{top - 6}' "
      f"width='{_width(x(line.end), left)}' height='{height - top - 28}'>"
      "<title>drain, saving and evaluation</title></rect>"
    )
  parts += [_time_axis(x, top - 6, height)]
  for row, (number, learner) in enumerate(learners):
    parts.append(_lane(learner, line, x, top + lane * row, number))
  parts.append(_round_lane(line, x, rounds_at))
  parts.append(_fault_lines(line, x, 14, height - 34))
  drawing = _svg(height, "What each learner did over time", parts)
  return (
    f"<figure>{drawing}<figcaption>Full bar: training; pale bar: joined, "
    "not yet stepping; dashed outline: down. Below: share of the live "
    "learners that the rounds merged.</figcaption></figure>"
  )


def _lane(
  learner: Learner, line: Timeline, x: _Axis, top: float, number: int
) -> str:
  parts = [_label(f"learner/{number}", top + 16)]
  until = None
  for life in learner.incarnations:
    begins = life.joined if life.joined is not None else life.first_end
    if begins is None:
      continue
    first = life.first_end
    ends = life.left
    if ends is None or ends > line.training_until:
      ends = max(line.training_until, life.ends[-1] if life.ends else 0.0)
    if until is not None and begins > until:
      parts.append(
        f"<rect class='down' x='{x(until)}' y='{top + 3}' rx='2' "
        f"width='{_width(x(begins), x(until))}' height='18'>"
        f"<title>down for {begins - until:.1f} s</title></rect>"
      )
    steps_from = min(first if first is not None else ends, ends)
    steps_to = max(life.ends[-1] if life.ends else steps_from, steps_from)
    what = f"learner/{number}, incarnation {life.number}"
    for start, stop, opacity, doing in (
      (begins, steps_from, 0.3, "joining"),
      (steps_from, steps_to, 1, f"{life.steps:,} steps"),
    ):
      if stop > start:
        parts.append(
          f"<rect class='f{number % _HUES}' fill-opacity='{opacity}' rx='2' "
          f"x='{x(start)}' y='{top + 3}' height='18' "
          f"width='{_width(x(stop), x(start))}'>"
          f"<title>{what}: {doing}, {start:.1f} to {stop:.1f} s</title></rect>"
        )
    until = steps_to
  return "".join(parts)


def _round_lane(line: Timeline, x: _Axis, top: float) -> str:
  """Participation of the rounds that closed in each slice of time."""
  height = 40
  parts = [_label("rounds", top + 24)]
  slices: dict[int, list[Event]] = {}
  for r in line.counted:
    place = int(_BINS * float(r["closed"]) / (line.end or 1.0))
    slices.setdefault(min(max(place, 0), _BINS - 1), []).append(r)
  width = line.end / _BINS
  for place, rounds in sorted(slices.items()):
    shares = [
      len(set(r["participants"]) & set(r["alive"])) / len(set(r["alive"]))
      for r in rounds
      if r["alive"]
    ]
    if not shares:
      continue
    share = float(np.mean(shares))
    left = x(place * width)
    parts.append(
      f"<rect class='share' x='{left}' y='{top + height * (1 - share):.1f}' "
      f"width='{_width(x((place + 1) * width), left)}' "
      f"height='{height * share:.1f}'><title>rounds {rounds[0]['round']} to "
      f"{rounds[-1]['round']}: participation {share:.2f}</title></rect>"
    )
  return "".join(parts)


def _fault_lines(line: Timeline, x: _Axis, top: float, bottom: float) -> str:
  parts = []
  for failure in line.failures:
    at = x(failure.at)
    anchor = "end" if at > _LEFT + 0.8 * _INNER else "start"
    shift = -4 if anchor == "end" else 4
    parts.append(
      f"<line class='fault' x1='{at}' x2='{at}' y1='{top - 8}' "
      f"y2='{bottom}'/><text class='fault-name' x='{at + shift}' y='{top}' "
      f"text-anchor='{anchor}'>{_text(failure.kind)} "
      f"{_text(failure.target)}</text>"
    )
  return "".join(parts)


def _frame(x: _Axis, y: _Axis, height: float) -> str:
  parts = [_time_axis(x, 18, height)]
  for value in y.ticks(5):
    parts.append(
      f"<line class='grid' x1='{_LEFT}' x2='{_LEFT + _INNER}' "
      f"y1='{y(value)}' y2='{y(value)}'/><text x='{_LEFT - 8}' "
      f"y='{y(value) + 4}' text-anchor='end'>{value:g}</text>"
    )
  return "".join(parts)


def _time_axis(x: _Axis, top: float, height: float) -> str:
  bottom = height - 34
  parts = [
    f"<line class='axis' x1='{_LEFT}' x2='{_LEFT + _INNER}' y1='{bottom}' "
    f"y2='{bottom}'/>"
  ]
  for value in x.ticks(8):
    parts.append(
      f"<line class='grid' x1='{x(value)}' x2='{x(value)}' y1='{top}' "
      f"y2='{bottom}'/><text x='{x(value)}' y='{bottom + 18}' "
      f"text-anchor='middle'>{value:g} s</text>"
    )
  return "".join(parts)


def _svg(height: float, says: str, parts: Iterable[str]) -> str:
  return (
    f"<svg viewBox='0 0 {_WIDTH} {height}' role='img' "
    f"aria-label='{_text(says)}'>{''.join(parts)}</svg>"
  )


def _label(text: str, y: float) -> str:
  return (
    f"<text class='name' x='{_LEFT - 10}' y='{y}' text-anchor='end'>"
    f"{_text(text)}</text>"
  )


def _pieces(
  curve: Sequence[tuple[float, float]], learner: Learner
) -> list[list[tuple[float, float]]]:
  """Cuts a curve where the learner joined anew: nothing lies between."""
  joins = [x.joined for x in learner.incarnations if x.joined is not None]
  pieces: dict[int, list[tuple[float, float]]] = {}
  for t, value in curve:
    pieces.setdefault(sum(j <= t for j in joins), []).append((t, value))
  return list(pieces.values())


def _thinned(
  curve: Sequence[tuple[float, float]], end: float
) -> list[tuple[float, float]]:
  """Means over slices of time, so that a long job stays a small file."""
  if len(curve) <= _POINTS:
    return list(curve)
  slices: dict[int, list[tuple[float, float]]] = {}
  for t, value in curve:
    slices.setdefault(int(_POINTS * t / (end or 1.0)), []).append((t, value))
  return [
    (
      float(np.mean([t for t, _ in points])),
      float(np.mean([value for _, value in points])),
    )
    for _, points in sorted(slices.items())
  ]


# --- text ------------------------------------------------------------------


def _table(
  says: str,
  head: Sequence[str],
  rows: Sequence[Sequence[str]],
  left: tuple[int, ...] = (),
) -> str:
  """A table; cells are HTML already."""

  def cell(tag: str, i: int, text: str) -> str:
    return f"<{tag}{' class=left' if i in left else ''}>{text}</{tag}>"

  caption = f"<caption>{_text(says)}</caption>" if says else ""
  top = "".join(cell("th scope=col", i, h) for i, h in enumerate(head))
  top = top.replace("</th scope=col>", "</th>")
  body = "".join(
    "<tr>" + "".join(cell("td", i, c) for i, c in enumerate(row)) + "</tr>"
    for row in rows
  )
  shown = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
  return (
    f"<div class='box'><table>{caption}{shown}<tbody>{body}</tbody>"
    "</table></div>"
  )


def _text(value: object) -> str:
  return escape(str(value), quote=True)


def _n(value: Any, pattern: str) -> str:
  return "–" if value is None else format(value, pattern)


def _percent(share: float | None) -> str:
  return "–" if share is None else f"{100 * share:.1f} %"


def _seconds(value: float | None) -> str:
  return "–" if value is None else f"{value:.2f} s"


def _ms(value: float | None) -> str:
  if value is None:
    return "–"
  return f"{1000 * value:.0f} ms" if value < 10 else f"{value:.1f} s"


def _verdict(value: bool | None) -> str:
  word = {True: "yes", False: "no", None: "cannot tell"}[value]
  css = {True: "good", False: "bad", None: "soft"}[value]
  return f"<span class='{css}'>{word}</span>"


def _counts(counts: dict[str, int]) -> str:
  return (
    ", ".join(f"{n:,} {k.replace('_', ' ')}" for k, n in counts.items()) or "–"
  )


def _width(right: float, left: float) -> float:
  return round(max(right - left, 0.8), 1)


def _dash(number: int) -> str:
  """Curves beyond the colours there are repeat them, dashed."""
  again = number // _HUES
  return f" stroke-dasharray='{2 + 4 * again} 3'" if again else ""
