"""Learners of two hosts as real processes, one of which is killed."""

import json
from pathlib import Path

import pytest

from tests.run.processes import QUICK, decoupled, events, of

PARTS = ("--learners=2", "--hosts_per_learner=2", "--devices_per_host=1")


def run(workdir: Path, *arguments: str, timeout_s: float = 280):
  done = decoupled(
    "run", f"--workdir={workdir}", *PARTS, *arguments, *QUICK,
    timeout_s=timeout_s,
  )  # fmt: skip
  logs = {
    path.name: path.read_text(errors="replace")[-3000:]
    for path in (workdir / "logs").glob("learner-*")
  }
  assert done.returncode == 0, (done.stderr[-3000:], logs)
  return json.loads((workdir / "report.json").read_text())


@pytest.mark.slow
def test_a_learner_comes_back_whole_when_one_of_its_hosts_is_killed(
  tmp_path: Path,
) -> None:
  workdir = tmp_path / "job"
  report = run(
    workdir, "--rounds=120", "--chaos=kill learner/0/host/1 @30r"
  )  # fmt: skip
  assert report["status"] == "completed"
  assert [one["hosts"] for one in report["learners"]] == [2, 2]
  assert report["rounds"]["closed"] == 120
  [failure] = report["failures"]
  assert failure["target"] == "learner/0/host/1"
  assert failure["first_step_s"] is not None
  job = events(workdir)
  assert {e["role"] for e in of("restart", job)} == {
    "learner/0/host/0",
    "learner/0/host/1",
  }
  # the hosts of a learner share an incarnation; the new one trains to the end
  joins = [e for e in of("join", job) if e["learner"] == 0]
  assert [e["hosts"] for e in joins] == [2] * len(joins)
  counted = [e for e in of("round", job) if e["counted"]]
  assert any(0 in e["participants"] for e in counted[-20:])
  # replicated parameters: at the end the same on every host of every learner
  last = [*of("learner_done", job), *of("host_done", job)]
  assert len({(e["learner"], e["host"]) for e in last}) == 4
  ended = [e for e in last if e["exit_reason"] == "ended"]
  assert len(ended) == 4
  assert len({e["params_digest"] for e in ended}) == 1
  assert not any(report["rounds"]["refused"].values())
  # tau is wider where hosts agree a step late
  assert "Exchange.tau = 4" in (workdir / "config.gin").read_text()


@pytest.mark.slow
def test_parameters_sharded_over_hosts_are_merged_from_their_parts(
  tmp_path: Path,
) -> None:
  report = run(
    tmp_path / "job", "--rounds=60", "Mesh.fsdp=2", "Exchange.adoption='carry'",
    "Exchange.codec='bfloat16'",
  )  # fmt: skip
  assert report["status"] == "completed"
  assert report["rounds"]["mean_participants"] > 1.5
  assert report["eval_loss"] < report["initial_loss"] - 1
  assert not any(report["rounds"]["refused"].values())
  losses = [one["final_loss"] for one in report["learners"]]
  assert max(losses) < report["initial_loss"] - 1
