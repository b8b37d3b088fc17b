"""One host of a learner of two is swapped for a standby, in real processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.run.processes import QUICK, decoupled, events, of

PARTS = (
  "--learners=2",
  "--hosts_per_learner=2",
  "--devices_per_host=1",
  "--standbys=1",
  # a starved machine is not a frozen one
  "Limits.collective_s=10",
  "Limits.lease_s=10",
)


def swap(workdir: Path, chaos: str, rounds: int) -> tuple[Any, list[Any]]:
  """(the only failure of a job's report, the job's events)."""
  done = decoupled(
    "run", f"--workdir={workdir}", *PARTS, f"--rounds={rounds}",
    f"--chaos={chaos}", *QUICK, timeout_s=280,
  )  # fmt: skip
  logs = {
    path.name: path.read_text(errors="replace")[-2000:]
    for path in (workdir / "logs").glob("*.log")
  }
  assert done.returncode == 0, (done.stderr[-3000:], logs)
  report = json.loads((workdir / "report.json").read_text())
  assert report["status"] == "completed"
  assert report["rounds"]["closed"] == rounds
  (failure,) = report["failures"]
  return failure, events(workdir)


def check(failure: Any, job: list[Any], rank: int) -> None:
  phases = failure["phases"]
  at = failure["at_s"]
  print({name: None if t is None else t - at for name, t in phases.items()})
  assert failure["cold"] is False
  assert failure["compiles_after_takeover"] == 0
  assert failure["state_source"] == "survivor"
  assert all(t is not None for t in phases.values()), phases
  times = [phases[n] for n in ("detected_s", "connected_s", "first_step_s")]
  assert at <= times[0]
  assert times == sorted(times)
  (promoted,) = of("promoted", job)
  assert (promoted["learner"], promoted["host"]) == (0, rank)
  # the survivor kept its process, the standby has done nothing but this
  reformed = of("reformed", job)
  assert {(e["learner"], e["host"]) for e in reformed} == {(0, 0), (0, 1)}
  assert {e["cold"] for e in reformed} == {False}
  assert len({(e["epoch"], e["step"]) for e in reformed}) == 1
  joins = [e["incarnation"] for e in of("join", job) if e["learner"] == 0]
  assert joins == sorted(set(joins))
  assert len(joins) == 2
  # nobody lost or repeated anything of the model
  last = [*of("learner_done", job), *of("host_done", job)]
  ended = [e for e in last if e["exit_reason"] == "ended"]
  assert {(e["learner"], e["host"]) for e in ended} == {
    (m, h) for m in range(2) for h in range(2)
  }
  assert len({e["params_digest"] for e in ended}) == 1


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [0, 1])
def test_a_standby_takes_the_seat_of_a_host_that_is_killed(
  tmp_path: Path, rank: int
) -> None:
  chaos = f"kill learner/0/host/{rank} @150r norestart"
  failure, job = swap(tmp_path / "job", chaos, 600)
  check(failure, job, rank)
  assert not of("restart", job)


@pytest.mark.matrix
def test_a_frozen_host_loses_its_seat_and_is_refused_when_it_wakes(
  tmp_path: Path,
) -> None:
  chaos = "pause learner/0/host/1 @150r for 20s"
  failure, job = swap(tmp_path / "job", chaos, 1200)
  check(failure, job, 1)
  # the zombie ended, without a word that counted
  refused = [e for e in of("exit", job) if e["role"].startswith("standby/")]
  assert refused
  assert refused[0]["planned"]
