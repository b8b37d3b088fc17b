"""The library door: about ten lines join a plain Optax loop to a run."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_optax.py"
MARK = "# +"
LIMIT_S = 120.0
ROUNDS = 24


def test_joining_takes_about_ten_lines() -> None:
  lines = EXAMPLE.read_text("utf-8").splitlines()
  added = [line for line in lines if line.endswith(MARK)]
  loop = [line for line in lines[lines.index("import hashlib") :] if line]
  assert 5 <= len(added) <= 10
  assert 30 <= len(loop) - len(added) <= 45


def test_without_the_added_lines_it_is_a_plain_loop() -> None:
  lines = EXAMPLE.read_text("utf-8").splitlines()
  plain = "\n".join(line for line in lines if not line.endswith(MARK))
  compile(plain, "plain", "exec")
  code = plain.split('"""', 2)[2]
  assert "decoupled" not in code
  assert "link" not in code


@pytest.fixture
def processes() -> Iterator[list["subprocess.Popen[str]"]]:
  """Whatever is started ends with the test."""
  started: list[subprocess.Popen[str]] = []
  yield started
  for process in started:
    process.kill()
  for process in started:
    process.communicate(timeout=LIMIT_S)


def test_two_processes_end_with_equal_parameters(
  tmp_path: Path, processes: list["subprocess.Popen[str]"]
) -> None:
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  environment["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

  def start(*command: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
      [sys.executable, *command],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      env=environment,
    )
    processes.append(process)
    return process

  syncer = start(
    *("-m", "decoupled.cli", "syncer"),
    *("Exchange.H=16", "Exchange.P=4", "Exchange.tau=8"),
    *("--learners=2", f"--rounds={ROUNDS}"),
    f"--workdir={tmp_path}",
  )
  address = _published(tmp_path / "syncer.address", syncer)
  token = str(tmp_path / "run.token")
  learners = [start(str(EXAMPLE), address, token) for _ in range(2)]
  said = [_finished(process) for process in [*learners, syncer]]

  ends = [
    re.search(r"^(\d+) steps, .* parameters (\w+)$", s, re.M) for s in said
  ]
  assert ends[0] is not None, said[0]
  assert ends[1] is not None, said[1]
  assert ends[0][2] == ends[1][2]
  rounds = _rounds(tmp_path / "events.jsonl")
  assert sum(r["counted"] for r in rounds) == ROUNDS
  contributed = {id for r in rounds for id in r["participants"]}
  assert contributed == {0, 1}


def _published(path: Path, syncer: "subprocess.Popen[str]") -> str:
  deadline = time.monotonic() + LIMIT_S
  while not path.exists():
    assert syncer.poll() is None, syncer.communicate()[0]
    assert time.monotonic() < deadline, f"no {path.name} in {LIMIT_S} s"
    time.sleep(0.02)
  return path.read_text("ascii").strip()


def _finished(process: "subprocess.Popen[str]") -> str:
  try:
    said, _ = process.communicate(timeout=LIMIT_S)
  except subprocess.TimeoutExpired as late:
    pytest.fail(f"not finished in {LIMIT_S} s: {late.stdout!r}")
  assert process.returncode == 0, said
  return said


def _rounds(path: Path) -> list[dict[str, object]]:
  events = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
  return [event for event in events if event["kind"] == "round"]
