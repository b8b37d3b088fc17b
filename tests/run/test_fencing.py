"""Two syncers and one workdir, as real processes: only one serves."""

import json
import signal
from pathlib import Path

import pytest

from tests.run.processes import QUICK, Processes, decoupled, until

LIMIT_S = 120
LEASE_S = 2.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_serves_and_one_that_was_stopped_finds_itself_fenced(
  tmp_path: Path, processes: Processes
) -> None:
  workdir = tmp_path / "syncer"
  command = (
    "syncer",
    f"--workdir={workdir}",
    f"Limits.lease_s={LEASE_S}",
    "Limits.heartbeat_s=0.5",
    *QUICK,
  )
  address, lease = workdir / "syncer.address", workdir / "lease"
  first = processes.start(*command)
  until(address.exists, "the syncer's address", LIMIT_S)
  was = address.read_text()

  refused = decoupled(*command, timeout_s=LIMIT_S)
  assert refused.returncode == 1
  assert f":{first.pid} serves this run under term 1" in refused.stderr
  assert "Traceback" not in refused.stderr
  assert address.read_text() == was

  first.send_signal(signal.SIGSTOP)
  second = processes.start(*command)
  until(lambda: address.read_text() != was, "the second to serve", LIMIT_S)
  held = json.loads((lease / "000000002.json").read_text())
  assert held["holder"].endswith(f":{second.pid}")
  # the run is the same one: learners of the first would be let in
  before = json.loads((lease / "000000001.json").read_text())
  assert held["run_id"] == before["run_id"] != ""

  first.send_signal(signal.SIGCONT)
  until(lambda: first.poll() is not None, "the first to leave", LIMIT_S)
  assert first.returncode == 1
  said = processes.said(first).strip().splitlines()[-1]
  assert said.startswith("decoupled syncer: fenced: ")
  assert f":{second.pid} serves this run under term 2" in said
  assert address.read_text() != was
  assert second.poll() is None

  second.send_signal(signal.SIGTERM)
  until(lambda: second.poll() is not None, "the second to end", LIMIT_S)
  assert second.returncode == 128 + signal.SIGTERM
  assert json.loads((lease / "000000002.json").read_text())["released"]
