"""Each benchmark runs and prints what it promises; nothing is timed here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.run.processes import environment

ROOT = Path(__file__).parents[2]


def smoke(name: str) -> dict[str, Any]:
  """The only line that a benchmark prints with `--smoke`."""
  done = subprocess.run(
    [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--smoke"],
    capture_output=True,
    text=True,
    timeout=240,
    env=environment(),
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  [line] = done.stdout.splitlines()
  said: dict[str, Any] = json.loads(line)
  return said


def test_inner_overhead() -> None:
  said = smoke("inner_overhead")
  assert said["ratio"] > 0
  assert said["step_s"] > 0
  assert said["rounds_per_step"] > 0  # fragments really came and went


def test_plain_equivalence() -> None:
  said = smoke("plain_equivalence")
  assert said["bit_identical_without_merges"] is True
  assert said["max_rel_loss_diff_with_merges"] <= 1e-4
  assert said["fragments_sent"] == 24
  # lock-step: a learner that ran ahead would wait for a whole cycle each step
  assert 0 < said["rounds"] < 24 * said["steps"] / 4


def test_exchange() -> None:
  said = smoke("exchange")
  assert 0 < said["participation"] <= 1
  assert said["open_to_adopt_steps"] > 0
  assert said["rounds_per_step"] > 0
  assert said["rounds"] == 40


def test_recovery() -> None:
  said = smoke("recovery")
  assert said["source"] == "donor"
  assert said["repeats"] == 1
  parts = ("boot", "compile", "join", "state", "first_step", "contribution")
  assert all(said[f"{name}_s"] >= 0 for name in parts)
  assert said["total_s"] == pytest.approx(
    sum(said[f"{name}_s"] for name in parts), abs=0.01
  )


@pytest.mark.parametrize("stall_s", [0.0, 2.0])
def test_recovery_judges_the_others_of_a_snapshot(
  stall_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
  import jobs
  import recovery

  def steps(learner: int, stall: float) -> dict[str, Any]:
    ends = [0.1 * i + (stall if i > 400 else 0.0) for i in range(1, 1300)]
    return {"kind": "steps", "learner": learner, "ends": ends}

  save = {"kind": "checkpoint", "what": "save", "ok": True}
  events = [
    *(steps(0, stall_s), steps(1, 0.0), steps(2, 2.0)),
    {**save, "t": 1.0, "role": "syncer"},  # while learners still start
    {**save, "t": 40.0, "role": "learner/2"},  # whose own gap does not count
  ]
  line = recovery.snapshot_line(jobs.Job({}, events))
  assert line["repeats"] == 1
  assert line["undisturbed"] is (stall_s == 0.0)
  assert line["gap_s"] == pytest.approx(0.1 + stall_s)


@pytest.mark.parametrize(
  ("merged", "at_s", "rounds"),
  [
    ([1, 2, 3, 4, 5, 6, 7, 8], 4.5, 0),
    ([1, 2, 3, 4, 5, 8, 11, 12, 13, 14], 5.5, 2),
    ([1, 2, 3, 4, 14, 15, 16, 17], 4.5, 1),
  ],
)
def test_rounds_to_recover(
  merged: list[float], at_s: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
  import jobs
  import survivor_gap

  events = [{"kind": "round", "counted": True, "merged": t} for t in merged]
  assert survivor_gap.rounds_to_recover(jobs.Job({}, events), at_s) == rounds
