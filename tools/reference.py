"""Writes the pages of docs/ that are made from the code; `make docs`.

With `--check` nothing is written; it fails naming the pages that are out of
date.
"""

import argparse
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

from decoupled import faults
from decoupled.config import CONTRACT, LOCAL
from decoupled.observe import events
from decoupled.simulate.scenario import (
  Correlated,
  Failures,
  Maintenance,
  Recovery,
  Scenario,
  Stragglers,
)
from decoupled.syncer.settings import Limits

DOCS = Path(__file__).parents[1] / "docs"
_NOTE = "<!-- Made by `make docs` from the code; do not edit. -->\n"
_ENTRY = re.compile(r"^(\w+): ", re.MULTILINE)


def configuration() -> str:
  """docs/configuration.md: every component and parameter."""
  return "\n".join(
    [
      "# Configuration",
      "",
      _NOTE,
      "`decoupled <command> [CONFIG.gin …] [Component.param=value …] [flags]`:",
      "a value comes from the last of file, binding and flag that names it.",
      "`decoupled config CONFIG.gin` shows each value with its origin. Names",
      "that do not exist and combinations that cannot work are refused, with",
      "file, line and both values, before any process starts.",
      "",
      "## The contract",
      "",
      "Belongs to the run. The syncer serves it, and refuses a peer that",
      "disagrees, naming the line.",
      "",
      *_components(CONTRACT),
      "## Local",
      "",
      "Each peer's own.",
      "",
      *_components(LOCAL),
    ]
  )


def timeouts() -> str:
  """docs/timeouts.md: how long anything waits, and how limits nest."""
  text = inspect.getdoc(Limits) or ""
  intro = text.partition("\nAttributes:")[0].strip().splitlines()
  return "\n".join(
    [
      "# How long anything waits",
      "",
      _NOTE,
      *intro,
      "",
      *_table("Limits", Limits),
      "Values that do not nest are refused at the start, with both numbers.",
      "Whatever waits longer than ten seconds says in its log for what, and",
      "for whom.",
      "",
    ]
  )


def event_log() -> str:
  """docs/events.md: the kinds of events in events.jsonl."""
  return "\n".join(
    [
      "# The event log",
      "",
      _NOTE,
      "`<workdir>/events.jsonl` is the one log of a run: a JSON object a line,",
      "append-only. Report, page, progress and metrics are derived from it.",
      "Every event has `t`, seconds from the job's start, and `kind`. NaN and",
      "infinities are null.",
      "",
      events.schema_table(),
    ]
  )


def fault_points() -> str:
  """docs/faults.md: where a test may let a process fail."""
  rows = ["| point | where the process is |", "|---|---|"]
  rows += [f"| `{name}` | {says} |" for name, says in faults.POINTS.items()]
  return "\n".join(
    [
      "# Points of the protocol, and the kill matrix",
      "",
      _NOTE,
      "`make test-matrix` lets real processes fail at these points in",
      "each way (SIGKILL, SIGSTOP and SIGCONT, SIGTERM, all connections cut),",
      "several faults in one job. Afterwards versions have risen in each term,",
      "an id had one holder at a time, processes ended as they were made to,",
      "joiners have got a donor's state where one was left, and no unit of the",
      "corpus is lost, or repeated but for a death,",
      "everybody who was there for the drain holds the parameters that were",
      "saved, and these are what the recorded contributions replay to.",
      "",
      f"A process is armed by `{faults.VARIABLE}`, such as",
      "`learner/1@link.after_report:kill:3; syncer@syncer.merged:stop:2:1.5`",
      "(role, point, what, at which passing, seconds of a stop), and",
      f"`{faults.LOG_VARIABLE}`, an existing file where what has happened is",
      "noted: a process that is started again goes on with the next fault.",
      "With only one of the two no process starts, and one that is armed says",
      "so in its log. Neither belongs anywhere but into a test; for faults of",
      "a job that runs there is `--chaos`.",
      "",
      *rows,
      "",
    ]
  )


def scenario() -> str:
  """docs/scenario.md: what `decoupled simulate` may be told."""
  lines = [
    "# The scenario of a simulation",
    "",
    _NOTE,
    "`decoupled simulate` has a flag for the first things one asks; any other",
    "plain value of these is `--set Part.field=value`. Groups that fail",
    "together are `--correlated CHIPS:MTBI_DAYS:RETURN_H`, planned absences",
    "`--maintenance CHIPS:EVERY_DAYS:LASTS_H`, both repeatable.",
    "[simulator.md](simulator.md) says what is done with them.",
    "",
  ]
  return "\n".join(
    lines
    + _components(
      {
        part.__name__: part
        for part in (
          Scenario,
          Failures,
          Correlated,
          Maintenance,
          Stragglers,
          Recovery,
        )
      }
    )
  )


PAGES: Mapping[str, Callable[[], str]] = {
  "configuration.md": configuration,
  "timeouts.md": timeouts,
  "events.md": event_log,
  "faults.md": fault_points,
  "scenario.md": scenario,
}


def _components(components: Mapping[str, type]) -> list[str]:
  lines = []
  for name, component in components.items():
    says = (inspect.getdoc(component) or "").splitlines()[0]
    lines += [f"### {name}", "", says, "", *_table(name, component)]
  return lines


def _table(name: str, component: type) -> list[str]:
  says = described(component)
  rows = ["| parameter | default | what it is |", "|---|---|---|"]
  for field in dataclasses.fields(component):
    rows.append(
      f"| `{name}.{field.name}` | {_default(field)} | {says[field.name]} |"
    )
  return [*rows, ""]


def _default(field: "dataclasses.Field[object]") -> str:
  if field.default is dataclasses.MISSING:
    return "—"
  if dataclasses.is_dataclass(field.default):  # has a table of its own
    return f"`{type(field.default).__name__}()`"
  return f"`{field.default!r}`"


def described(component: type) -> dict[str, str]:
  """Per attribute what the docstring says of it, as one line.

  Raises:
    KeyError: a field that the docstring leaves out.
  """
  text = inspect.getdoc(component) or ""
  section = text.partition("Attributes:\n")[2]
  section = section.partition("\n\n")[0]
  names = _ENTRY.split(textwrap.dedent(section))
  pairs = zip(names[1::2], names[2::2], strict=True)
  found = {key: " ".join(value.split()) for key, value in pairs}
  missing = [
    f.name for f in dataclasses.fields(component) if f.name not in found
  ]
  if missing:
    raise KeyError(f"{component.__name__} does not describe {missing[0]}")
  return found


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--check", action="store_true")
  check = parser.parse_args().check
  stale = []
  for name, page in PAGES.items():
    path, text = DOCS / name, page()
    if path.exists() and path.read_text("utf-8") == text:
      continue
    stale.append(name)
    if not check:
      path.write_text(text, "utf-8")
      print(path)
  if check and stale:
    print(f"out of date: {', '.join(stale)}; run `make docs`", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
