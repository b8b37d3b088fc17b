"""A job of real processes loses its syncer, a learner, then everything."""

import json
import os
import signal
from pathlib import Path

import pytest

from decoupled import cli
from tests.run.processes import QUICK, Processes, decoupled, events, of, until

LIMIT_S = 280


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_syncer_and_learner_die_then_everything_and_the_run_goes_on(
  tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
  workdir = tmp_path / "job"
  command = (
    "run",
    f"--workdir={workdir}",
    "--learners=2",
    "--devices_per_host=2",
    "--chaos=kill syncer @40r; kill learner/1 @70r",
    "Checkpoint.every_rounds=15",
    "Checkpoint.least_s=0",
    *QUICK,
  )

  # the syncer dies, then a learner; then the whole group, a while later
  first = processes.start(*command, "--rounds=100000")
  until(
    lambda: (
      any(
        e["learner"] == 1 and e["incarnation"] >= 3
        for e in of("first_step", events(workdir))
      )
      and of("round", events(workdir))[-1]["round"] >= 120
    ),
    "both to be back",
    LIMIT_S,
  )
  # every process of the job, the runner first: its children die with it
  os.kill(first.pid, signal.SIGKILL)
  first.wait(30)
  before = events(workdir)
  rounds = of("round", before)
  assert {e["term"] for e in rounds} == {1, 2}
  # learner 0 went on without a syncer, and joined the next one by itself
  joins = of("join", before)
  pids = [
    {e["holder"].rpartition(":")[2] for e in joins if e["learner"] == learner}
    for learner in (0, 1)
  ]
  assert [len(found) for found in pids] == [1, 2]
  assert max(e["incarnation"] for e in joins if e["learner"] == 0) >= 2
  saved = [e for e in of("checkpoint", before) if e["what"] == "save"]
  assert all(e["ok"] for e in saved)
  assert {e["role"] for e in saved} == {"syncer", "learner/0", "learner/1"}
  newest = max(e["round"] for e in saved if e["role"] == "syncer")

  last = newest + 40
  again = decoupled(*command, f"--rounds={last}", timeout_s=LIMIT_S)
  assert again.returncode == 0, again.stderr
  report = json.loads((workdir / "report.json").read_text())
  assert report["status"] == "completed"
  assert report["rounds"]["last"] == last
  assert report["rounds"]["lost"] == 0
  assert report["checkpoints"]["failed_saves"] == 0
  assert report["checkpoints"]["restored_from"].startswith(str(workdir))
  whole = events(workdir)
  after = whole[len(before) :]
  restored = next(e for e in of("checkpoint", after) if e["what"] == "restore")
  assert restored["round"] >= newest
  third = [e for e in of("round", after) if e["counted"]]
  assert {e["term"] for e in third} == {3}
  assert third[0]["round"] == restored["round"] + 1
  for learner in (0, 1):
    steps, earlier = (
      [e for e in of("steps", job) if e["learner"] == learner and e["step"]]
      for job in (after, before)
    )
    # step of the learning rate, data position and loss go on
    began = steps[0]["schedule_step"] - steps[0]["step"]
    assert began >= restored["round"]
    # (its own units lie a few places apart)
    assert steps[0]["position"][0] >= earlier[-1]["position"][0] - 8
    assert steps[-1]["loss"] < earlier[0]["loss"] - 0.5
    assert steps[-1]["incarnation"] > earlier[-1]["incarnation"]

  # the ledger: a repetition for each death at most, none for the whole job's
  known = of("units", before)[-1]
  assert known["repeated"] <= 2
  assert of("units", after)[0]["completed"] >= known["completed"] - 4
  assert report["data"]["units_repeated"] == 0
  assert report["data"]["units_completed"] > 0

  capsys.readouterr()
  assert cli.main(["checkpoints", "verify", f"--workdir={workdir}"]) == 0
  assert "learner_1" in capsys.readouterr().out
