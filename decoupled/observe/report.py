"""report.json, derived from events.jsonl and from nothing else.

Fields and meanings are those of design §7. All times are seconds from the
job's start on the syncer's clock; `downtime_s` is a duration. Where a log
holds several jobs of one run (a resumed workdir), the report is of the last;
what happened in those before it, and was lost of them, is in `earlier_jobs`.
"""

import bisect
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from decoupled.errors import DecoupledError
from decoupled.observe import gaps
from decoupled.observe.events import (
  Event,
  EventReader,
  earlier_jobs,
  last_job,
)
from decoupled.observe.gaps import Span

SCHEMA_VERSION = 1
_OF_HOSTS = ("torn_down", "decided", "connected", "executable_loaded")
FAULTS = ("kill", "term", "pause", "partition")  # these become failures
_REAPED_S = 2.0  # between the end of a process and the notice of it
SLOWING = ("slow", "throttle")  # these only make the target's steps not quiet
LOST = ("failure", "absence", "rollback", "refusal", "left_out", "stale")

Report: TypeAlias = dict[str, Any]


@dataclasses.dataclass
class Incarnation:
  """One life of a learner, as the log knows it.

  Attributes:
    number: its fencing number.
    joined: when it was granted, None if the log does not say.
    left: when it ceased to be a member.
    ready: when it held every fragment.
    first_step: when its first step was noticed.
    ends: when its steps finished.
    step_tokens: tokens of each of these steps.
    steps: inner steps it did.
    tokens: tokens it processed.
    source: where its inner optimizer state came from, None if unknown.
    cold: whether it started without a warm process, None if unknown.
    compiles: after the takeover, None if unknown.
    marks: when the parts of its start were over.
    taken_over: whether `compiles` is what a standby said of its takeover.
    exit_reason: how it ended, "" while it has not, or nobody knows.
    noticed: when the first of its hosts found the epoch before broken.
    of_hosts: when the last of them had done each part of forming another one.
  """

  number: int
  joined: float | None = None
  left: float | None = None
  ready: float | None = None
  first_step: float | None = None
  ends: list[float] = dataclasses.field(default_factory=list)
  step_tokens: list[float] = dataclasses.field(default_factory=list)
  steps: int = 0
  tokens: float = 0
  source: str | None = None
  cold: bool | None = None
  compiles: int | None = None
  marks: dict[str, float] = dataclasses.field(default_factory=dict)
  taken_over: bool = False
  exit_reason: str = ""
  noticed: float | None = None
  of_hosts: dict[str, float] = dataclasses.field(default_factory=dict)

  def sort(self) -> None:
    order = sorted(range(len(self.ends)), key=self.ends.__getitem__)
    self.ends = [self.ends[i] for i in order]
    self.step_tokens = [self.step_tokens[i] for i in order]

  @property
  def first_end(self) -> float | None:
    return self.ends[0] if self.ends else self.first_step


@dataclasses.dataclass
class Learner:
  """One learner id over all its incarnations."""

  id: int
  hosts: int = 1
  lives: dict[int, Incarnation] = dataclasses.field(default_factory=dict)
  losses: list[tuple[float, int, float]] = dataclasses.field(
    default_factory=list
  )  # (t, schedule step, loss)
  decided: list[float] = dataclasses.field(default_factory=list)

  def life(self, number: int) -> Incarnation:
    return self.lives.setdefault(number, Incarnation(number))

  @property
  def incarnations(self) -> list[Incarnation]:
    return [self.lives[number] for number in sorted(self.lives)]

  def drop_repeats(self) -> None:
    """Drops steps that were told twice.

    A learner that has lost its syncer tells the next one again of its last
    steps, since the first may have died before it logged them. The times differ
    by what the two know of the learner's clock.
    """
    last, step_s = -math.inf, 0.0
    for life in self.incarnations:
      new = bisect.bisect_right(life.ends, last + step_s / 2)
      del life.ends[:new], life.step_tokens[:new]
      if len(life.ends) > 1:
        step_s = float(np.median(np.diff(life.ends)))
      if life.ends:
        last = life.ends[-1]

  @property
  def ends(self) -> list[float]:
    return sorted(end for life in self.lives.values() for end in life.ends)

  @property
  def steps(self) -> int:
    return sum(life.steps for life in self.lives.values())

  @property
  def tokens(self) -> float:
    return sum(life.tokens for life in self.lives.values())

  def at(self, t: float) -> Incarnation | None:
    """The incarnation that was a member at time `t`, if any."""
    for life in reversed(self.incarnations):
      joined = life.joined if life.joined is not None else life.first_end
      if joined is not None and joined <= t:
        return life if life.left is None or life.left >= t else None
    return None

  def newest(self, t: float) -> int:
    """The highest incarnation that had joined by time `t`, else 0."""
    return max(
      (
        number
        for number, life in self.lives.items()
        if life.joined is not None and life.joined <= t
      ),
      default=0,
    )

  def heir(self, number: int) -> Incarnation | None:
    """Who came after an incarnation: the first that stepped, else the next."""
    later = [life for life in self.incarnations if life.number > number]
    stepped = [life for life in later if life.first_end is not None]
    return next(iter(stepped or later), None)


@dataclasses.dataclass
class Failure:
  """Something that struck a target, and how that target came back."""

  kind: str
  target: str
  at: float
  lasts: float | None = None  # seconds of a pause or a partition
  detected: float | None = None
  state: float | None = None
  ready: float | None = None
  first_step: float | None = None
  cold: bool | None = None
  compiles: int | None = None
  source: str | None = None
  phases: dict[str, float | None] = dataclasses.field(default_factory=dict)
  exited: bool = False

  @property
  def window(self) -> Span:
    """From the event until 10 s after the replacement's first step."""
    over = self.at if self.first_step is None else self.first_step
    return Span(self.at, over + gaps.SETTLE_S)


class Timeline:
  """A job's events, sorted into learners, rounds and failures.

  Args:
    events: of several jobs the last counts.
    later: of the jobs that continued this one, as far as they tell what was
      lost of it.
  """

  def __init__(self, events: Sequence[Event], later: Sequence[Event] = ()):
    self.later = later
    self.events = sorted(last_job(list(events)), key=lambda e: float(e["t"]))
    self.learners: dict[int, Learner] = {}
    for event in self.events:
      self._learner_event(event)
    for learner in self.learners.values():
      for life in learner.lives.values():
        life.sort()
      learner.drop_repeats()
    self.rounds = [r for r in self.of("round") if _complete(r)]
    self.counted = [r for r in self.rounds if r.get("counted", True)]
    self.training_until = self._training_until()
    self.failures = self._failures()

  def of(self, *kinds: str) -> list[Event]:
    return [event for event in self.events if event["kind"] in kinds]

  def last(self, kind: str) -> Event:
    """The newest event of a kind; empty if there is none."""
    found = self.of(kind)
    return found[-1] if found else {}

  @property
  def end(self) -> float:
    """When the job's own last event was; who follows it may be later."""
    own = [e for e in self.events[-64:] if e["kind"] != "heldout"]
    last = (own or self.events)[-1:]
    return float(last[0]["t"]) if last else 0.0

  # --- learners ----------------------------------------------------------

  def _learner_event(self, event: Event) -> None:
    number, incarnation = event.get("learner"), event.get("incarnation")
    if event["kind"] == "decided" and isinstance(number, int):
      if event.get("standby") is not None and number in self.learners:
        self.learners[number].decided.append(float(event["t"]))
      return
    if not isinstance(number, int) or not isinstance(incarnation, int):
      return
    learner = self.learners.setdefault(number, Learner(number))
    life = learner.life(incarnation)
    t = float(event["t"])
    match event["kind"]:
      case "join":
        life.joined = t
        life.cold = event.get("cold", life.cold)
        life.source = event.get("state_source")
        learner.hosts = int(event.get("hosts") or 1)
      case "ready":
        life.ready = t
        life.source = event.get("state_source") or life.source
        life.compiles = _programs(event.get("compiles"), life.compiles)
        life.marks.update(_marks(event.get("phases")))
      case "promoted":
        life.cold = False
      case "takeover":
        known = life.compiles if life.taken_over else None
        life.compiles = max(int(event.get("compiles") or 0), known or 0)
        life.taken_over = True
        life.marks.update(_marks(event.get("phases")))
      case "reformed":
        _add_host(life, event)
      case "first_step":
        life.first_step = t
      case "leave":
        life.left = t
        life.exit_reason = life.exit_reason or str(event.get("why") or "")
      case "steps":
        _add_steps(learner, life, event)
      case "learner_done":
        life.steps = max(life.steps, int(event.get("steps") or 0))
        life.tokens = max(life.tokens, float(event.get("tokens") or 0))
        said = str(event.get("exit_reason") or "")
        life.exit_reason = said or life.exit_reason

  def _training_until(self) -> float:
    """When training stopped on purpose, or the log's end."""
    for event in self.events:
      draining = event.get("phase") in ("draining", "ended")
      if event["kind"] == "end" or (event["kind"] == "phase" and draining):
        return float(event["t"])
    return self.end

  # --- failures ----------------------------------------------------------

  def _failures(self) -> list[Failure]:
    failures: list[Failure] = []
    for event in self.events:
      if event["kind"] == "end":
        break
      struck = event["kind"] == "fault" and not event.get("error")
      if struck and event.get("action") in FAULTS:
        failures.append(
          self._traced(
            Failure(
              event["action"],
              str(event.get("target")),
              float(event["t"]),
              lasts=_number(event.get("for")),
            )
          )
        )
      elif event["kind"] == "exit":
        self._exit(event, failures)
    return failures

  def _exit(self, event: Event, failures: list[Failure]) -> None:
    """An exit belongs to the fault before it, or is a failure of its own."""
    role, t = str(event.get("role")), float(event["t"])
    if event.get("planned") or not (event.get("code") or event.get("signal")):
      return
    for failure in reversed(failures):
      if _process(failure.target) == _process(role):
        first = failure.first_step
        if not failure.exited and (first is None or first > t):
          failure.exited = True
          return
        break
    failure = self._traced(Failure("exit", role, self._broke_off(role, t)))
    failure.exited = True
    failures.append(failure)

  def _broke_off(self, role: str, t: float) -> float:
    """When a process that was found dead at `t` fell silent.

    Its connection may have been seen to close before its exit was.
    """
    learner = self.learners.get(learner_number(role))
    life = learner.lives.get(learner.newest(t)) if learner else None
    left = life.left if life is not None else None
    return left if left is not None and 0 <= t - left <= _REAPED_S else t

  def _traced(self, failure: Failure) -> Failure:
    """Fills in how the target came back."""
    learner = self.learners.get(learner_number(failure.target))
    if learner is not None:
      self._trace_learner(failure, learner)
    elif failure.target == "syncer":
      self._trace_syncer(failure)
    return failure

  def _trace_learner(self, failure: Failure, learner: Learner) -> None:
    struck = learner.at(failure.at)
    number = struck.number if struck is not None else learner.newest(failure.at)
    if (
      struck is not None
      and failure.kind in ("pause", "partition")
      and (struck.left is None or struck.left > self._next_fault(failure))
    ):
      self._trace_resumed(failure, struck)
      return
    if struck is not None:
      failure.detected = struck.left
    heir = learner.heir(number)
    if heir is None:
      return
    joined = heir.joined
    if heir.noticed is not None and heir.noticed >= failure.at:
      known = failure.detected
      failure.detected = min(
        heir.noticed, heir.noticed if known is None else known
      )
    failure.state = heir.ready if heir.ready is not None else joined
    failure.ready = failure.state
    failure.first_step = heir.first_end
    failure.source = heir.source
    failure.compiles = heir.compiles
    failure.cold = heir.cold
    failure.phases = self._phases(failure, learner, heir)
    if failure.cold is None and joined is not None:
      failure.cold = any(
        _process(str(event.get("role"))) == _process(failure.target)
        and failure.at <= event["t"] <= joined
        for event in self.of("restart")
      )

  def _phases(
    self, failure: Failure, learner: Learner, heir: Incarnation
  ) -> dict[str, float | None]:
    """When each part of a takeover or of a restart was over.

    What a standby had done beforehand was over when it was decided.
    """
    since = failure.at
    if failure.detected is not None and not heir.of_hosts:
      since = failure.detected
    until = math.inf if heir.joined is None else heir.joined
    decided = [t for t in learner.decided if since <= t <= until]
    decided += [
      float(event["t"])
      for event in self.of("restart")
      if event.get("role") == _process(failure.target)
      and failure.at <= event["t"] <= until
      and heir.cold is not False
    ]
    decision = max(decided, default=None)
    if heir.of_hosts and decision is not None and failure.detected is not None:
      # a seat is known to be lost before the claim of the learner ends
      failure.detected = min(failure.detected, decision)
    of_hosts = heir.of_hosts
    loaded = heir.marks.get("warm", heir.marks.get("compiled"))
    loaded = of_hosts.get("executable_loaded", loaded)
    if loaded is not None:
      loaded = max(loaded, since if decision is None else decision)
    return {
      "detected_s": failure.detected,
      "decided_s": decision,
      "torn_down_s": of_hosts.get("torn_down"),  # of one host only
      "connected_s": of_hosts.get("connected", heir.joined),
      "executable_loaded_s": loaded,
      "state_received_s": heir.ready,
      "first_step_s": heir.first_end,
    }

  def _next_fault(self, failure: Failure) -> float:
    """When the target was struck again, or training stopped on purpose."""
    later = [
      float(event["t"])
      for event in self.of("fault")
      if event["t"] > failure.at and event.get("target") == failure.target
    ]
    return min([*later, self.training_until])

  def _trace_resumed(self, failure: Failure, struck: Incarnation) -> None:
    """A pause shorter than the lease: the learner itself goes on.

    After a partition of that kind nobody was ever replaced.
    """
    resumed = failure.at + (failure.lasts or 0.0)
    later = [end for end in struck.ends if end > resumed]
    if failure.kind == "pause" and later:
      failure.first_step = later[0]
      failure.cold = False

  def _trace_syncer(self, failure: Failure) -> None:
    """A syncer is back when it has closed a round under a higher term."""
    before = [r["term"] for r in self.rounds if r["merged"] <= failure.at]
    term = max(before, default=0)
    if before and failure.kind in ("pause", "partition"):
      later = [r["merged"] for r in self.rounds if r["merged"] > failure.at]
    else:
      later = [r["merged"] for r in self.rounds if r["term"] > term]
    failure.first_step = later[0] if later else None
    for event in self.events:
      t = float(event["t"])
      if t < failure.at or (later and t > later[0]):
        continue
      if event["kind"] == "exit" and event.get("role") == "syncer":
        failure.detected = t
      elif event["kind"] == "restart" and event.get("role") == "syncer":
        failure.cold = True
      elif event["kind"] == "checkpoint" and event.get("what") == "restore":
        failure.state, failure.source = t, "checkpoint"
      elif event["kind"] == "phase" and failure.detected is not None:
        failure.ready = t

  # --- quiet and disturbed -----------------------------------------------

  def busy(self, learner_id: int | None = None) -> list[Span]:
    """Every stretch in which something happened, for one learner's sake.

    Faults of any kind, exits, restarts, departures and later joins, each
    until 10 s after it (or after the first step that followed it), and, for
    the learner itself, the time it was slowed. The start-up is no event, but
    `start_up` says where quiet can begin.
    """
    spans = [failure.window for failure in self.failures]
    for event in self.of("fault", "exit", "restart", "leave"):
      t = float(event["t"])
      lasts = _number(event.get("for")) or 0.0
      spans.append(Span(t, t + lasts + gaps.SETTLE_S))
      slowed = event.get("action") in SLOWING
      if slowed and learner_number(event.get("target")) == learner_id:
        spans.append(Span(t, t + lasts if lasts else math.inf))
    started = self.start_up()
    for learner in self.learners.values():
      for life in learner.incarnations:
        if life.joined is not None and life.joined > started:
          under_way = life.first_end
          until = life.joined if under_way is None else under_way
          spans.append(Span(life.joined, until + gaps.SETTLE_S))
    return spans

  def start_up(self) -> float:
    """When every learner of the first set-up had finished a step."""
    first_fault = min(
      (f.at for f in self.failures), default=self.training_until
    )
    firsts = [
      learner.incarnations[0].first_end for learner in self.learners.values()
    ]
    return max(
      (t for t in firsts if t is not None and t <= first_fault), default=0.0
    )

  def survivors(
    self, target: str, window: Span
  ) -> list[dict[str, float | int | bool | None]]:
    """How every other learner that was training fared in `window`.

    A survivor that is itself struck, or leaves, is judged up to then; nobody
    is judged beyond the end of training.
    """
    struck = learner_number(target)
    rows = []
    for number, learner in sorted(self.learners.items()):
      life = learner.at(window.start)
      if number == struck or life is None or not life.ends:
        continue
      if life.ends[0] > window.start:
        continue
      stop = min(
        window.stop,
        self.training_until,
        life.left if life.left is not None else math.inf,
        min(
          (
            f.at
            for f in self.failures
            if learner_number(f.target) == number and f.at > window.start
          ),
          default=math.inf,
        ),
      )
      if stop <= window.start:
        continue
      clipped = Span(window.start, stop)
      quiet_run = Span(self.start_up(), self.training_until)
      verdict = gaps.judge(
        learner.ends, clipped, [*self.busy(number), clipped], quiet_run
      )
      rows.append({"id": number, **_rounded(verdict._asdict())})
    return rows


# --- the report ------------------------------------------------------------


def build(
  events: Sequence[Event],
  status: str | None = None,
  exit_reason: str | None = None,
) -> Report:
  """The report of a job's events.

  Args:
    events: in any order; of several jobs the last counts.
    status: completed, failed or interrupted; from the `end` event unless
      given, and interrupted where there is none.
    exit_reason: likewise.
  """
  line = Timeline(events)
  start, end, evaluated = (line.last(k) for k in ("start", "end", "eval"))
  discarded = _discarded(line)
  return {
    "schema_version": SCHEMA_VERSION,
    "status": status or end.get("status") or "interrupted",
    "exit_reason": (
      exit_reason if exit_reason is not None else end.get("reason") or ""
    ),
    "run_id": start.get("run_id"),
    "seed": start.get("seed"),
    "wall_s": round(line.end, 3),
    "initial_loss": evaluated.get("initial_loss"),
    "eval_loss": evaluated.get("eval_loss"),
    "eval_tokens": evaluated.get("eval_tokens"),
    "tokens_total": _whole(sum(x.tokens for x in line.learners.values())),
    "goodput": goodput(line),
    "discarded": {cause: _whole(n) for cause, n in discarded.items()},
    "learners": [_learner(x, line) for _, x in sorted(line.learners.items())],
    "rounds": _rounds(line),
    "failures": [_failure(failure, line) for failure in line.failures],
    "wire": _wire(line),
    "data": _data(line),
    "compiles": _compiles(line),
    "checkpoints": _checkpoints(line),
    "earlier_jobs": _earlier(list(events)),
  }


def _earlier(events: list[Event]) -> list[dict[str, Any]]:
  """Of each job that this one continues: how it ended, what became of it.

  A job that was killed as a whole has said nothing at its end. Which of its
  rounds are lost is known by what the next one restored.
  """
  jobs = earlier_jobs(events)
  restores = [
    [e for e in job if e["kind"] == "checkpoint"]
    for job in [*jobs, last_job(events)]
  ]
  found = []
  for i, job in enumerate(jobs):
    line = Timeline(job, [e for later in restores[i + 1 :] for e in later])
    end = line.last("end")
    found.append(
      {
        "status": end.get("status") or "interrupted",
        "exit_reason": end.get("reason") or "",
        "wall_s": round(line.end, 3),
        "tokens_total": _whole(sum(x.tokens for x in line.learners.values())),
        "discarded": {c: _whole(n) for c, n in _discarded(line).items()},
        "rounds": _rounds(line),
        "failures": [_failure(failure, line) for failure in line.failures],
      }
    )
  return found


def write(
  workdir: str | os.PathLike[str],
  status: str | None = None,
  exit_reason: str | None = None,
) -> Report:
  """Derives report.json from events.jsonl and replaces it in one move.

  Raises:
    DecoupledError: there is no log, or the report cannot be written.
  """
  workdir = Path(workdir)
  reader = EventReader(workdir / "events.jsonl")
  try:
    report = build(reader.rest(), status, exit_reason)
    report["workdir"] = os.fspath(workdir)
    report["log_lines_skipped"] = reader.skipped
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    write_atomically(workdir / "report.json", text)
  except FileNotFoundError:
    raise DecoupledError(
      f"{workdir} holds no events.jsonl, so there is nothing to report: was "
      "it the --workdir of a run?"
    ) from None
  except OSError as error:
    raise DecoupledError(f"cannot write the report: {error}") from None
  return report


def write_atomically(path: Path, text: str) -> None:
  """Replaces a file so that a reader sees the old or the new one."""
  temporary = path.with_name(f".{path.name}.{os.getpid()}")
  temporary.write_text(text, encoding="utf-8")
  os.replace(temporary, path)


def goodput(line: Timeline) -> float | None:
  """Useful tokens ÷ tokens at the median quiet step (design §2).

  Over the stretch from the opening of the first round to the closing of the
  last, counted ones only. Useful: tokens of the steps that finished in it,
  less everything discarded for another cause than overlap. Possible: for each
  learner its tokens per step times the stretch divided by its median quiet
  step; a learner of the job that never came counts like the median one.
  """
  if not line.counted:
    return None
  first = min(float(r["opened"]) for r in line.counted)
  last = max(float(r["closed"]) for r in line.counted)
  rates, processed = [], 0.0
  for number, learner in line.learners.items():
    step_s = gaps.median_step(learner.ends, line.busy(number))
    if step_s and learner.steps:
      rates.append(learner.tokens / learner.steps / step_s)
    for life in learner.incarnations:
      inside = slice(
        bisect.bisect_right(life.ends, first),
        bisect.bisect_right(life.ends, last),
      )
      processed += sum(life.step_tokens[inside])
  if not rates or last <= first:
    return None
  planned = line.last("start").get("learners")
  absent = max(0, int(planned or 0) - len(rates))
  possible = (sum(rates) + absent * float(np.median(rates))) * (last - first)
  lost = sum(n for cause, n in _discarded(line).items() if cause in LOST)
  return round(max(0.0, processed - lost) / possible, 4)


def _discarded(line: Timeline) -> dict[str, float]:
  causes: dict[str, float] = {}
  for event in line.of("discard"):
    tokens = _number(event.get("tokens")) or 0.0
    cause = str(event.get("cause"))
    causes[cause] = causes.get(cause, 0.0) + tokens
  merged_in_vain = sum(
    float(r.get("share") or 0.0) * sum((r.get("tokens") or {}).values())
    for r in _repeated(line)
  )
  if merged_in_vain:
    causes["rollback"] = causes.get("rollback", 0.0) + merged_in_vain
  return causes


def _learner(learner: Learner, line: Timeline) -> dict[str, Any]:
  """One row; gaps over the joined series of all incarnations."""
  ends = learner.ends
  times = gaps.step_times(ends)
  has = times.size > 0
  within = np.concatenate(
    [np.diff(life.ends) for life in learner.incarnations] or [np.empty(0)]
  )
  return {
    "id": learner.id,
    "hosts": learner.hosts,
    "incarnation": max(learner.lives),
    "inner_steps": learner.steps,
    "tokens": _whole(learner.tokens),
    "median_step_s": _round(float(np.median(within))) if within.size else None,
    "p99_step_s": (
      _round(float(np.percentile(within, 99))) if within.size else None
    ),
    "max_gap_s": _round(float(times.max())) if has else None,
    "final_loss": _round(learner.losses[-1][2]) if learner.losses else None,
    "exit_reason": learner.lives[max(learner.lives)].exit_reason or None,
  }


def _rounds(line: Timeline) -> dict[str, Any]:
  """Counts and means over counted rounds."""
  merged = [len(r["participants"]) for r in line.counted]
  shares = [
    len(set(r["participants"]) & set(r["alive"])) / len(set(r["alive"]))
    for r in line.counted
    if r["alive"]
  ]
  grace = [float(r.get("grace_s") or 0.0) for r in line.counted]
  length = [r["closed"] - r["opened"] for r in line.counted]
  refused: dict[str, int] = {}
  for event in line.of("refused"):
    reason = str(event.get("reason"))
    refused[reason] = refused.get(reason, 0) + 1
  return {
    "closed": len(line.counted),
    "mean_participants": _mean(merged),
    "participation": _mean(shares),
    "grace_used_s_mean": _mean(grace),
    "lost": _lost_rounds(line),
    "refused": refused,
    "median_open_s": _round(float(np.median(length))) if length else None,
    "last": max((r["round"] for r in line.counted), default=0),
    "drained": len(line.rounds) - len(line.counted),
  }


def _lost_rounds(line: Timeline) -> int:
  """Rounds that a syncer had closed and its successor had to repeat."""
  return len(_repeated(line))


def _repeated(line: Timeline) -> list[Event]:
  """The rounds that no later term went on from.

  A snapshot holds as many rounds as had been merged when it was cut, whatever
  their numbers: with two open at a time the later one may be merged first. A
  term that began without one had to close again what earlier ones had closed.
  What a fenced syncer still closed after its successor had begun is as lost.
  """
  closed: dict[int, list[Event]] = {}  # per term, in the order of merging
  for r in line.counted:
    closed.setdefault(r["term"], []).append(r)
  restores = {
    int(e["term"]): e
    for e in [*line.of("checkpoint"), *line.later]
    if e.get("what") == "restore" and "term" in e and "cut_by" in e
  }
  lost: dict[int, Event] = {}
  for term in sorted({*closed, *restores}):
    for before in [t for t in closed if t < term]:
      rounds = closed[before]
      if term in restores:
        gone = _beyond(rounds, restores[term], restores.get(before))
      else:
        first = min(r["round"] for r in closed[term])
        gone = [r for r in rounds if r["round"] >= first]
      lost |= {id(r): r for r in gone}
  return list(lost.values())


def _beyond(
  rounds: list[Event], restore: Event, base: Event | None
) -> list[Event]:
  """What a term had closed beyond a snapshot; `base` is what it restored."""
  term, cut_by = rounds[0]["term"], int(restore["cut_by"])
  if term != cut_by:
    return rounds if term > cut_by else []
  return rounds[
    max(0, int(restore["round"]) - (base["round"] if base else 0)) :
  ]


def _failure(failure: Failure, line: Timeline) -> dict[str, Any]:
  first = failure.first_step
  times = {
    "at_s": failure.at,
    "detected_s": failure.detected,
    "state_s": failure.state,
    "ready_s": failure.ready,
    "first_step_s": first,
    "downtime_s": None if first is None else first - failure.at,
  }
  return {
    "kind": failure.kind,
    "target": failure.target,
    **_rounded(times),
    "cold": failure.cold,
    "compiles_after_takeover": failure.compiles,
    "state_source": failure.source,
    "phases": _rounded(failure.phases) or None,
    "survivors": line.survivors(failure.target, failure.window),
  }


def _wire(line: Timeline) -> dict[str, Any]:
  """Totals of each syncer process added up; they start at 0 with it."""
  total = {"bytes_up": 0, "bytes_down": 0}
  for key in total:
    seen = 0
    for event in line.of("wire"):
      value = int(event.get(key) or 0)
      total[key] += value - seen if value >= seen else value
      seen = value
  return {**total, "codec": line.last("wire").get("codec")}


def _data(line: Timeline) -> dict[str, int]:
  """Units of the corpus in this job, as the ledger counted them.

  Claimed: completed or held at the end. What a syncer's death took from the
  ledger, its successor learns from the learners: counts may fall in between.
  """
  total = dict.fromkeys(("repeated", "unclaimed"), 0)
  told = line.of("units")
  first, last = (told[0], told[-1]) if told else ({}, {})
  seen = first
  for event in told:
    for key in total:
      total[key] += max(0, event.get(key, 0) - seen.get(key, 0))
    seen = event
  began = first.get("completed", 0)
  return {
    "units_claimed": last.get("claimed", 0) - began,
    "units_completed": last.get("completed", 0) - began,
    "units_repeated": total["repeated"],
    "units_unclaimed": total["unclaimed"],
  }


def _compiles(line: Timeline) -> dict[str, dict[str, int]]:
  compiles: dict[str, dict[str, int]] = {}
  for event in line.of("learner_done"):
    counts = compiles.setdefault(
      f"learner/{event.get('learner')}", {"hits": 0, "misses": 0}
    )
    for key in counts:
      counts[key] += int((event.get("compiles") or {}).get(key) or 0)
  return compiles


def _checkpoints(line: Timeline) -> dict[str, Any]:
  saved = failed = 0
  restored = None
  for event in line.of("checkpoint"):
    if str(event.get("what")).startswith("restore"):
      restored = event.get("path") if event.get("ok") else restored
    elif event.get("ok"):
      saved += 1
    else:
      failed += 1
  return {"saved": saved, "restored_from": restored, "failed_saves": failed}


# --- small things ----------------------------------------------------------


def learner_number(target: object) -> int:
  """`learner/3` and `learner/3/host/0` are 3; anything else is -1."""
  parts = str(target).split("/")
  if parts[0] == "learner" and len(parts) > 1 and parts[1].isdigit():
    return int(parts[1])
  return -1


def _process(target: str) -> str:
  """What dies and comes back as one: all hosts of a learner do."""
  return "/".join(target.split("/")[:2])


def _complete(event: Event) -> bool:
  """Whether a round event has what is reckoned with."""
  numbers = all(
    _number(event.get(key)) is not None
    for key in ("term", "round", "opened", "closed")
  )
  who = all(isinstance(event.get(k), list) for k in ("participants", "alive"))
  if numbers and who and _number(event.get("merged")) is None:
    event["merged"] = event["closed"]
  return numbers and who


def _add_steps(learner: Learner, life: Incarnation, event: Event) -> None:
  t = float(event["t"])
  ends = [float(end) for end in event.get("ends") or [] if _number(end)]
  tokens = max(_number(event.get("tokens")) or 0.0, life.tokens)
  life.ends.extend(ends)
  if ends:
    life.step_tokens.extend([(tokens - life.tokens) / len(ends)] * len(ends))
  life.tokens = tokens
  life.steps = max(life.steps, int(event.get("step") or 0))
  loss = _number(event.get("loss"))
  if loss is not None:
    learner.losses.append((t, int(event.get("schedule_step") or 0), loss))


def _number(value: object) -> float | None:
  if isinstance(value, bool) or not isinstance(value, int | float):
    return None
  return float(value) if math.isfinite(value) else None


def _add_host(life: Incarnation, event: Event) -> None:
  """A host's first step in an epoch: the last one decides how long it took."""
  earlier = life.compiles or 0 if life.taken_over else 0
  life.compiles = earlier + int(event.get("compiles") or 0)
  life.taken_over = True
  life.cold = bool(life.cold) or bool(event.get("cold"))
  life.source = event.get("state_source") or life.source
  for name, t in _marks(event.get("phases")).items():
    if name == "noticed":
      life.noticed = min(t, life.noticed or t)
    elif name in _OF_HOSTS:
      life.of_hosts[name] = max(t, life.of_hosts.get(name, t))


def _programs(said: object, known: int | None) -> int | None:
  """Programs compiled or loaded, of `{"hits", "misses"}`."""
  if not isinstance(said, dict):
    return known
  return sum(int(_number(said.get(k)) or 0) for k in ("hits", "misses"))


def _marks(said: object) -> dict[str, float]:
  if not isinstance(said, dict):
    return {}
  found = {str(name): _number(t) for name, t in said.items()}
  return {name: t for name, t in found.items() if t is not None}


def _mean(values: Iterable[float]) -> float | None:
  values = list(values)
  return _round(float(np.mean(values))) if values else None


def _round(value: float) -> float:
  return round(value, 4)


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
  return {
    key: _round(value) if isinstance(value, float) else value
    for key, value in values.items()
  }


def _whole(tokens: float) -> int:
  return round(tokens)
