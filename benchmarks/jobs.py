"""Runs `decoupled run` for a benchmark and reads what it left behind."""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from decoupled.launch import child
from decoupled.observe.events import read

# All jobs of one benchmark run the same program: only the first compiles it.
_CACHE = Path(tempfile.mkdtemp(prefix="decoupled-bench-cache-"))
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
# A benchmark that is terminated takes its job with it.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def tied() -> dict[str, str]:
  """For the environment of a command: it dies with this process.

  However that ends: nothing of a benchmark that is killed goes on, and takes
  the processor from the next one.
  """
  return {child.VARIABLE: str(os.getpid())}


class Job(NamedTuple):
  """What a finished job wrote."""

  report: dict[str, Any]
  events: list[dict[str, Any]]

  def of(self, kind: str) -> list[dict[str, Any]]:
    return [event for event in self.events if event["kind"] == kind]


def run(*arguments: str, config: str = "stdlib_tiny.gin") -> Job:
  """Runs a job in a folder of its own; what it prints goes to stderr.

  Raises:
    SystemExit: the job failed; its folder is then kept, and named.
  """
  root = Path(__file__).resolve().parent.parent
  folder = Path(tempfile.mkdtemp(prefix="decoupled-bench-"))
  where = folder / "job"
  done = subprocess.run(
    [
      *(sys.executable, "-m", "decoupled.cli", "run"),
      str(root / "configs" / config),
      f"--workdir={where}",
      *arguments,
    ],
    stdout=sys.stderr,
    env={
      "JAX_COMPILATION_CACHE_DIR": str(_CACHE),
      **os.environ,
      "PYTHONPATH": str(root),
      **tied(),
    },
    check=False,
  )
  if done.returncode:
    raise SystemExit(
      f"the job ended with status {done.returncode}; it is kept in {where}"
    )
  report = json.loads((where / "report.json").read_text())
  events = list(read(where / "events.jsonl"))
  shutil.rmtree(folder)
  return Job(report, events)


def step_ends(job: Job, learner: int) -> list[float]:
  """When a learner's steps finished, in seconds from the job's start."""
  return sorted(
    end
    for event in job.of("steps")
    if event["learner"] == learner
    for end in event["ends"]
  )


def say(line: dict[str, Any]) -> None:
  """One JSON line on stdout."""
  print(json.dumps(line), flush=True)


def median(values: Sequence[float]) -> float:
  ordered = sorted(values)
  middle = len(ordered) // 2
  if len(ordered) % 2:
    return ordered[middle]
  return (ordered[middle - 1] + ordered[middle]) / 2


def cpu_s(process: int) -> float:
  """CPU seconds that a process has used so far (Linux; 0 elsewhere)."""
  stat = Path(f"/proc/{process}/stat")
  if not stat.exists():
    return 0.0
  fields = stat.read_text().rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
