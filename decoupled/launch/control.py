"""`stop`, `status` and `report`: from outside, on the job of a workdir."""

import os
import signal
import time
from typing import Any

from decoupled.errors import DecoupledError
from decoupled.launch.options import JobOptions
from decoupled.launch.workdir import Workdir
from decoupled.observe import events, page, report, summary

_POLL_S = 0.1


def stop(options: JobOptions) -> int:
  """Asks the job to end: it merges and saves what there is, then leaves.

  Raises:
    DecoupledError: no job is running there, or it has not ended in time.
  """
  workdir = Workdir(options.workdir)
  pid = workdir.live_process()
  if pid is None:
    raise DecoupledError(f"no job is running in {options.workdir}")
  os.kill(pid, signal.SIGTERM)
  print(f"asked process {pid} to end the job in {options.workdir}")
  deadline = time.monotonic() + options.limit_s
  while workdir.live_process() == pid:
    if time.monotonic() >= deadline:
      raise DecoupledError(
        f"process {pid} has not ended within {options.limit_s:g} s; it may "
        f"still be saving, see {options.workdir / 'logs'}"
      )
    time.sleep(_POLL_S)
  print("the job has ended")
  return 0


def status(options: JobOptions) -> int:
  """Prints where the newest job of the workdir is."""
  workdir = Workdir(options.workdir)
  if not workdir.events.exists():
    raise DecoupledError(f"{options.workdir} holds no run")
  job = events.last_job(list(events.read(workdir.events)))
  pid = workdir.live_process()
  print("\n".join(status_lines(job, pid)))
  return 0


def status_lines(job: list[dict[str, Any]], pid: int | None) -> list[str]:
  """The lines of `status`, from the events of one job.

  Args:
    job: its events.
    pid: the runner's process, None where it is not running.
  """
  newest: dict[str, dict[str, Any]] = {}
  learners: dict[int, dict[str, Any]] = {}
  for event in job:
    newest[event["kind"]] = event
    if event["kind"] in ("join", "steps", "leave"):
      learners.setdefault(event["learner"], {})[event["kind"]] = event
  phase = newest.get("phase", {}).get("phase", "starting")
  ended = newest.get("end")
  if ended:
    head = f"{ended['status']} {ended['reason']}".strip()
  elif pid is None:
    head = "not running, and it did not end properly"
  else:
    head = f"running as process {pid}, {phase}"
  asked = newest.get("start", {}).get("rounds") or "no end"
  closed = newest.get("round", {}).get("round", 0)
  lines = [head, f"round {closed} of {asked}"]
  return lines + [
    _learner_line(number, learners[number]) for number in sorted(learners)
  ]


def _learner_line(number: int, seen: dict[str, dict[str, Any]]) -> str:
  steps, join, leave = (seen.get(k, {}) for k in ("steps", "join", "leave"))
  incarnation = join.get("incarnation", steps.get("incarnation", 0))
  if leave and leave.get("incarnation") == incarnation:
    return f"learner/{number}: gone ({leave['why']})"
  loss = steps.get("loss")
  unit, offset = steps.get("position") or (0, 0)
  return (
    f"learner/{number}: incarnation {incarnation}, step "
    f"{steps.get('step', 0)}, {steps.get('tokens', 0)} tokens, loss "
    + ("-" if loss is None else f"{loss:.3f}")
    + f", data position ({unit}, {offset})"
  )


def write_report(options: JobOptions) -> int:
  """Derives report.json and report.html anew and prints the summary."""
  written = report.write(options.workdir)
  page.write(options.workdir)
  print("\n".join(summary.summary_lines(written)))
  return 0
