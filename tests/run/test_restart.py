"""A job of real processes loses its syncer, a learner, then everything.

One job for all of it, since what takes long is that processes boot: faults
while it runs, a restart of the whole, an end, a longer run after that.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from decoupled import cli
from tests.run.processes import QUICK, Processes, decoupled, events, of, until

LIMIT_S = 280


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_outlives_its_syncer_a_learner_and_itself(
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
      _stepped_after_its_death(events(workdir))
      and of("round", events(workdir))[-1]["round"] >= 120
    ),
    "both to be back",
    LIMIT_S,
  )
  # every process of the job, the runner first: its children die with it
  os.kill(first.pid, signal.SIGKILL)
  first.wait(30)
  before = events(workdir)
  newest = _of_the_deaths(before)

  # the same command again: it goes on, and ends
  last = newest + 40
  again = decoupled(*command, f"--rounds={last}", timeout_s=LIMIT_S)
  assert again.returncode == 0, again.stderr
  report = _report(workdir)
  assert report["rounds"]["last"] == last
  _of_the_restart(report, before, events(workdir)[len(before) :], newest)

  # nothing is left to do
  again = decoupled(*command, f"--rounds={last}")
  assert again.returncode == 0
  assert "complete" in again.stdout + again.stderr

  # a longer run goes on exactly there
  before = events(workdir)
  longer = decoupled(*command, f"--rounds={last + 30}", timeout_s=LIMIT_S)
  assert longer.returncode == 0, longer.stderr
  after = events(workdir)[len(before) :]
  _of_the_longer_run(_report(workdir), before, after, last)

  other = decoupled(*command, f"--rounds={last + 40}", "Outer.momentum=0.5")
  assert other.returncode != 0
  assert "Outer.momentum" in other.stderr
  assert "0.8" in other.stderr
  assert "Traceback" not in other.stderr

  capsys.readouterr()
  assert cli.main(["checkpoints", "verify", f"--workdir={workdir}"]) == 0
  assert "learner_1" in capsys.readouterr().out


def _stepped_after_its_death(job: list[dict[str, Any]]) -> bool:
  """Whether a second process of learner 1 has trained.

  The incarnation alone would not say so: it rises with a lapsed lease, too.
  """
  joins = [e for e in of("join", job) if e["learner"] == 1]
  second = {
    e["incarnation"] for e in joins if e["holder"] != joins[0]["holder"]
  }
  return any(
    e["learner"] == 1 and e["incarnation"] in second
    for e in of("first_step", job)
  )


def _report(workdir: Path) -> dict[str, Any]:
  report: dict[str, Any] = json.loads((workdir / "report.json").read_text())
  assert report["status"] == "completed"
  assert (workdir / "report.html").read_text().startswith("<!doctype html>")
  logs = {path.name for path in (workdir / "logs").iterdir()}
  assert logs >= {"syncer.log", "learner-0.log"}
  return report


def _of_the_deaths(job: list[dict[str, Any]]) -> int:
  """Returns the round of the newest snapshot of the syncer."""
  assert {e["term"] for e in of("round", job)} == {1, 2}
  # learner 0 went on without a syncer, and joined the next one by itself
  joins = of("join", job)
  pids = [
    {e["holder"].rpartition(":")[2] for e in joins if e["learner"] == learner}
    for learner in (0, 1)
  ]
  assert [len(found) for found in pids] == [1, 2]
  assert max(e["incarnation"] for e in joins if e["learner"] == 0) >= 2
  # the one that died got the optimizer state of the other
  back = [e for e in of("ready", job) if e["learner"] == 1][-1]
  assert (back["state_source"], back["donor"]) == ("donor", 0)
  assert back["age_steps"] is not None
  given = of("donation", job)[-1]
  assert (given["learner"], given["donor"], given["ok"]) == (1, 0, True)
  saved = [e for e in of("checkpoint", job) if e["what"] == "save"]
  assert all(e["ok"] for e in saved)
  assert {e["role"] for e in saved} == {"syncer", "learner/0", "learner/1"}
  return int(max(e["round"] for e in saved if e["role"] == "syncer"))


def _of_the_restart(
  report: dict[str, Any],
  before: list[dict[str, Any]],
  after: list[dict[str, Any]],
  newest: int,
) -> None:
  assert report["checkpoints"]["failed_saves"] == 0
  assert "/checkpoints/global/" in report["checkpoints"]["restored_from"]
  assert report["eval_loss"] < report["initial_loss"] - 1
  restored = next(e for e in of("checkpoint", after) if e["what"] == "restore")
  assert restored["round"] >= newest
  # nobody had trained yet who could give the first one anything
  sources = [e["state_source"] for e in of("ready", after)]
  assert sources[0] == "checkpoint"
  assert set(sources) <= {"checkpoint", "donor"}
  third = [e for e in of("round", after) if e["counted"]]
  assert {e["term"] for e in third} == {3}
  assert third[0]["round"] == restored["round"] + 1
  for learner_id in (0, 1):
    steps, earlier = (_steps(job, learner_id) for job in (after, before))
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


def _of_the_longer_run(
  report: dict[str, Any],
  before: list[dict[str, Any]],
  after: list[dict[str, Any]],
  last: int,
) -> None:
  rounds = sorted(e["round"] for e in of("round", after) if e["counted"])
  assert rounds == list(range(last + 1, last + 31))
  for learner_id in (0, 1):
    ended, began = _steps(before, learner_id)[-1], _steps(after, learner_id)[0]
    taken = began["step"]
    assert began["schedule_step"] == ended["schedule_step"] + taken
    # in the same unit, or at the same place of the next one claimed
    rows = ended["position"][1] + 8 * taken
    assert began["position"][1] % 256 == rows % 256
    assert (began["position"][0] == ended["position"][0]) == (rows < 256)
  assert report["data"]["units_repeated"] == 0
  assert report["data"]["units_unclaimed"] == 0


def _steps(job: list[dict[str, Any]], learner: int) -> list[dict[str, Any]]:
  """Of one learner; while it joins it reports no step, and none of those."""
  return [e for e in of("steps", job) if e["learner"] == learner and e["step"]]
