"""The processes of a job on this machine: started, watched, started again.

One thread per process waits for its exit, so that an exit is known at once;
everything else happens in the thread that calls `step`. Children are started
by that thread too: on Linux a child dies with the *thread* that started it.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from decoupled.errors import DecoupledError
from decoupled.launch import affinity, child, termination
from decoupled.types import EventSink

MAX_FAILURES = 3
BACKOFF_S = 0.5
_TAIL_BYTES = 1 << 16

_LOG = logging.getLogger("decoupled.run")


class RoleFailed(DecoupledError):
  """A role cannot go on; the message names it, the cause and its log."""


@dataclasses.dataclass(frozen=True)
class Role:
  """How to start one process.

  Attributes:
    name: such as `learner/1`.
    argv: program and arguments.
    env: its whole environment.
    log: file that its output is appended to.
    restarts: whether it is started again when it dies.
    done_at_zero: status 0 means that the job is done, struck or not.
    again: further arguments when it is started again; they overrule earlier
      ones.
    spare: the job goes on without it; it always boots beside training ones.
    held_s: how long its restart waits for the word whether another process
      takes its part (`release`, `swap`).
    group: roles of one group, such as the hosts of a learner, leave together:
      with one that ends in order all do, and are started again once all are
      down. One that dies is started again alone, and the others wait for it.
  """

  name: str
  argv: tuple[str, ...]
  env: Mapping[str, str]
  log: Path
  restarts: bool = True
  done_at_zero: bool = False
  again: tuple[str, ...] = ()
  spare: bool = False
  held_s: float = 0.0
  group: str = ""


class _Process:
  """One role and its current incarnation.

  A running process may change its role; what is known of the process stays
  with it, and so does its log.
  """

  def __init__(self, role: Role):
    self.role = role
    self.log = role.log
    self.displaced = False  # its part was taken while it still ran
    self.along: bool | None = None  # it goes with another of its group; again?
    self.popen: subprocess.Popen[bytes] | None = None
    self.attempt = 0
    self.was_ready = False
    self.failures = 0  # since it was ready last
    self.start_at_s: float | None = None  # a restart that is due then
    self.held = False  # until the word whether another takes its part
    self.owed_since_s: float | None = None  # until it is ready again
    self.faults: collections.deque[bool] = collections.deque()
    self.finished: int | None = None  # last exit status, if that was final
    self.log_start = 0


class Supervisor:
  """Keeps the roles of a job running.

  Args:
    events: where exits and restarts are recorded.
    backoff_s: wait before the first restart; doubles with each failure.
    max_failures: failures in a row, without being ready, that end the run.
  """

  def __init__(
    self,
    events: EventSink,
    *,
    backoff_s: float = BACKOFF_S,
    max_failures: int = MAX_FAILURES,
  ):
    self._events = events
    self._backoff_s = backoff_s
    self._max_failures = max_failures
    self._processes: dict[str, _Process] = {}
    self._exits: queue.SimpleQueue[tuple[_Process, int, int]] = (
      queue.SimpleQueue()
    )
    self._stopping = False
    self._spared: frozenset[str] = frozenset()

  # ---- what is running -------------------------------------------------------

  def pid(self, role: str) -> int | None:
    """Process id of a running role, None while it is down."""
    process = self._processes.get(role)
    return process.popen.pid if process and process.popen else None

  def knows(self, role: str) -> bool:
    """Whether there is such a role."""
    return role in self._processes

  def running(self) -> tuple[str, ...]:
    return tuple(n for n, p in self._processes.items() if p.popen is not None)

  def owed(self) -> dict[str, float]:
    """Roles whose restart is owed: since when, monotonic seconds."""
    return {
      name: process.owed_since_s
      for name, process in self._processes.items()
      if process.owed_since_s is not None
    }

  def finished(self, role: str) -> int | None:
    """Exit status of a role that will not be started again, else None."""
    return self._processes[role].finished

  def booting(self) -> tuple[str, ...]:
    """Roles that run and have not got as far as doing their work."""
    owed = self.owed()
    return tuple(
      name
      for name in self.running()
      if name in owed or not self._processes[name].was_ready
    )

  # ---- acting ----------------------------------------------------------------

  def start(self, role: Role) -> None:
    """Starts a role for the first time."""
    self._processes[role.name] = process = _Process(role)
    self._spawn(process)

  def ready(self, role: str) -> None:
    """Says that a role has got as far as doing its work."""
    process = self._processes[role]
    if process.popen is not None:
      process.was_ready = True
      process.failures = 0
      process.owed_since_s = None

  def send(self, role: str, number: signal.Signals) -> bool:
    """Sends a signal to a role's process; False where it is down."""
    process = self._processes.get(role)
    if process is None or process.popen is None:
      return False
    # Popen.send_signal polls first, and would steal the exit of the waiter.
    with contextlib.suppress(ProcessLookupError):
      os.kill(process.popen.pid, number)
      return True
    return False

  def resume(self, pid: int) -> None:
    """Lets a stopped process go on, whatever its role is by now."""
    if any(p.popen and p.popen.pid == pid for p in self._processes.values()):
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)

  def release(self, role: str) -> None:
    """Nobody else takes that role's part: a restart that waits begins."""
    process = self._processes[role]
    if process.start_at_s is not None and process.held:
      process.start_at_s, process.held = time.monotonic(), False

  def swap(self, role: str, spare: str) -> None:
    """The process of a spare role has taken a role's part.

    Each is started again as what it is from now on: the one that was there
    before, if it is to be, as the spare.

    Raises:
      RoleFailed: as `step`, since exits that are known come first.
    """
    if spare not in self._processes or role not in self._processes:
      return
    self._take_exits(0.0)
    taken, taker = self._processes[role], self._processes[spare]
    taken.role, taker.role = taker.role, taken.role
    self._processes[role], self._processes[spare] = taker, taken
    taken.displaced = taken.popen is not None
    if taken.displaced and taken.owed_since_s is not None:
      self.send(spare, signal.SIGTERM)  # it only boots, and would be refused
    taken.owed_since_s = None
    if taken.start_at_s is not None:
      taken.start_at_s, taken.held = time.monotonic(), False

  def expect_fault(self, role: str, restart: bool) -> None:
    """Says that the role's next exit was injected."""
    self._processes[role].faults.append(restart)

  def step(self, limit_s: float) -> list[str]:
    """Waits for exits, `limit_s` at most, handles them, starts what is due.

    Returns:
      The roles that exited.

    Raises:
      RoleFailed: a role failed for good.
    """
    due_s = [p.start_at_s for p in self._processes.values() if p.start_at_s]
    now_s = time.monotonic()
    limit_s = max(0.0, min([limit_s, *(due - now_s for due in due_s)]))
    exited = self._take_exits(limit_s)
    self._start_due()
    return exited

  def _take_exits(self, limit_s: float) -> list[str]:
    """Waits for an exit, handles it and all others that are known."""
    exited: list[str] = []
    with contextlib.suppress(queue.Empty):
      block = True
      while True:
        process, pid, status = self._exits.get(block, limit_s)
        block = False  # the rest only if it is there already
        exited.append(process.role.name)
        self._handle_exit(process, pid, status)
    return exited

  def stop(self, limit_s: float, number: signal.Signals) -> None:
    """Sends `number` to whatever runs; SIGKILL after the limit."""
    self.no_more_restarts()
    for number_s, wait_s in ((number, limit_s), (signal.SIGKILL, 10.0)):
      for name in self.running():
        self.send(name, number_s)
        # A stopped process acts on nothing but SIGKILL before it continues.
        self.send(name, signal.SIGCONT)
      deadline = time.monotonic() + wait_s
      while self.running() and time.monotonic() < deadline:
        self.step(min(0.2, wait_s))
      if not self.running():
        return

  def no_more_restarts(self, but: frozenset[str] = frozenset()) -> None:
    """From now on an exit is an end, except for some roles."""
    self._stopping, self._spared = True, but
    for process in self._processes.values():
      if process.role.name not in but:
        process.start_at_s = process.owed_since_s = None

  def restarts_again(self) -> None:
    """What `no_more_restarts` was said for has not come about."""
    self._stopping, self._spared = False, frozenset()

  # ---- exits -----------------------------------------------------------------

  def _handle_exit(self, process: _Process, pid: int, status: int) -> None:
    role = process.role
    process.popen = None
    displaced, process.displaced = process.displaced, False
    # Whatever it has left behind in its process group goes with it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(pid, signal.SIGKILL)
    self._events.emit(
      "exit",
      role=role.name,
      code=status if status >= 0 else None,
      signal=signal.Signals(-status).name if status < 0 else None,
      planned=displaced or process.along is not None or self._ends(role),
    )
    process.owed_since_s = None
    again = self._goes_along(process)
    if again is None:
      again = self._wants_restart(process, status)
      self._take_along(process, status, again)
    if again:
      self._plan_restart(process)
    else:
      process.finished = status

  def _goes_along(self, process: _Process) -> bool | None:
    """Whether to start a process again that went with another; None: none did.

    An end of the job is an end for all.
    """
    along, process.along = process.along, None
    if along is None:
      return None
    stays_down = False in process.faults
    process.faults.clear()  # the other one's was its, too
    if stays_down:  # and so do the others, which may have gone first
      for other in self._group(process):
        other.start_at_s = other.owed_since_s = None
        other.along = False if other.popen is not None else None
        other.finished = -signal.SIGTERM
      return False
    return along and not self._ends(process.role)

  def _take_along(self, process: _Process, status: int, again: bool) -> None:
    """What becomes of the group of a process that has ended.

    Those that are down already are started again with it. Those that run end
    by themselves, if it ended in order, as was agreed; else they go on.
    """
    if not (status == 0 or termination.told(status)):
      return
    for other in self._group(process):
      if other.popen is not None and again:
        other.along = again
      elif other.popen is None and again:
        other.finished = None
        self._plan_restart(other)

  def _group(self, process: _Process) -> list[_Process]:
    """The others of its group."""
    group = process.role.group
    return [
      other
      for other in self._processes.values()
      if group and other.role.group == group and other is not process
    ]

  def _ends(self, role: Role) -> bool:
    """Whether an exit of that role is an end by now."""
    return self._stopping and role.name not in self._spared

  def _wants_restart(self, process: _Process, status: int) -> bool:
    """Whether to start it again; raises RoleFailed where that is hopeless."""
    fault = process.faults.popleft() if process.faults else None
    if self._ends(process.role) or fault is False:
      return False
    if status == 0 and process.role.done_at_zero:
      return False
    if fault:  # injected: says nothing about the role
      return process.role.restarts or self._fail(process, status)
    if status == 0:
      return False
    process.failures += 1
    terminated = status < 0 or termination.told(status)
    hopeless = (
      not process.role.restarts
      or (not process.was_ready and not terminated)
      or process.failures > self._max_failures
    )
    return self._fail(process, status) if hopeless else True

  def _fail(self, process: _Process, status: int) -> bool:
    process.finished = status
    line = failure_line(process.role, status, process.log_start, process.log)
    if process.role.spare:
      _LOG.warning("%s; the job goes on without it", line)
      return False
    raise RoleFailed(line)

  def _plan_restart(self, process: _Process) -> None:
    now_s = time.monotonic()
    wait_s = self._backoff_s * 2 ** max(0, process.failures - 1)
    wait_s = wait_s if process.failures > 1 else 0.0
    process.held = process.role.held_s > wait_s
    process.start_at_s = now_s + max(wait_s, process.role.held_s)
    process.owed_since_s = None if process.role.spare else now_s

  def _start_due(self) -> None:
    now_s = time.monotonic()
    for process in self._processes.values():
      if process.start_at_s is not None and process.start_at_s <= now_s:
        group = self._group(process)
        if any(p.popen is not None and p.along is not None for p in group):
          continue  # all of them start together
        process.start_at_s = None
        self._spawn(process)

  def _spawn(self, process: _Process) -> None:
    role = process.role
    process.attempt += 1
    env = dict(role.env) | {child.VARIABLE: str(os.getpid())}
    core = affinity.boot_core()
    if core is not None and (process.attempt > 1 or role.spare):
      env[affinity.VARIABLE] = str(core)
    if process.attempt > 1:
      self._events.emit("restart", role=role.name, attempt=process.attempt)
    process.log = role.log
    role.log.parent.mkdir(parents=True, exist_ok=True)
    with role.log.open("ab") as log:
      process.log_start = log.tell()
      # A session of its own: Ctrl-C reaches the runner, which drains first.
      popen = subprocess.Popen(
        role.argv if process.attempt == 1 else (*role.argv, *role.again),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
    process.popen = popen
    threading.Thread(
      target=self._await_exit,
      args=(process, popen),
      name=f"wait {role.name}",
      daemon=True,
    ).start()

  def _await_exit(
    self, process: _Process, popen: "subprocess.Popen[bytes]"
  ) -> None:
    status = popen.wait()
    self._exits.put((process, popen.pid, status))


def failure_line(
  role: Role, status: int, log_start: int = 0, log: Path | None = None
) -> str:
  """One line: role, how it ended, the cause its log gives, and the log."""
  how = (
    f"was ended by {signal.Signals(-status).name}"
    if status < 0
    else f"exited with status {status}"
  )
  log = log or role.log
  cause = last_error(log, log_start)
  return f"{role.name} {how}" + (f": {cause}" if cause else "") + f"; see {log}"


def last_error(log: Path, start: int = 0) -> str:
  """The last line of a log that reads like an error, else its last line."""
  try:
    with log.open("rb") as file:
      size = file.seek(0, os.SEEK_END)
      file.seek(max(start, size - _TAIL_BYTES))
      text = file.read().decode("utf-8", "replace")
  except OSError:
    return ""
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  pattern = re.compile(r"^(decoupled \w+: |[\w.]*(Error|Exception|Refused)\b)")
  errors = [line for line in lines if pattern.match(line)]
  return (errors or lines or [""])[-1]
