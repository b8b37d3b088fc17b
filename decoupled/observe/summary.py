"""What is said when a job is over."""

from collections.abc import Mapping
from typing import Any

from decoupled.observe.report import learner_number


def summary_lines(report: Mapping[str, Any]) -> list[str]:
  """The closing table, a line each, at most 78 columns where names allow.

  Args:
    report: as `observe.report` makes it; one that was not written to a
      workdir has no lines about where to look.
  """
  rounds = report["rounds"]
  rows = [
    ("status", _status(report)),
    ("loss", _loss(report)),
    ("rounds", _rounds(rounds)),
    ("participation", _percent(rounds["participation"], _merged(rounds))),
    ("goodput", _percent(report["goodput"], _tokens(report))),
  ]
  rows += [("failure", failure_line(f)) for f in report["failures"]]
  rows += [(f"learner {id}", line) for id, line in survivor_lines(report)]
  width = max(len(name) for name, _ in rows)
  lines = [f"{name:<{width}}  {value}" for name, value in rows]
  workdir = report.get("workdir")
  if workdir is not None:
    lines += [
      "",
      f"report:    {workdir}/report.html (and report.json)",
      f"log:       {workdir}/events.jsonl, {workdir}/logs/",
      f"metrics:   tensorboard --logdir {workdir}/metrics",
      f"try next:  {_next(report, workdir)}",
    ]
  return lines


def failure_line(failure: Mapping[str, Any]) -> str:
  """Who was struck, when, and when it was back."""
  struck = {
    "kill": "was killed",
    "term": "was terminated",
    "pause": "was paused",
    "partition": "was cut off",
    "exit": "stopped by itself",
  }.get(failure["kind"], failure["kind"])
  text = f"{failure['target']} {struck} at {failure['at_s']:.1f} s"
  if failure["downtime_s"] is None:
    if failure["target"].startswith("standby/"):
      return text
    never = failure["kind"] == "partition" and failure["detected_s"] is None
    return text + (", went on" if never else ", did not come back")
  warm = failure["cold"] is False and failure.get("phases")
  taken = ", a standby took over" if warm else ""
  return (
    f"{text}, back at {failure['first_step_s']:.1f} s "
    f"(down {failure['downtime_s']:.1f} s{taken})"
  )


def survivor_lines(report: Mapping[str, Any]) -> list[tuple[int, str]]:
  """Per survivor of any failure its longest gap, in the order of ids."""
  worst: dict[int, dict[str, Any]] = {}
  for failure in report["failures"]:
    for row in failure["survivors"]:
      if row["gap_s"] is None:
        continue
      seen = worst.get(row["id"])
      if seen is None or row["gap_s"] > seen["gap_s"]:
        worst[row["id"]] = {**row, "of": failure["target"]}
  return [(id, _survivor(row)) for id, row in sorted(worst.items())]


def _survivor(row: Mapping[str, Any]) -> str:
  verdict = {True: "undisturbed", False: "DISTURBED", None: "cannot tell"}
  step = row["median_step_s"]
  text = f"longest gap {_ms(row['gap_s'])}"
  if step:
    text += f" = {row['gap_s'] / step:.1f} steps of {_ms(step)}"
  return f"{text} after {row['of']}: {verdict[row['undisturbed']]}"


def _status(report: Mapping[str, Any]) -> str:
  reason = report["exit_reason"]
  return str(report["status"]) + (f": {reason}" if reason else "")


def _loss(report: Mapping[str, Any]) -> str:
  before, after = report["initial_loss"], report["eval_loss"]
  if before is None or after is None:
    return "not evaluated"
  return (
    f"{before:.3f} before, {after:.3f} after "
    f"(held out, {report['eval_tokens']:,} tokens)"
  )


def _rounds(rounds: Mapping[str, Any]) -> str:
  text = f"{rounds['closed']:,} closed"
  if rounds["lost"]:
    text += f", {rounds['lost']} lost"
  if rounds["refused"]:
    what = ", ".join(f"{n} {why}" for why, n in rounds["refused"].items())
    text += f"; contributions refused: {what}"
  return text


def _merged(rounds: Mapping[str, Any]) -> str:
  mean = rounds["mean_participants"]
  return "" if mean is None else f"{mean:.2f} learners a round"


def _tokens(report: Mapping[str, Any]) -> str:
  lost = {c: n for c, n in report["discarded"].items() if c != "overlap" and n}
  text = f"of {report['tokens_total']:,} tokens"
  if lost:
    text += ", lost: " + ", ".join(f"{n:,} {c}" for c, n in lost.items())
  return text


def _percent(share: float | None, more: str) -> str:
  if share is None:
    return "unknown"
  return f"{100 * share:.1f} %" + (f", {more}" if more else "")


def _ms(seconds: float) -> str:
  return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _next(report: Mapping[str, Any], workdir: str) -> str:
  if report["status"] != "completed":
    return f"the same command again; it continues {workdir}"
  if not any(learner_number(f["target"]) >= 0 for f in report["failures"]):
    return "the same in another --workdir with --chaos 'kill learner/1 @150r'"
  more = 2 * max(1, report["rounds"].get("last") or report["rounds"]["closed"])
  return f"decoupled run --workdir {workdir} --rounds {more} (continues it)"
