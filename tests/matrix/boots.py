"""One boot of a job, several faults: what is asked of it and what became.

The faults of a role happen one after the other (see `decoupled.faults`), those
of different roles side by side. The job goes on until all have happened and
everybody has trained again, and is then ended from outside; or it does its
rounds, for faults of the end itself. What only happens when a learner comes
back needs an occasion: one that trains is killed from outside, again and again.
"""

import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decoupled import faults
from decoupled.faults import Fault
from tests.matrix.points import JOINER
from tests.run.processes import QUICK, Processes, events, of, until

LEARNERS = 3
LEASE_S = 3.0
# A learner that is stopped for longer loses its claim, and has to see it.
SHORT_S, LONG_S = 1.0, 5.0
_BOOT_S = 180.0
_FAULT_S = 60.0
_AFTER_ROUNDS = 5
_AFTER_STEPS = 5
_SETTINGS = (
  "Checkpoint.every_rounds=10",
  "Checkpoint.least_s=0",
  "Checkpoint.keep=100000",
  f"Limits.lease_s={LEASE_S}",
  "Limits.heartbeat_s=0.5",
  *QUICK,
)


@dataclasses.dataclass(frozen=True)
class Ended:
  """A job that is over.

  Attributes:
    workdir: of the job.
    status: exit status of its runner.
    said: what the runner printed.
    asked: the faults it was to suffer.
    happened: those it suffered, in order.
    struck: roles that were killed from outside, as occasions.
    events: all of its log.
    report: its report.json.
  """

  workdir: Path
  status: int
  said: str
  asked: tuple[Fault, ...]
  happened: tuple[dict[str, Any], ...]
  struck: tuple[str, ...]
  events: tuple[dict[str, Any], ...]
  report: dict[str, Any]

  def of(self, kind: str) -> list[dict[str, Any]]:
    return of(kind, self.events)


def chain(
  points: Sequence[str], actions: Sequence[str], passing: int = 3
) -> list[str]:
  """Each action at each point; the second half of the stops lasts long."""
  found = []
  for i, point in enumerate(points):
    for action in actions:
      long = 2 * i >= len(points)
      seconds = f":{LONG_S if long else SHORT_S}" if action == "stop" else ""
      found.append(f"{point}:{action}:{passing}{seconds}")
  return found


def boot(
  folder: Path,
  processes: Processes,
  chains: Mapping[str, Sequence[str]],
  rounds: int = 0,
  *more: str,
  occasions: bool = False,
) -> Ended:
  """Runs a job whose roles suffer their chains of faults.

  Args:
    folder: the workdir is made in it.
    processes: starts and reaps.
    chains: per role its faults, without the role.
    rounds: what the job does before it ends; 0: until all have happened.
    more: further arguments of `decoupled run`.
    occasions: whether learners are killed from outside until all faults have
      happened, since these need a joiner.
  """
  workdir, log = folder / "job", folder / "faults.jsonl"
  log.touch()
  text = ";".join(
    f"{role}@{fault}" for role, found in chains.items() for fault in found
  )
  asked = faults.parse(text)
  runner = processes.start(
    "run",
    f"--workdir={workdir}",
    f"--learners={LEARNERS}",
    "--devices_per_host=1",
    f"--rounds={rounds or 1000000}",
    "--tape",
    *_SETTINGS,
    *more,
    env={faults.VARIABLE: text, faults.LOG_VARIABLE: str(log)},
  )
  longest = max(len(found) for found in chains.values())
  limit_s = _BOOT_S + _FAULT_S * longest
  job = _Watched(workdir, log, runner, asked)
  struck: list[str] = []
  if not rounds:
    while occasions and not job.all_happened():
      until(job.ready_to_lose_one, job, limit_s)
      struck += job.strike()
    until(job.all_happened, job, limit_s)
    job.last = None
    until(job.all_train, job, limit_s)
    runner.send_signal(signal.SIGTERM)
  until(lambda: runner.poll() is not None, job, limit_s)
  return Ended(
    workdir,
    runner.returncode,
    processes.said(runner),
    asked,
    tuple(faults.read(log)),
    tuple(struck),
    tuple(events(workdir)),
    json.loads((workdir / "report.json").read_text()),
  )


@dataclasses.dataclass
class _Watched:
  """A job that is under way; says what it is waited for."""

  workdir: Path
  log: Path
  runner: subprocess.Popen[bytes]
  asked: tuple[Fault, ...]
  last: float | None = None

  def all_happened(self) -> bool:
    self._alive()
    return len(faults.read(self.log)) == len(self.asked)

  def all_train(self) -> bool:
    """Everybody has finished steps and rounds since the last fault."""
    self._alive()
    found = events(self.workdir)
    if not found:
      return False
    if self.last is None:
      self.last = found[-1]["t"]
    since = [e for e in found if e["t"] > self.last + SHORT_S]
    rounds = [set(e["participants"]) for e in of("round", since)]
    together = [who for who in rounds if len(who) == LEARNERS]
    return len(together) >= _AFTER_ROUNDS

  def ready_to_lose_one(self) -> bool:
    """All step, and have saved what they go on from without a donor."""
    self._alive()
    found = events(self.workdir)
    if self.last is None:
      self.last = found[-1]["t"] if found else None
      return False
    saved = {e["role"] for e in of("checkpoint", found)}
    since = [e for e in found if e["t"] > self.last + SHORT_S]
    steps = [e["learner"] for e in of("steps", since) if e["step"]]
    return all(
      f"learner/{i}" in saved and steps.count(i) >= _AFTER_STEPS
      for i in range(LEARNERS)
    )

  def strike(self) -> list[str]:
    """Kills a learner so that the next fault may happen; [] for none left."""
    happened = {said["number"] for said in faults.read(self.log)}
    left = [f for i, f in enumerate(self.asked) if i not in happened]
    if not left:
      return []
    joins = {e["learner"]: e for e in of("join", events(self.workdir))}
    victim = self._victim(left[0], joins)
    os.kill(int(joins[victim]["holder"].rpartition(":")[2]), signal.SIGKILL)
    self.last = None
    return [f"learner/{victim}"]

  def _victim(self, fault: Fault, joins: Mapping[int, Any]) -> int:
    """Who has to come back: the joiner itself, or one who asks the donor.

    The donor is who has been there longest. So the longest of the others goes:
    if that is not the donor's turn yet, it will be.
    """
    if not fault.role.startswith("learner/"):
      return LEARNERS - 1
    learner = int(fault.role.removeprefix("learner/"))
    if fault.point == JOINER:
      return learner
    others = [i for i in joins if i != learner]
    return min(others, key=lambda i: float(joins[i]["t"]))

  def _alive(self) -> None:
    assert self.runner.poll() is None, f"the job has ended early; {self}"

  def __str__(self) -> str:
    happened = {said["number"] for said in faults.read(self.log)}
    left = [str(f) for i, f in enumerate(self.asked) if i not in happened]
    tail = [
      {k: v for k, v in e.items() if k not in ("ends", "adopted_after_s")}
      for e in events(self.workdir)[-5:]
    ]
    return f"faults that have not happened: {left}; the log ends with {tail}"
