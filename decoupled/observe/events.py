"""The one log of a run: events.jsonl, a JSON object a line, append-only.

Report, page, progress and metrics are derived from it and from nothing else.
Runner and syncer write it at the same time: each line is one `write` on a
descriptor opened for appending, which the kernel does not tear apart.
"""

import dataclasses
import enum
import itertools
import json
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from decoupled.clock import Clock, MonotonicClock
from decoupled.types import EventSink

Event: TypeAlias = dict[str, Any]

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Kind:
  """What one kind of event says.

  Attributes:
    says: one sentence for the documentation.
    required: fields that are always there, beside `t` and `kind`.
    optional: fields that may be there.
  """

  says: str
  required: tuple[str, ...]
  optional: tuple[str, ...] = ()


def _kind(says: str, required: str, optional: str = "") -> Kind:
  return Kind(says, tuple(required.split()), tuple(optional.split()))


# Times are seconds from the job's start; learners are named by their number,
# processes by their role ("syncer", "learner/1").
KINDS: Mapping[str, Kind] = {
  "start": _kind(
    "The job starts; t is 0. A resumed run has one `start` per job.",
    "run_id seed wall_time learners config",
    "rounds tokens hosts_per_learner devices_per_host resumed",
  ),
  "phase": _kind("The run enters a phase.", "phase why", "term round"),
  "join": _kind(
    "The syncer granted a learner its id under a new incarnation.",
    "learner incarnation hosts holder previous",
    "term position cold state_source",
  ),
  "ready": _kind(
    "A learner holds every fragment and starts its first step. "
    "`state_source`: donor, checkpoint or fresh; `age_steps`: by how many "
    "inner steps the run is ahead of that state; `phases`: when the parts of "
    "its start were over, in seconds from the job's start.",
    "learner incarnation",
    "state_source donor age_steps phases compiles",
  ),
  "standby": _kind(
    "How a standby stands in the pool: warming, ready or gone. `since`: since "
    "when it has been ready, or has not.",
    "standby holder state why fingerprint",
    "since",
  ),
  "decided": _kind(
    "Who is to take over the id of a learner whose incarnation `lost` has "
    "ended; `standby` is null where nobody can, for now.",
    "learner lost standby why",
    "host",
  ),
  "reformed": _kind(
    "A host of a learner of several has finished a first step in an epoch "
    "that others of it had to form anew. `cold`: the process was started for "
    "it; `compiles`: programs compiled or loaded from the cache since the "
    "epoch before broke, or since the host was promoted; `phases`: when the "
    "parts of it were over, in seconds from the job's start.",
    "learner incarnation host epoch step compiles cold state_source phases",
  ),
  "promoted": _kind(
    "A standby has claimed the id of a learner: its process is that learner "
    "from now on.",
    "learner incarnation standby holder",
    "fingerprint host",
  ),
  "handover": _kind(
    "A planned swap: preparing (the standby, while the learner trains), "
    "prepared (the learner is told to leave), done (the id is the standby's), "
    "or given_up, and why.",
    "learner incarnation standby state why",
  ),
  "takeover": _kind(
    "A promoted standby has finished its first step. `compiles`: programs it "
    "compiled or loaded since it was promoted; `phases`: as in `ready`.",
    "learner incarnation standby compiles phases",
  ),
  "donation": _kind(
    "A donor's optimizer state was passed on to a joiner (`ok`), or not. "
    "`donor` is null where all that could give were busy.",
    "learner donor ok bytes error",
  ),
  "first_step": _kind(
    "A learner finished its first step since joining.", "learner incarnation"
  ),
  "leave": _kind(
    "A learner is no longer a member: closed, lease, left or drained.",
    "learner incarnation why detail",
  ),
  "round": _kind(
    "A round closed. `share`: the fragment's share of all parameters; "
    "`alive`: live learners that had finished a step since joining; rounds "
    "of the drain are not `counted`.",
    "term round fragment opened quorum_at closed merged participants alive "
    "grace_s weights tokens steps share counted why",
  ),
  "refused": _kind(
    "A contribution was refused and never touched the global model.",
    "learner round fragment reason tokens",
    "incarnation detail",
  ),
  "steps": _kind(
    "What a learner did since the last such event, about once a second. "
    "`step` and `tokens` count this incarnation (with what its process did "
    "before, and never told); `ends`: when steps finished; "
    "`adopted_after_s`: from the opening of rounds to their adoption here.",
    "learner incarnation step tokens schedule_step ends loss position",
    "stage versions adopted_after_s",
  ),
  "units": _kind(
    "How the ledger of the corpus stands, about once a second while it moves; "
    "counted over the whole run. `low`: every unit below it is done; "
    "`repeated`: handed out again after a death; `unclaimed`: begun without a "
    "claim, for want of a syncer.",
    "claimed completed repeated unclaimed low",
  ),
  "discard": _kind(
    "Tokens that were processed in vain, already weighted with the "
    "fragment's share. Causes: failure, absence, rollback, refusal, overlap, "
    "left_out, stale. A negative number takes back what was counted when a "
    "learner seemed to have died.",
    "learner cause tokens",
    "fragment round",
  ),
  "fault": _kind(
    "Chaos was injected. Options of the plan are fields of their own.",
    "action target at",
    "for by norestart seed error",
  ),
  "exit": _kind(
    "A process ended.", "role code signal", "planned attempt detail"
  ),
  "restart": _kind("A process is started again.", "role attempt", "cold"),
  "learner_done": _kind(
    "Last words of an incarnation. `params_digest`: of the parameters that "
    "it holds, whose versions are `versions`, fragment by fragment.",
    "learner incarnation steps tokens median_step_s p99_step_s compiles",
    "host mfu loss versions params_digest exit_reason",
  ),
  "host_done": _kind(
    "Last words of a host that is not rank 0 of its learner; as "
    "`learner_done`, which is that one's.",
    "learner host incarnation steps tokens median_step_s p99_step_s compiles",
    "mfu loss versions params_digest exit_reason",
  ),
  "stopped": _kind(
    "A process was told to end by a signal. Outcomes: nothing_to_save, saved, "
    "not_saved, ended (the run was over by then); cut off: grace_over, "
    "asked_twice.",
    "role signal outcome took_s",
  ),
  "wire": _kind(
    "Bytes moved by this syncer process so far (up: from learners).",
    "bytes_up bytes_down codec",
    "term",
  ),
  "checkpoint": _kind(
    "A snapshot was saved (`what` = save) or restored (`what` = restore): by "
    "the syncer of `term`, cut by that of `cut_by`.",
    "what round path ok error",
    "role skipped term cut_by",
  ),
  "eval": _kind(
    "Held-out loss of version 0 and of the newest global parameters.",
    "initial_loss eval_loss eval_tokens",
    "round batches",
  ),
  "heldout": _kind(
    "Held-out loss of one snapshot of the global parameters (`decoupled "
    "evaluate --follow`).",
    "loss tokens round term path",
  ),
  "end": _kind("The job ends.", "status reason"),
}


def problems(event: Mapping[str, Any]) -> list[str]:
  """What is wrong with an event, one sentence each; empty if nothing is."""
  name = event.get("kind")
  if not isinstance(name, str) or name not in KINDS:
    return [f"unknown kind {name!r}"]
  kind = KINDS[name]
  missing = [f for f in ("t", *kind.required) if f not in event]
  known = {"t", "kind", *kind.required, *kind.optional}
  found = [f"{name} lacks {field}" for field in missing]
  return found + [
    f"{name} does not know {field}" for field in event if field not in known
  ]


class EventLog:
  """Appends events; several processes may hold the same path.

  A disk that fails never reaches the caller: the event is dropped, counted in
  `failed`, and the first time a warning is logged.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    started_at: float,
    clock: Clock | None = None,
  ):
    """Opens the log for appending.

    Args:
      path: events.jsonl.
      started_at: the job's start on the monotonic clock, in seconds.
      clock: the machine's monotonic clock unless told otherwise.
    """
    self.path = Path(path)
    self.failed = 0
    self._started_at = started_at
    self._clock = clock or MonotonicClock()
    self._lock = threading.Lock()
    self._fd: int | None = None
    self._torn = False

  def emit(self, kind: str, **fields: object) -> None:
    """Appends one event; never raises."""
    t = round(self._clock.now() - self._started_at, 6)
    try:
      line = encode({"t": t, "kind": kind, **fields})
    except (TypeError, ValueError, RecursionError) as error:
      self._count(f"event {kind!r} cannot be written as JSON: {error}")
      return
    with self._lock:
      try:
        self._append(line)
      except OSError as error:
        self._count(f"cannot write {self.path}: {error}; events are lost")

  def close(self) -> None:
    with self._lock:
      if self._fd is not None:
        os.close(self._fd)
        self._fd = None

  def _append(self, line: bytes) -> None:
    if self._fd is None:
      flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
      self._fd = os.open(self.path, flags, 0o644)
      size = os.fstat(self._fd).st_size
      self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
    # A half-written line must not swallow the next one.
    data = b"\n" + line if self._torn else line
    written = os.write(self._fd, data)
    self._torn = written < len(data) and (written > 0 or self._torn)
    if written < len(data):
      raise OSError(f"only {written} of {len(data)} bytes were written")

  def _count(self, what: str) -> None:
    self.failed += 1
    if self.failed == 1:
      _LOG.warning("%s (said once, counted from here on)", what)


class Tee:
  """Hands each event to several sinks."""

  def __init__(self, *sinks: EventSink):
    self._sinks = list(sinks)

  def add(self, sink: EventSink) -> None:
    """The sink gets every event from now on, after the others."""
    self._sinks.append(sink)

  def emit(self, kind: str, **fields: object) -> None:
    for sink in self._sinks:
      sink.emit(kind, **fields)


def encode(event: Mapping[str, Any]) -> bytes:
  """One line of JSON; NaN and infinities become null."""
  text = json.dumps(_plain(event), allow_nan=False, separators=(",", ":"))
  return text.encode() + b"\n"


def _plain(value: Any) -> Any:
  """`value` in terms of JSON; NumPy scalars and arrays included."""
  if value is None or isinstance(value, bool | int):
    return value
  if isinstance(value, enum.Enum):
    return _plain(value.value)
  if isinstance(value, str):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if isinstance(value, Mapping):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple | set | frozenset):
    items = sorted(value) if isinstance(value, set | frozenset) else value
    return [_plain(item) for item in items]
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if hasattr(value, "tolist"):
    return _plain(value.tolist())
  raise TypeError(f"{type(value).__name__} has no JSON form")


class EventReader:
  """Reads a log that may still be growing.

  Attributes:
    skipped: lines that were no event.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = Path(path)
    self.skipped = 0
    self._offset = 0

  def new(self) -> list[Event]:
    """Events appended since the last call; an unfinished line waits."""
    try:
      with open(self.path, "rb") as file:
        file.seek(self._offset)
        data = file.read()
    except FileNotFoundError:
      return []
    whole = data.rfind(b"\n") + 1
    self._offset += whole
    return self._parse(data[:whole])

  def rest(self) -> list[Event]:
    """As `new`, for a log that no longer grows: a last torn line is skipped."""
    events = self.new()
    with open(self.path, "rb") as file:
      file.seek(self._offset)
      tail = file.read()
    self._offset += len(tail)
    return events + self._parse(tail)

  def _parse(self, data: bytes) -> list[Event]:
    events = []
    for line in data.splitlines():
      event = _decode(line)
      if event is not None:
        events.append(event)
      elif line.strip():
        self.skipped += 1
    return events


def _decode(line: bytes) -> Event | None:
  try:
    event = json.loads(line)
  except (ValueError, RecursionError):
    return None
  if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
    return None
  t = event.get("t")
  if isinstance(t, bool) or not isinstance(t, int | float):
    return None
  return event


def read(path: str | os.PathLike[str]) -> Iterator[Event]:
  """Every event of a log; a torn or foreign line is passed over.

  Use `EventReader` where the number of lines passed over matters.

  Raises:
    FileNotFoundError: there is no such log.
  """
  yield from EventReader(path).rest()


def last_job(events: list[Event]) -> list[Event]:
  """The events since the newest `start` (a resumed run has several)."""
  starts = [i for i, event in enumerate(events) if event["kind"] == "start"]
  return events[starts[-1] :] if starts else events


def earlier_jobs(events: list[Event]) -> list[list[Event]]:
  """The events of each job that the newest one continues, the first first."""
  starts = [i for i, event in enumerate(events) if event["kind"] == "start"]
  jobs = [events[a:b] for a, b in itertools.pairwise(starts)]
  kept = len(jobs)
  while kept and events[starts[kept]].get("resumed"):
    kept -= 1
  return jobs[kept:]


def schema_table() -> str:
  """The schema as a Markdown table, for the documentation."""
  rows = ["| kind | says | fields | may have |", "|---|---|---|---|"]
  rows += [
    f"| `{name}` | {kind.says} | {', '.join(kind.required)} | "
    f"{', '.join(kind.optional)} |"
    for name, kind in KINDS.items()
  ]
  return "\n".join(rows) + "\n"
