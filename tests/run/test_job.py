"""A whole job as real processes: a death, an end, a continuation, a stop."""

import json
import signal
from pathlib import Path

import pytest

from tests.run.processes import QUICK, Processes, decoupled, events, of, until


@pytest.mark.slow
def test_a_death_costs_one_learner_and_a_longer_run_continues(
  tmp_path: Path,
) -> None:
  workdir = tmp_path / "job"
  command = (
    "run",
    f"--workdir={workdir}",
    "--learners=2",
    "--devices_per_host=2",
    "--chaos=kill learner/1 @40r",
    *QUICK,
  )

  first = decoupled(*command, "--rounds=100")
  assert first.returncode == 0, first.stderr
  report = json.loads((workdir / "report.json").read_text())
  assert report["status"] == "completed"
  assert report["rounds"]["closed"] == 100
  assert report["eval_loss"] < report["initial_loss"] - 1
  incarnations = {x["id"]: x["incarnation"] for x in report["learners"]}
  assert incarnations == {0: 1, 1: 2}
  [failure] = report["failures"]
  assert (failure["kind"], failure["target"]) == ("kill", "learner/1")
  # the end waited for the restart that was owed
  assert failure["first_step_s"] is not None
  assert [s["id"] for s in failure["survivors"]] == [0]
  data = report["data"]
  assert data["units_repeated"] <= 1
  assert data["units_unclaimed"] == 0
  sequences = report["tokens_total"] / 64
  assert 0 < data["units_completed"] * 256 <= sequences
  # what is not done is held: the unit in use, and two ahead
  assert data["units_claimed"] == data["units_completed"] + 2 * 3
  assert (workdir / "report.html").read_text().startswith("<!doctype html>")
  assert {p.name for p in (workdir / "logs").iterdir()} >= {
    "syncer.log",
    "learner-0.log",
  }

  again = decoupled(*command, "--rounds=100")
  assert again.returncode == 0
  assert "complete" in again.stdout + again.stderr

  before = of("steps", [e for e in events(workdir) if e.get("learner") == 0])
  longer = decoupled(*command, "--rounds=130")
  assert longer.returncode == 0, longer.stderr
  job = events(workdir)
  # while it joins a learner reports no step, and none of the schedule
  after = [
    e
    for e in of("steps", job)
    if e["learner"] == 0 and e["incarnation"] == 2 and e["step"] > 0
  ]
  # step of the schedule and data position go on where they were
  last, first_after = before[-1], after[0]
  taken = first_after["step"]
  assert first_after["schedule_step"] == last["schedule_step"] + taken
  (unit, offset), (place, now) = last["position"], first_after["position"]
  if place != unit:  # it has come to the next one that it had claimed
    assert place > unit
    offset -= 256
  assert now == offset + 8 * taken
  assert first_after["loss"] < report["initial_loss"] - 1
  rounds = [(e["term"], e["round"]) for e in of("round", job) if e["counted"]]
  assert rounds[99:101] == [(1, 100), (2, 101)]

  continued = json.loads((workdir / "report.json").read_text())["data"]
  assert continued["units_repeated"] == continued["units_unclaimed"] == 0
  # those in hand at the end of the first job are claimed by the second, too
  assert continued["units_claimed"] >= 6

  other = decoupled(*command, "--rounds=140", "Outer.momentum=0.5")
  assert other.returncode != 0
  assert "Outer.momentum" in other.stderr
  assert "0.8" in other.stderr
  assert "Traceback" not in other.stderr


@pytest.mark.slow
def test_roles_by_hand_a_second_claimant_and_another_contract(
  tmp_path: Path, processes: Processes
) -> None:
  """What a cluster does: roles started one by one with an address."""
  syncer = processes.start(
    "syncer",
    f"--workdir={tmp_path / 'syncer'}",
    "--bind=[::1]:0",
    "--learners=1",
    "--rounds=100000",
    *QUICK,
  )
  address = tmp_path / "syncer" / "syncer.address"
  until(address.exists, "the syncer's address")
  where = address.read_text().strip()
  assert where.startswith("[::1]:")
  assert not where.endswith(":0")

  def learner(name: str, *more: str) -> tuple[str, ...]:
    return (
      "learner",
      f"--workdir={tmp_path / name}",
      f"--syncer_address={where}",
      "--learner_id=0",
      f"--token_file={tmp_path / 'syncer' / 'run.token'}",
      "--devices_per_host=1",
      *QUICK,
      *more,
    )

  first = processes.start(*learner("first"))
  log = tmp_path / "syncer"
  until(lambda: bool(of("round", events(log))), "the first round", 90)

  second = decoupled(*learner("second"))
  assert second.returncode == 1
  assert "learner id 0 is held by" in second.stderr
  assert f":{first.pid}" in second.stderr

  other = decoupled(*learner("third"), "Optimizer.learning_rate=0.5")
  assert other.returncode == 1
  assert "Optimizer.learning_rate = 0.5" in other.stderr
  assert "0.003" in other.stderr

  first.send_signal(signal.SIGTERM)
  until(lambda: first.poll() is not None, "the learner to leave")
  assert first.returncode == 128 + signal.SIGTERM
  assert of("leave", events(log))[-1]["why"] == "left"
  syncer.send_signal(signal.SIGTERM)
  until(lambda: syncer.poll() is not None, "the syncer to end")
  assert syncer.returncode == 0, processes.said(syncer)


def test_an_unreachable_syncer_is_named_after_a_limit(tmp_path: Path) -> None:
  lost = decoupled(
    "learner",
    f"--workdir={tmp_path}",
    "--syncer_address=127.0.0.1:9",
    "--learner_id=0",
    "--devices_per_host=1",
    "Limits.connect_s=6",
    *QUICK,
  )
  assert lost.returncode == 1
  assert "127.0.0.1:9" in lost.stderr
  assert "Traceback" not in lost.stderr


def test_a_taken_port_is_named(tmp_path: Path, processes: Processes) -> None:
  processes.start(
    "syncer", f"--workdir={tmp_path / 'a'}", "--bind=127.0.0.1:0", *QUICK
  )
  address = tmp_path / "a" / "syncer.address"
  until(address.exists, "the syncer's address")
  where = address.read_text().strip()
  second = decoupled(
    "syncer", f"--workdir={tmp_path / 'b'}", f"--bind={where}", *QUICK
  )
  assert second.returncode != 0
  assert where in second.stderr
  assert "Traceback" not in second.stderr
