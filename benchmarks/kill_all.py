"""Everything dies at once, at any moment: does the same command go on?

    python benchmarks/kill_all.py                    (about 12 minutes)
    python benchmarks/kill_all.py --moments=5 --seed=3

A small job of two learners as real processes, in a session of its own, is
killed with SIGKILL as a whole and started again with the same command, again
and again in one workdir (`--rounds` alone may grow). The moments are drawn
from the seed:

  boot      before the learners have made a step
  training  between 1 and 8 s after it
  save      while a snapshot is not committed yet
  drain     0 to 2 s after the drain has begun: merging, saving, evaluating

Per moment one JSON line, once the next run has shown how it went on:

  at, after_s     what was going on, and how long after it began
  round           counted rounds closed when it died
  restored        the round of the snapshot that the next run began from
  back            rounds between the two       (<= one interval, and the rounds
                  that closed while the snapshot after it was being written)
  gone_s          until no process of the job was left           (<= 5)
  problems        what did not go on as it should; none is what is asked for:
                  the newest committed snapshot or a newer one is restored,
                  under a higher term; the first round is the one after it, and
                  no version is below it; step of the learning rate and data
                  position of each learner begin at or after it; the loss is at
                  most 0.6 above the last one; status and report are true

The last line sums up. The status is 1 unless every moment is without problems.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jobs

from decoupled.observe.events import EventReader

KINDS = ("training", "save", "boot", "drain")
LEARNERS = 2
INTERVAL = 25  # rounds between two snapshots
ENDLESS = 1_000_000
LIMIT_S = 600.0  # for anything that a run has to do
GONE_S = 5.0
LOSS_ABOVE = 0.6
ROOT = Path(__file__).resolve().parent.parent


class Moment(NamedTuple):
  """When a run is killed: `part` of what the kind leaves to chance."""

  number: int
  kind: str
  part: float


class Facts(NamedTuple):
  """What a dead run had reached.

  Attributes:
    moment: at which it was killed.
    after_s: how long after the start of what was going on.
    gone_s: until nothing of it was left.
    size: of its log.
    closed: counted rounds of the newest term.
    term: the newest that closed a round.
    snapshot: the newest committed one's `state.json`, empty if there is none.
    steps: per learner its last `steps` event.
    problems: found so far.
  """

  moment: Moment
  after_s: float
  gone_s: float
  size: int
  closed: int
  term: int
  snapshot: dict[str, Any]
  steps: dict[int, dict[str, Any]]
  problems: list[str]


class Run:
  """One `decoupled run` in the workdir, in a session of its own."""

  def __init__(self, workdir: Path, rounds: int):
    self.workdir = workdir
    log = workdir / "events.jsonl"
    self.since = log.stat().st_size if log.exists() else 0
    self._reader = EventReader(log)
    self._reader.new()
    self._events: list[dict[str, Any]] = []
    self._out = (workdir.parent / "out.log").open("ab")
    self._process = subprocess.Popen(
      [
        *(sys.executable, "-m", "decoupled.cli", "run"),
        f"--workdir={workdir}",
        f"--learners={LEARNERS}",
        "--devices_per_host=1",
        f"--rounds={rounds}",
        f"Checkpoint.every_rounds={INTERVAL}",
        "Checkpoint.least_s=0",
        "Local.pad_s=0.05",
        "Corpus.max_bytes=2000000",
      ],
      stdout=self._out,
      stderr=self._out,
      start_new_session=True,
      env={**os.environ, "PYTHONPATH": str(ROOT), **jobs.tied()},
    )

  def events(self, *kinds: str) -> list[dict[str, Any]]:
    """What this run has logged so far."""
    self._events += self._reader.new()
    return [e for e in self._events if e["kind"] in kinds]

  def until(self, condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
      if self._process.poll() is not None:
        said = (self.workdir.parent / "out.log").read_text()[-2000:]
        raise SystemExit(f"the run ended while waiting for {what}:\n{said}")
      if time.monotonic() > deadline:
        raise SystemExit(f"waited {LIMIT_S:g} s for {what}")
      time.sleep(0.005)

  def stepping(self) -> bool:
    """Whether every learner has made a step, and a round has closed."""
    first = {e["learner"] for e in self.events("steps") if e["step"] > 0}
    return len(first) == LEARNERS and bool(self.events("round"))

  def kill(self) -> float:
    """Kills the whole group; how long until nothing of it was left."""
    began = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    while (left := living(self.workdir)) and time.monotonic() < began + GONE_S:
      time.sleep(0.01)
    self._out.close()
    for pid in left:  # said as a problem; the next run must not meet it
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return time.monotonic() - began

  def wait(self) -> list[str]:
    """What was wrong when it had ended by itself, or had not."""
    try:
      status = self._process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
      self.kill()
      return [f"it did not end within {LIMIT_S:g} s"]
    finally:
      self._out.close()
    report = json.loads((self.workdir / "report.json").read_text())
    if (status, report["status"]) == (0, "completed"):
      return []
    return [f"status {status}, {report['status']}: {report['exit_reason']}"]


def living(workdir: Path) -> list[int]:
  """Processes that have the workdir on their command line."""
  found = []
  for path in Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
      if str(workdir).encode() in path.read_bytes():
        found.append(int(path.parent.name))
  return [pid for pid in found if pid != os.getpid()]


# ---- a moment ----------------------------------------------------------------


def strike(run: Run, moment: Moment, boot_s: float) -> Facts:
  """Waits for the moment and kills the run; says what it had reached."""
  began = time.monotonic()
  if moment.kind == "boot":
    time.sleep(moment.part * boot_s)
  else:
    run.until(run.stepping, "the first steps")
    began = time.monotonic()
  if moment.kind == "training":
    time.sleep(1 + 7 * moment.part)
  elif moment.kind == "save":
    run.until(lambda: unfinished(run.workdir), "a save")
    began = time.monotonic()
    time.sleep(0.05 * moment.part)
  elif moment.kind == "drain":
    run.until(lambda: phases(run, "draining"), "the drain")
    began = time.monotonic()
    time.sleep(2 * moment.part)
  after_s = time.monotonic() - began
  gone_s = run.kill()
  return facts(run.workdir, moment, after_s, gone_s)


def unfinished(workdir: Path) -> list[Path]:
  """Snapshots of anybody that are not committed."""
  return [
    folder
    for folder in (workdir / "checkpoints").glob("*/*-*")
    if not (folder / "COMMITTED.json").exists()
  ]


def phases(run: Run, phase: str) -> list[dict[str, Any]]:
  return [e for e in run.events("phase") if e["phase"] == phase]


def facts(
  workdir: Path, moment: Moment, after_s: float, gone_s: float
) -> Facts:
  log = workdir / "events.jsonl"
  events = EventReader(log).new()
  rounds = [e for e in events if e["kind"] == "round" and e["counted"]]
  term = max((e["term"] for e in rounds), default=0)
  steps = {
    e["learner"]: e for e in events if e["kind"] == "steps" and e["step"] > 0
  }
  problems = []
  if gone_s >= GONE_S:
    problems.append(f"processes were left after {GONE_S:g} s")
  return Facts(
    moment,
    after_s,
    gone_s,
    log.stat().st_size if log.exists() else 0,
    max((e["round"] for e in rounds if e["term"] == term), default=0),
    term,
    newest(workdir),
    steps,
    problems,
  )


def newest(workdir: Path) -> dict[str, Any]:
  """`state.json` of the newest committed snapshot of the global model."""
  found: list[dict[str, Any]] = []
  for folder in (workdir / "checkpoints" / "global").glob("*-*"):
    if (folder / "COMMITTED.json").exists():
      found.append(json.loads((folder / "state.json").read_text()))
  return max(found, key=lambda s: (s["term"], s["rounds"]), default={})


# ---- how it went on ----------------------------------------------------------


def check(before: Facts, run: Run) -> dict[str, Any]:
  """The line of a moment; `run` is the first after it that trained."""
  problems = list(before.problems)
  restores = [
    e for e in run.events("checkpoint")
    if e["what"] == "restore" and e["role"] == "syncer"
  ]  # fmt: skip
  saved = before.snapshot
  restored = {"round": 0, "cut_by": 0}
  if restores:
    restored = restores[0]
  elif saved and run.events("end") and not run.events("phase"):
    # all was done and saved before: it began from nothing, as it only said so
    restored = {"round": saved["rounds"], "cut_by": saved["term"]}
  if saved:
    kept = (saved["term"], saved["rounds"])
    if (restored["cut_by"], restored["round"]) < kept:
      problems.append(f"restored {restored}, but {kept} was committed")
  rounds = [e for e in run.events("round") if e["counted"]]
  problems += wrong_rounds(before, rounds, restored["round"])
  back = max(0, before.closed - restored["round"])
  if saved and back > 2 * INTERVAL:
    problems.append(f"{back} rounds back, at intervals of {INTERVAL}")
  for learner in range(LEARNERS):
    problems += wrong_learner(before, run, learner, restored["round"])
  return {
    "moment": before.moment.number,
    "at": before.moment.kind,
    "after_s": round(before.after_s, 3),
    "round": before.closed,
    "restored": restored["round"],
    "back": back,
    "gone_s": round(before.gone_s, 3),
    "problems": problems,
  }


def wrong_rounds(
  before: Facts, rounds: list[dict[str, Any]], restored: int
) -> Iterator[str]:
  if rounds and rounds[0]["term"] <= before.term:
    yield f"term {rounds[0]['term']} after term {before.term}"
  low = [e["round"] for e in rounds if e["round"] <= restored]
  if low:
    yield f"round {low[0]} after a snapshot of round {restored}"
  if rounds and min(e["round"] for e in rounds) != restored + 1:
    yield f"the first round was {rounds[0]['round']}, not {restored + 1}"


def wrong_learner(
  before: Facts, run: Run, learner: int, restored: int
) -> Iterator[str]:
  last = before.steps.get(learner)
  found = [
    e for e in run.events("steps") if e["learner"] == learner and e["step"] > 0
  ]
  if last is None or not before.snapshot or not found:
    return
  first = found[0]
  began = first["schedule_step"] - first["step"]
  if began < restored:
    yield f"learner {learner} began at step {began}, before round {restored}"
  if began < last["schedule_step"] - 2 * INTERVAL - LEARNERS:
    yield (
      f"learner {learner} began at step {began}, it had been at "
      f"{last['schedule_step']}"
    )
  place = before.snapshot["learners"].get(str(learner), {}).get("position")
  if place and tuple(first["position"]) < tuple(place):
    yield (
      f"learner {learner} began its data at {first['position']}, not {place}"
    )
  if None not in (first["loss"], last["loss"]):
    above = first["loss"] - last["loss"]
    if above > LOSS_ABOVE:
      yield f"the loss of learner {learner} was {above:.2f} above the last one"


# ---- all of them -------------------------------------------------------------


def measure(moments: list[Moment], workdir: Path) -> Iterator[dict[str, Any]]:
  """A line per moment, as soon as it can be told."""
  pending: list[Facts] = []
  boot_s = 8.0
  for moment in moments:
    rounds = ENDLESS
    if moment.kind == "drain":
      rounds = reached(workdir) + 2 * INTERVAL
    began = time.monotonic()
    run = Run(workdir, rounds)
    fact = strike(run, moment, boot_s)
    if run.stepping():
      boot_s = min(20.0, stepped_at(run, time.monotonic() - began))
      yield from (check(p, run) for p in pending)
      pending = []
    pending.append(fact)
    if moment.kind == "drain":  # the same again has to end it
      yield from ends(Run(workdir, rounds), pending)
      pending = []
  run = Run(workdir, reached(workdir) + INTERVAL)
  yield from ends(run, pending)


def stepped_at(run: Run, limit_s: float) -> float:
  firsts = [e["t"] for e in run.events("first_step")]
  return float(max(firsts, default=limit_s))


def reached(workdir: Path) -> int:
  return int(newest(workdir).get("rounds", 0))


def ends(run: Run, pending: list[Facts]) -> Iterator[dict[str, Any]]:
  """The lines of what is pending, by a run that has to end in order."""
  began = time.monotonic()
  wrong = run.wait()
  for fact in pending:
    line = check(fact, run)
    line["problems"] += wrong
    yield {**line, "ended_s": round(time.monotonic() - began, 1)}


def drawn(count: int, seed: int) -> list[Moment]:
  """Every kind in turn, in a random order, at random parts of each."""
  draw = random.Random(seed)
  kinds = [KINDS[i % len(KINDS)] for i in range(count)]
  draw.shuffle(kinds)
  return [Moment(i, kind, draw.random()) for i, kind in enumerate(kinds)]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--moments", type=int, default=20)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--smoke", action="store_true", help="one moment")
  args = parser.parse_args()
  moments = drawn(args.moments, args.seed)
  if args.smoke:
    moments = [Moment(0, "save", 0.5)]
  folder = Path(tempfile.mkdtemp(prefix="decoupled-bench-"))
  (folder / "job").mkdir()
  lines = []
  try:
    for line in measure(moments, folder / "job"):
      jobs.say(line)
      lines.append(line)
  finally:
    for pid in living(folder):
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
  good = [line for line in lines if not line["problems"]]
  jobs.say(
    {
      "moments": len(lines),
      "good": len(good),
      "max_back": max(line["back"] for line in lines),
      "interval": INTERVAL,
      "max_gone_s": max(line["gone_s"] for line in lines),
      "kinds": {
        kind: sum(line["at"] == kind for line in lines) for kind in KINDS
      },
    }
  )
  if len(good) < len(lines):
    print(f"kept in {folder}", file=sys.stderr)
    return 1
  shutil.rmtree(folder)
  return 0


if __name__ == "__main__":
  sys.exit(main())
