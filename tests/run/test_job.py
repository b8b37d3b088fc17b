"""Roles as real processes: told to end, unreachable, a taken port."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.run.processes import QUICK, Processes, decoupled, events, of, until


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_terminated_syncer_hands_over_and_the_job_ends_when_it_is_told(
  tmp_path: Path, processes: Processes
) -> None:
  workdir = tmp_path / "job"
  runner = processes.start(
    "run",
    f"--workdir={workdir}",
    "--learners=1",
    "--devices_per_host=1",
    "--rounds=100000",
    "--chaos=term syncer @30r",
    "Exchange.quorum=1",
    "Limits.grace_s=30",
    *QUICK,
  )

  def of_term(term: int) -> list[dict[str, Any]]:
    return [e for e in of("round", events(workdir)) if e["term"] == term]

  # the syncer goes; its successor goes on where it was
  until(lambda: len(of_term(2)) > 30, "rounds of a second term", 150)
  assert runner.poll() is None, processes.said(runner)
  job = events(workdir)
  handed = of_term(1)[-1]["round"]
  [stopped] = of("stopped", job)
  assert (stopped["role"], stopped["outcome"]) == ("syncer", "saved")
  assert stopped["took_s"] < 30
  restored = next(e for e in of("checkpoint", job) if e["what"] == "restore")
  assert restored["round"] == handed
  assert of_term(2)[0]["round"] == handed + 1
  assert of("phase", job)[-1]["phase"] == "training"

  # the runner goes, and everybody with it
  runner.send_signal(signal.SIGTERM)
  until(lambda: runner.poll() is not None, "the job to end", 90)
  assert runner.returncode == 128 + signal.SIGTERM, processes.said(runner)
  report = json.loads((workdir / "report.json").read_text())
  assert report["status"] == "interrupted"
  assert report["exit_reason"] == "stopped by SIGTERM"
  assert report["learners"][0]["exit_reason"] == "ended"
  assert report["rounds"]["lost"] == 0
  [failure] = report["failures"]
  assert (failure["kind"], failure["target"]) == ("term", "syncer")
  assert failure["state_source"] == "checkpoint"
  job = events(workdir)
  exits = [(e["role"], e["code"]) for e in of("exit", job)]
  assert exits[0] == ("syncer", 128 + signal.SIGTERM)
  assert set(exits[1:]) == {("syncer", 0), ("learner/0", 0), ("evaluate", 0)}
  assert [e["role"] for e in of("restart", job)] == ["syncer"]
  # what was saved is what was merged last
  saved = [e for e in of("checkpoint", job) if e["role"] == "syncer"]
  counted = [e["round"] for e in of("round", job) if e["counted"]]
  assert saved[-1]["ok"]
  assert saved[-1]["round"] == max(counted)


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
