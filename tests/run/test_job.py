"""Roles as real processes: what a cluster starts one by one."""

import signal
from pathlib import Path

import pytest

from tests.run.processes import QUICK, Processes, decoupled, events, of, until


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
