"""Doing to processes and connections what a fault plan says."""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from decoupled.chaos import slow
from decoupled.chaos.plan import Event, Fault, Storm, Target
from decoupled.chaos.proxy import Proxy
from decoupled.errors import ConfigError
from decoupled.types import EventSink

_ON_HOSTS = ("kill", "term", "pause")
_AVAILABLE = ("kill", "term", "pause", "slow", "partition")


class Processes(Protocol):
  """What an injector needs of the supervisor of the local runner."""

  def pid(self, role: str) -> int | None:
    """Process id of a running role, None while it is down."""

  def send(self, role: str, number: signal.Signals) -> bool:
    """Sends a signal; False where the role is down."""

  def resume(self, pid: int) -> None:
    """Lets a stopped process go on, whatever its role is by now."""

  def expect_fault(self, role: str, restart: bool) -> None:
    """Says that the role's next exit was injected."""


def check(
  plan: Sequence[Event], learners: int, standbys: int = 0, hosts: int = 1
) -> None:
  """Raises ConfigError for events this version or this job cannot inject."""
  for event in plan:
    if isinstance(event, Storm):
      continue
    target = event.target
    unavailable = (
      event.action not in _AVAILABLE
      or (target.host is not None and event.action not in _ON_HOSTS)
      or (event.action == "slow" and target.role != "learner")
      or (event.action == "partition" and target.role == "standby")
    )
    if unavailable:
      raise ConfigError(
        f"chaos {str(event)!r} is not available yet: this version has "
        f"{', '.join(_AVAILABLE)} on learner/N (all but slow on syncer; kill, "
        "term and pause on standby/N and learner/N/host/M)"
      )
    if target.host is not None and target.host >= hosts:
      raise ConfigError(
        f"chaos {str(event)!r}: {target} does not exist, "
        f"--hosts_per_learner={hosts}"
      )
    count = standbys if target.role == "standby" else learners
    if target.index is not None and target.index >= count:
      are = f"are numbered from 0 to {count - 1}" if count else "has none"
      raise ConfigError(
        f"chaos {str(event)!r}: {target} does not exist, "
        f"--{target.role}s={count} {are}"
      )


def partitioned(plan: Sequence[Event], learners: int) -> set[int]:
  """The learners whose traffic must go through a proxy."""
  chosen: set[int] = set()
  for event in plan:
    if isinstance(event, Fault) and event.action == "partition":
      index = event.target.index
      chosen |= set(range(learners)) if index is None else {index}
  return chosen


class Injectors:
  """Starts faults, and ends those that last for a while.

  Args:
    processes: the running roles.
    control: per learner the file its `Slowdown` polls.
    proxies: per learner the proxy its traffic goes through, where one does.
    events: where each fault is recorded.
    hosts: of a learner; what hits a learner hits them all.
  """

  def __init__(
    self,
    processes: Processes,
    control: Mapping[int, Path],
    proxies: Mapping[int, Proxy],
    events: EventSink,
    hosts: int = 1,
  ):
    self._hosts = hosts
    self._processes = processes
    self._control = control
    self._proxies = proxies
    self._events = events
    # (when, fault, process id at the fault) of what must be undone.
    self._undo: list[tuple[float, Fault, list[int]]] = []

  def inject(self, fault: Fault, now_s: float) -> bool:
    """Starts a fault; False where its target is down already.

    Args:
      fault: what to do.
      now_s: seconds from the job's start.
    """
    role = str(fault.target)
    pids = self._pids(fault.target)
    down = fault.action in ("kill", "term", "pause") and not pids
    # Recorded first: what follows from it must not precede it in the log.
    self._events.emit(
      "fault",
      action=fault.action,
      target=role,
      at=f"{fault.at:g}{fault.unit}",
      **_options(fault),
      **({"error": f"{role} is down already"} if down else {}),
    )
    if down:
      return False
    self._start(fault)
    if fault.for_s is not None:
      self._undo.append((now_s + fault.for_s, fault, pids))
    return True

  def _roles(self, target: Target) -> list[str]:
    """The processes that a target is."""
    if target.role != "learner" or target.host is not None or self._hosts == 1:
      return [str(target)]
    return [f"{target}/host/{host}" for host in range(self._hosts)]

  def _pids(self, target: Target) -> list[int]:
    """Process ids of those of them that run."""
    found = [self._processes.pid(role) for role in self._roles(target)]
    return [pid for pid in found if pid is not None]

  def heal_due(self, now_s: float) -> None:
    """Ends every fault whose time is over."""
    for item in [item for item in self._undo if item[0] <= now_s]:
      self._undo.remove(item)
      self._end(item[1], item[2])

  def heal_all(self) -> None:
    """Ends every fault that is on: the job is being stopped."""
    for _, fault, pid in self._undo:
      self._end(fault, pid)
    self._undo.clear()

  @property
  def next_at_s(self) -> float:
    return min((at_s for at_s, _, _ in self._undo), default=float("inf"))

  def _start(self, fault: Fault) -> None:
    roles = [
      role
      for role in self._roles(fault.target)
      if self._processes.pid(role) is not None
    ]
    if fault.action in ("kill", "term"):
      number = signal.SIGKILL if fault.action == "kill" else signal.SIGTERM
      for role in roles:
        self._processes.expect_fault(role, fault.restart)
        self._processes.send(role, number)
    elif fault.action == "pause":
      for role in roles:
        self._processes.send(role, signal.SIGSTOP)
    elif fault.action == "slow":
      self._slow(fault, fault.by or 1.0)
    else:
      for proxy in self._cut_by(fault):
        proxy.cut()

  def _end(self, fault: Fault, pids: list[int]) -> None:
    if fault.action == "pause":
      for pid in pids:
        self._processes.resume(pid)  # it may have lost its role meanwhile
    elif fault.action == "slow":
      self._slow(fault, 1.0)
    elif fault.action == "partition":
      for proxy in self._cut_by(fault):
        proxy.heal()

  def _slow(self, fault: Fault, factor: float) -> None:
    assert fault.target.index is not None
    slow.write(self._control[fault.target.index], factor)

  def _cut_by(self, fault: Fault) -> list[Proxy]:
    index = fault.target.index
    if index is None:  # cut from the syncer: everybody
      return list(self._proxies.values())
    return [self._proxies[index]]


def _options(fault: Fault) -> dict[str, object]:
  """The options of a plan as the fields of an event."""
  options: dict[str, object] = {}
  if fault.for_s is not None:
    options["for"] = fault.for_s
  if fault.by is not None:
    options["by"] = fault.by
  if not fault.restart:
    options["norestart"] = True
  return options
