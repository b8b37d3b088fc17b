"""Each benchmark runs and prints what it promises; nothing is timed here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.run.processes import environment, until

ROOT = Path(__file__).parents[2]


def smoke(name: str) -> dict[str, Any]:
  """The only line that a benchmark prints with `--smoke`."""
  [line] = smoke_lines(name)
  return line


def smoke_lines(name: str, limit_s: float = 240) -> list[dict[str, Any]]:
  done = subprocess.run(
    [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--smoke"],
    capture_output=True,
    text=True,
    timeout=limit_s,
    env=environment(),
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.benchmark
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_benchmark_that_is_killed_leaves_no_job_behind(
  tmp_path: Path,
) -> None:
  benchmark = subprocess.Popen(
    [sys.executable, "-c", "import jobs; jobs.run('--rounds=1000000')"],
    cwd=ROOT / "benchmarks",
    env={**environment(), "TMPDIR": str(tmp_path)},
    stderr=subprocess.DEVNULL,
  )
  tree = Path(f"/proc/{benchmark.pid}/task/{benchmark.pid}/children")

  def dead(pid: int) -> bool:
    try:
      state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
      return True
    return state[0] == "Z"

  try:
    # the runner has locked its workdir: it is past its first lines
    until(lambda: bool(list(tmp_path.glob("*/job/logs"))), "the job", 120)
    (runner,) = map(int, tree.read_text().split())
  finally:
    benchmark.kill()
    benchmark.wait(10)
  until(lambda: dead(runner), "the job's end", 30)


@pytest.mark.benchmark
def test_inner_overhead() -> None:
  said = smoke("inner_overhead")
  assert said["ratio"] > 0
  assert said["step_s"] > 0
  assert said["rounds_per_step"] > 0  # fragments really came and went


@pytest.mark.benchmark
def test_plain_equivalence() -> None:
  said = smoke("plain_equivalence")
  assert said["bit_identical_without_merges"] is True
  assert said["max_rel_loss_diff_with_merges"] <= 1e-4
  assert said["fragments_sent"] == 24
  # lock-step: a learner that ran ahead would wait for a whole cycle each step
  assert 0 < said["rounds"] < 24 * said["steps"] / 4


@pytest.mark.benchmark
def test_exchange() -> None:
  said = smoke("exchange")
  assert 0 < said["participation"] <= 1
  assert said["open_to_adopt_steps"] > 0
  assert said["rounds_per_step"] > 0
  assert said["rounds"] == 40


@pytest.mark.benchmark
def test_recovery() -> None:
  said = smoke("recovery")
  assert said["source"] == "donor"
  assert said["repeats"] == 1
  parts = ("boot", "compile", "join", "state", "first_step", "contribution")
  assert all(said[f"{name}_s"] >= 0 for name in parts)
  assert said["total_s"] == pytest.approx(
    sum(said[f"{name}_s"] for name in parts), abs=0.01
  )


@pytest.mark.benchmark
def test_checkpoint() -> None:
  said = smoke("checkpoint")
  assert said["ratio"] > 0
  assert 0 < said["in_flight"] < 1
  assert min(said["snapshots"]) >= 2
  assert len(said["learner_mb"]) >= 5


@pytest.mark.benchmark
@pytest.mark.timeout(600)
def test_kill_all() -> None:
  moment, whole = smoke_lines("kill_all", 500)
  assert moment["at"] == "save"
  assert moment["problems"] == []
  assert moment["round"] > 0
  assert (whole["moments"], whole["good"]) == (1, 1)


def test_kill_all_sees_what_does_not_go_on(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
  import kill_all

  steps = {"schedule_step": 140, "step": 9, "position": [2, 8], "loss": 3.0}
  snapshot = {"learners": {"0": {"position": [2, 0]}}}
  before = kill_all.Facts(
    kill_all.Moment(0, "training", 0.5),
    *(1.0, 0.1, 9, 140, 3, snapshot, {0: steps}, []),
  )

  def rounds(term: int, *numbers: int) -> list[str]:
    events = [{"term": term, "round": n} for n in numbers]
    return list(kill_all.wrong_rounds(before, events, 125))

  assert rounds(4, 126, 127) == []
  assert "term 3 after term 3" in rounds(3, 126)[0]
  assert "round 125 after" in rounds(4, 125, 126)[0]
  assert "the first round was 127" in rounds(4, 127)[0]

  class Log:
    def __init__(self, **first: Any):
      self.first = {"learner": 0, **steps, "schedule_step": 135, **first}

    def events(self, kind: str) -> list[dict[str, Any]]:
      return [self.first]

  def learner(**first: Any) -> list[str]:
    return list(kill_all.wrong_learner(before, Log(**first), 0, 125))

  assert learner() == []
  assert "before round 125" in learner(schedule_step=12)[0]
  assert "it had been at 140" in learner(schedule_step=12)[1]
  assert "[1, 8], not [2, 0]" in learner(position=[1, 8])[0]
  assert "2.00 above" in learner(loss=5.0)[0]


@pytest.mark.benchmark
def test_absence() -> None:
  said = smoke("absence")
  assert said["absence_in_H"] == 1
  assert said["alone_steps"] >= 7
  assert said["discarded_over_alone"] > 0
  assert said["peak_after_return"] > 0


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
