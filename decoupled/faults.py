"""Named points of the protocol at which a test lets a process fail.

    DECOUPLED_FAULTS='learner/1@link.after_report:kill:3; syncer@...'
    DECOUPLED_FAULTS_LOG=<an existing file>

    faults = fault { ";" fault }
    fault  = role "@" point ":" action ":" PASSING [ ":" SECONDS ]

A role's faults happen one after the other, each once: at the PASSING-th time
(from 1) that its point is passed, counted from the fault before it or from
the start of the process. What has happened is written to the log first, so
that a process that is started again goes on with the next one, and a test can
see that a point was reached.

This is for tests. Nothing happens unless both variables are set and the file
is there, and a process that is armed says so in its log. Unarmed, a point
costs one comparison. `algorithm/` has no points; it is pure.
"""

import collections
import contextlib
import dataclasses
import difflib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

from decoupled.errors import ConfigError

VARIABLE = "DECOUPLED_FAULTS"
LOG_VARIABLE = "DECOUPLED_FAULTS_LOG"

# Where each stands is found by its name. Learners have points of `link`,
# `learner` and `wire`, the syncer those of `syncer`, both of `checkpoint`.
POINTS: Mapping[str, str] = {
  "link.joined": "The id is granted; the control stream is not open yet.",
  "link.before_report": "A report is made; nothing of it has gone out.",
  "link.after_report": "A report has been handed to the connection.",
  "link.extracting": "Units are being copied; nobody waits for them yet.",
  "link.landed": "A host copy is there; it has not been reported.",
  "link.pull_received": "A copy is wanted and about to be sent.",
  "link.staged": "A merged fragment lies on the devices, not adopted yet.",
  "link.adopting": "A fragment is adopted; counters and version are not.",
  "link.drained": "This learner has stopped for the drain, and says so.",
  "learner.finished": "The run has ended here; the last save has not begun.",
  "wire.half_sent": "The head of a contribution has gone out, no data yet.",
  "wire.half_received": "The head of a merged fragment is here, no data yet.",
  "syncer.restored": "The newest snapshot is read; nobody is served yet.",
  "syncer.granted": "An id is granted; the learner has not heard of it.",
  "syncer.report_received": "A report is here and not taken in yet.",
  "syncer.half_received": "A part of a contribution is here.",
  "syncer.received": "A contribution is here and not taken in yet.",
  "syncer.half_sent": "The head of a merged fragment has gone out, no data.",
  "syncer.merging": "A merge is about to run.",
  "syncer.merged": "A merge is done; its version is not written.",
  "syncer.before_broadcast": "A version is written; nobody has heard of it.",
  "syncer.renewing": "The renewed lease is written but not in its place.",
  "syncer.draining": "The drain has begun; nobody has heard of it.",
  "syncer.ended": "The run has ended; the last snapshot is not saved.",
  "syncer.handing_over": "It was told to end and merges no more; all unsaved.",
  "checkpoint.begun": "The folder of a snapshot is there, empty.",
  "checkpoint.half_written": "What is no array is saved; arrays are not.",
  "checkpoint.file": "One file of a snapshot is on disk and hashed.",
  "checkpoint.before_commit": "All is written but the marker's name.",
  "checkpoint.committed": "It is committed; older ones are not dropped yet.",
  "donor.asked": "A joiner's request is seen; nothing is copied yet.",
  "donor.donating": "The head of an optimizer state has gone to a joiner.",
  "donor.receiving": "A part of a donor's optimizer state is here.",
  "standby.offered": "An id is offered to a standby; it has not claimed it.",
  "standby.prepared": "All for a planned swap is here; the old one trains.",
  "standby.claimed": "A standby has claimed an id; it has taken no step.",
  "host.connected": "A host is in an epoch of its learner, and has no state.",
  "syncer.relaying": "A part of an optimizer state is to be passed on.",
}

# kill, term: SIGKILL, SIGTERM to the own process. stop: SIGSTOP, and SIGCONT
# after SECONDS. cut: every TCP connection of the process is shut down.
ACTIONS = ("kill", "term", "stop", "cut")
STOP_S = 2.0

_FAULT = re.compile(
  r"(?P<role>[\w/-]+)\s*@\s*(?P<point>[\w.]+):(?P<action>\w+)"
  r":(?P<passing>[1-9]\d*)(:(?P<seconds>\d+(\.\d+)?))?"
)
_LOG = logging.getLogger("decoupled.faults")


@dataclasses.dataclass(frozen=True)
class Fault:
  """One failure of one process.

  Attributes:
    role: such as `learner/1` or `syncer`.
    point: where, one of `POINTS`.
    action: what, one of `ACTIONS`.
    passing: at which passing of the point.
    seconds: how long `stop` lasts.
  """

  role: str
  point: str
  action: str
  passing: int
  seconds: float = STOP_S

  def __str__(self) -> str:
    seconds = f":{self.seconds:g}" if self.action == "stop" else ""
    where = f"{self.role}@{self.point}"
    return f"{where}:{self.action}:{self.passing}{seconds}"


class _Armed:
  """The faults that a process still has before it."""

  def __init__(self, role: str, faults: list[tuple[int, Fault]], log: Path):
    self._role = role
    self._log = log
    self._left = collections.deque(faults)
    self._passed = 0
    self._lock = threading.Lock()

  def passed(self, point: str) -> None:
    with self._lock:
      if not self._left or self._left[0][1].point != point:
        return
      number, fault = self._left[0]
      self._passed += 1
      if self._passed < fault.passing:
        return
      self._left.popleft()
      self._passed = 0
      self._note(number, fault)
    _do(fault)

  def _note(self, number: int, fault: Fault) -> None:
    """Before it happens: the process may not live to say it afterwards."""
    said = {"number": number, "pid": os.getpid(), **dataclasses.asdict(fault)}
    fd = os.open(self._log, os.O_WRONLY | os.O_APPEND)
    try:
      os.write(fd, json.dumps(said).encode() + b"\n")
    finally:
      os.close(fd)


_armed: _Armed | None = None


def reached(point: str) -> None:
  """Says that the process passes a point; nothing more unless armed."""
  if _armed is not None:
    _armed.passed(point)


def arm(role: str, environ: Mapping[str, str] = os.environ) -> None:
  """Arms this process with what the environment has for its role.

  Args:
    role: of this process, such as `learner/1`.
    environ: where `VARIABLE` and `LOG_VARIABLE` may be.

  Raises:
    ConfigError: what they say is not possible, or only one of them is set.
  """
  global _armed
  _armed = None
  text, name = environ.get(VARIABLE, ""), environ.get(LOG_VARIABLE, "")
  if not text and not name:
    return
  if not text or not Path(name).is_file():
    raise ConfigError(
      f"{VARIABLE}={text!r} needs {LOG_VARIABLE} to name an existing file, "
      f"not {name!r}: faults are for tests; unset both to run without any"
    )
  happened = {said["number"] for said in read(Path(name))}
  faults = [
    (number, fault)
    for number, fault in enumerate(parse(text))
    if fault.role == role and number not in happened
  ]
  if faults:
    _LOG.warning(
      "this process will fail on purpose (%s): %s",
      VARIABLE,
      "; ".join(str(fault) for _, fault in faults),
    )
    _armed = _Armed(role, faults, Path(name))


def disarm() -> None:
  """Nothing happens at any point any more."""
  global _armed
  _armed = None


def parse(text: str) -> tuple[Fault, ...]:
  """The faults of a text; `parse(str(fault))` gives the fault back.

  Raises:
    ConfigError: it is none; the nearest known name is given.
  """
  return tuple(_one(part.strip()) for part in text.split(";") if part.strip())


def read(log: Path) -> list[dict[str, object]]:
  """What has happened so far; a line that is still being written waits."""
  lines = log.read_text(encoding="utf-8").splitlines()
  return [json.loads(line) for line in lines if line.endswith("}")]


def _one(text: str) -> Fault:
  match = _FAULT.fullmatch(text)
  if match is None:
    raise ConfigError(
      f"{VARIABLE}: {text!r} is no fault: "
      "ROLE@POINT:ACTION:PASSING[:SECONDS], such as "
      "learner/1@link.after_report:kill:3"
    )
  _known("point", match["point"], tuple(POINTS))
  _known("action", match["action"], ACTIONS)
  return Fault(
    match["role"],
    match["point"],
    match["action"],
    int(match["passing"]),
    float(match["seconds"] or STOP_S),
  )


def _known(what: str, name: str, names: tuple[str, ...]) -> None:
  if name not in names:
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    raise ConfigError(
      f"{VARIABLE}: there is no {what} {name!r}; did you mean {nearest!r}?"
    )


def _do(fault: Fault) -> None:
  if fault.action == "stop":
    _stop(fault.seconds)
  elif fault.action == "cut":
    _cut()
  else:
    number = signal.SIGKILL if fault.action == "kill" else signal.SIGTERM
    os.kill(os.getpid(), number)


def _stop(seconds: float) -> None:
  """Stops this process; a child that is not stopped continues it."""
  again = f"sleep {seconds:g}; kill -CONT {os.getpid()}"
  waker = subprocess.Popen(
    ["/bin/sh", "-c", again],
    stdin=subprocess.DEVNULL,
    start_new_session=True,
  )
  os.kill(os.getpid(), signal.SIGSTOP)
  threading.Thread(target=waker.wait, daemon=True).start()


def _cut() -> None:
  """Shuts down every TCP connection of this process, both ways at once."""
  folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
  for name in os.listdir(folder):
    with contextlib.suppress(OSError):  # no socket, or not connected
      _shut(os.dup(int(name)))


def _shut(copy: int) -> None:
  try:
    connection = socket.socket(fileno=copy)
  except OSError:
    os.close(copy)
    raise
  with connection:
    if connection.family in (socket.AF_INET, socket.AF_INET6):
      connection.getpeername()  # raises for one that only listens
      connection.shutdown(socket.SHUT_RDWR)
