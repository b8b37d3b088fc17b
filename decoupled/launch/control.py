"""`stop`, `status` and `report`: from outside, on the job of a workdir."""

import os
import signal
import time

from decoupled.errors import DecoupledError
from decoupled.launch import remote
from decoupled.launch.options import JobOptions
from decoupled.launch.workdir import Workdir
from decoupled.observe import page, report, status, summary

_POLL_S = 0.1


def stop(options: JobOptions) -> int:
  """Asks the job to end: it merges and saves what there is, then leaves.

  Raises:
    DecoupledError: no job is running there, or it has not ended in time.
  """
  if options.syncer_address:
    return remote.stop(options)
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


def show_status(options: JobOptions) -> int:
  """Prints where the newest job of the workdir is, or what a syncer says."""
  if options.syncer_address:
    return remote.show_status(options)
  lines = status.status_lines(options.workdir)
  pid = Workdir(options.workdir).live_process()
  runner = "no process runs it" if pid is None else f"run by process {pid}"
  print("\n".join([f"{options.workdir}: {runner}", *lines]))
  return 0


def write_report(options: JobOptions) -> int:
  """Derives report.json and report.html anew and prints the summary."""
  written = report.write(options.workdir)
  page.write(options.workdir)
  print("\n".join(summary.summary_lines(written)))
  return 0
