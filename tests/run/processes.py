"""Real `decoupled` processes for tests, always reaped."""

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

QUICK = ("Local.pad_s=0.02", "Transformer.layers=3", "Corpus.max_bytes=2000000")


def environment() -> dict[str, str]:
  """One XLA thread a process, and none of the test session's own settings."""
  inherited = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
  env = {k: v for k, v in os.environ.items() if k not in inherited}
  return {
    **env,
    "NPROC": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": _compiled(),
  }


@functools.cache
def _compiled() -> str:
  """A cache of this session's own: only the first process compiles a step."""
  folder = tempfile.mkdtemp(prefix="decoupled-tests-")
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  return folder


def decoupled(
  *arguments: str, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
  """Runs a command to its end."""
  return subprocess.run(
    [sys.executable, "-m", "decoupled.cli", *arguments],
    capture_output=True,
    text=True,
    timeout=timeout_s,
    env=environment(),
    check=False,
  )


class Processes:
  """Commands in the background; whatever is left is killed at the end."""

  def __init__(self, folder: Path):
    self._folder = folder
    self._all: list[subprocess.Popen[bytes]] = []
    self._logs: dict[int, Path] = {}

  def start(
    self, *arguments: str, env: Mapping[str, str] | None = None
  ) -> subprocess.Popen[bytes]:
    log = self._folder / f"{len(self._all)}-{arguments[0]}.log"
    with log.open("wb") as out:
      process = subprocess.Popen(
        [sys.executable, "-m", "decoupled.cli", *arguments],
        stdout=out,
        stderr=subprocess.STDOUT,
        env={**environment(), **(env or {})},
      )
    self._all.append(process)
    self._logs[process.pid] = log
    return process

  def said(self, process: subprocess.Popen[bytes]) -> str:
    return self._logs[process.pid].read_text(errors="replace")

  def close(self) -> None:
    for process in self._all:
      if process.poll() is None:
        process.send_signal(signal.SIGKILL)
      process.wait(10)


def until(
  condition: Callable[[], bool], what: str, limit_s: float = 60.0
) -> None:
  """Waits for a condition; fails, saying for what, after the limit."""
  deadline = time.monotonic() + limit_s
  while not condition():
    if time.monotonic() > deadline:
      raise AssertionError(f"waited {limit_s} s for {what}")
    time.sleep(0.05)


def events(workdir: Path) -> list[dict[str, Any]]:
  path = workdir / "events.jsonl"
  if not path.exists():
    return []
  lines = path.read_text().splitlines()
  return [json.loads(line) for line in lines if line.endswith("}")]


def of(kind: str, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  return [event for event in found if event["kind"] == kind]
