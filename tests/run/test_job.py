"""Roles as real processes: told to end, unreachable, a taken port."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.run.processes import QUICK, Processes, decoupled, events, of, until


@pytest.mark.slow
def test_a_syncer_that_is_told_to_end_ends_the_job_in_order(
  tmp_path: Path, processes: Processes
) -> None:
  workdir = tmp_path / "job"
  runner = processes.start(
    "run",
    f"--workdir={workdir}",
    "--learners=1",
    "--devices_per_host=1",
    "--rounds=100000",
    "Exchange.quorum=1",
    "Limits.grace_s=30",
    *QUICK,
  )
  until(lambda: len(of("round", events(workdir))) > 5, "some rounds", 90)
  lease = json.loads((workdir / "lease" / "000000001.json").read_text())
  os.kill(int(lease["holder"].rpartition(":")[2]), signal.SIGTERM)
  until(lambda: runner.poll() is not None, "the job to end", 90)
  assert runner.returncode == 128 + signal.SIGTERM, processes.said(runner)
  report = json.loads((workdir / "report.json").read_text())
  assert report["status"] == "interrupted"
  assert report["exit_reason"] == "the syncer was stopped by SIGTERM"
  assert report["learners"][0]["exit_reason"] == "ended"
  job = events(workdir)
  [stopped] = of("stopped", job)
  assert (stopped["role"], stopped["outcome"]) == ("syncer", "saved")
  assert stopped["took_s"] < 30
  assert [e["code"] for e in of("exit", job) if e["role"] == "learner/0"] == [0]
  assert not of("restart", job)
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
