"""Learners of two hosts as real processes, one of which is killed."""

import json
from pathlib import Path

import pytest

from tests.run.processes import QUICK, decoupled, events, of

PARTS = ("--learners=2", "--hosts_per_learner=2", "--devices_per_host=1")
# a starved machine is not a frozen one
PATIENT = ("Limits.collective_s=10", "Limits.lease_s=10")


def run(workdir: Path, *arguments: str, timeout_s: float = 280):
  done = decoupled(
    "run", f"--workdir={workdir}", *PARTS, *arguments, *QUICK, *PATIENT,
    timeout_s=timeout_s,
  )  # fmt: skip
  logs = {
    path.name: path.read_text(errors="replace")[-3000:]
    for path in (workdir / "logs").glob("learner-*")
  }
  assert done.returncode == 0, (done.stderr[-3000:], logs)
  return json.loads((workdir / "report.json").read_text())


@pytest.mark.slow
def test_a_learner_comes_back_when_one_of_its_hosts_dies_or_leaves(
  tmp_path: Path,
) -> None:
  workdir = tmp_path / "job"
  chaos = "kill learner/0/host/1 @30r; term learner/1/host/0 @90r"
  report = run(workdir, "--rounds=200", f"--chaos={chaos}")
  assert report["status"] == "completed"
  assert [one["hosts"] for one in report["learners"]] == [2, 2]
  assert report["rounds"]["closed"] == 200
  kill, term = report["failures"]
  assert (kill["target"], term["target"]) == (
    "learner/0/host/1",
    "learner/1/host/0",
  )
  assert kill["first_step_s"] is not None
  assert term["first_step_s"] is not None
  job = events(workdir)
  # the one that was killed was started again alone: the other kept its process
  # and went on from its own copy; those told to leave did so in order
  assert sorted(e["role"] for e in of("restart", job)) == [
    "learner/0/host/1",
    *(f"learner/1/host/{h}" for h in range(2)),
  ]
  assert (kill["cold"], kill["state_source"]) == (True, "survivor")
  assert kill["phases"]["torn_down_s"] is not None
  formed = [e for e in of("reformed", job) if e["learner"] == 0]
  assert {e["host"]: e["cold"] for e in formed} == {0: False, 1: True}
  assert len({(e["epoch"], e["step"]) for e in formed}) == 1
  assert formed[0]["step"] > 0
  left = [e for e in of("exit", job) if e["role"].startswith("learner/1")]
  assert [e["code"] for e in left[:2]] == [143, 143]
  for learner in range(2):
    joins = [e for e in of("join", job) if e["learner"] == learner]
    assert {e["hosts"] for e in joins} == {2}
    numbers = [e["incarnation"] for e in joins]
    assert numbers == sorted(set(numbers))
  # replicated parameters: at the end the same on every host of every learner
  last = [*of("learner_done", job), *of("host_done", job)]
  ended = [e for e in last if e["exit_reason"] == "ended"]
  assert {(e["learner"], e["host"]) for e in ended} == {
    (m, h) for m in range(2) for h in range(2)
  }
  assert len({e["params_digest"] for e in ended}) == 1
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
  assert report["rounds"]["mean_participants"] > 1
  assert report["eval_loss"] < report["initial_loss"] - 1
  wrong = {"shape", "checksum", "counters", "nonfinite", "fragment"}
  assert not wrong & set(report["rounds"]["refused"])
  losses = [one["final_loss"] for one in report["learners"]]
  assert max(losses) < report["initial_loss"] - 1
  # each host says what lies on it: the same as its peer's of the other learner
  job = events(tmp_path / "job")
  last = [*of("learner_done", job), *of("host_done", job)]
  parts = [
    {e["params_digest"] for e in last if e["host"] == host} for host in range(2)
  ]
  assert [len(digests) for digests in parts] == [1, 1]
  assert parts[0] != parts[1]
