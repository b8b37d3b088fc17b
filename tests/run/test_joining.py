"""Roles started one by one, as on a cluster: TLS, joining late, leaving."""

import signal
from pathlib import Path

import pytest

from decoupled import cli
from decoupled.launch import certs
from tests.run.processes import QUICK, Processes, decoupled, events, of, until

LIMIT_S = 120.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learners_join_with_what_is_local_and_leave_when_told(
  tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
  certs.make(tmp_path / "certs", ["::1"], 2)
  log = tmp_path / "syncer"
  syncer = processes.start(
    "syncer",
    f"--workdir={log}",
    "--bind=[::1]:0",
    f"--tls_cert={tmp_path / 'certs' / certs.SERVER}",
    f"--tls_key={tmp_path / 'certs' / certs.SERVER_KEY}",
    "--learners=1",
    "--seed=5",
    *QUICK,
  )
  published = log / "syncer.address"
  until(published.exists, "the syncer's address", LIMIT_S)
  where = published.read_text().strip()
  assert where.startswith("[::1]:")
  assert not where.endswith(":0")
  found = (
    f"--syncer_address={where}",
    f"--token_file={log / 'run.token'}",
    f"--tls_ca={tmp_path / 'certs' / certs.AUTHORITY}",
  )

  def learner(name: str, *more: str) -> tuple[str, ...]:
    """Only what is local, but for what a test adds."""
    local = (f"--workdir={tmp_path / name}", "--devices_per_host=1")
    return ("learner", *local, *found, "Local.pad_s=0.02", *more)

  def rounds() -> list[dict[str, object]]:
    return of("round", events(log))

  first = processes.start(*learner("first"))
  until(lambda: bool(rounds()), "the first round", LIMIT_S)

  second = decoupled(*learner("second", "--learner_id=0"))
  assert second.returncode == 1
  assert "learner id 0 is held by" in second.stderr
  assert f":{first.pid}" in second.stderr
  other = decoupled(*learner("third", "Optimizer.learning_rate=0.5"))
  assert other.returncode == 2
  assert "Optimizer.learning_rate = 0.5 here (from binding)" in other.stderr
  assert "Optimizer.learning_rate = 0.003" in other.stderr
  assert "Traceback" not in other.stderr

  late = processes.start(*learner("late"))
  until(
    lambda: any(1 in r["participants"] for r in rounds()[-50:]),
    "the late one's first merge",
    LIMIT_S,
  )
  first.send_signal(signal.SIGTERM)
  until(lambda: first.poll() is not None, "the first to leave", LIMIT_S)
  assert first.returncode == 128 + signal.SIGTERM, processes.said(first)
  left = of("leave", events(log))[-1]
  assert (left["learner"], left["why"]) == (0, "left")
  assert left["detail"] == "stopped by SIGTERM"
  own = events(tmp_path / "first")
  [stopped] = of("stopped", own)
  assert (stopped["role"], stopped["outcome"]) == ("learner/0", "saved")
  assert [e["exit_reason"] for e in of("learner_done", own)] == ["left"]
  last_save = of("checkpoint", own)[-1]
  assert last_save["ok"]
  assert Path(last_save["path"]).is_relative_to(tmp_path / "first")

  # the run goes on without it, and ends when it is asked to
  closed = len(rounds())
  until(lambda: len(rounds()) > closed + 10, "ten more rounds", LIMIT_S)
  assert cli.main(["status", *found]) == 0
  said = capsys.readouterr().out
  assert "training" in said
  assert "learner 1 (" in said
  assert "learner 0 (" not in said
  assert cli.main(["stop", *found]) == 0
  for process in (late, syncer):
    until(lambda: process.poll() is not None, "the end", LIMIT_S)  # noqa: B023
    assert process.returncode == 0, processes.said(process)
  own = events(tmp_path / "late")
  assert [e["exit_reason"] for e in of("learner_done", own)] == ["ended"]
  drained = of("leave", events(log))[-1]
  assert (drained["learner"], drained["why"]) == (1, "drained")


@pytest.mark.slow
def test_a_learner_that_waits_for_its_syncer_leaves_at_once(
  tmp_path: Path, processes: Processes
) -> None:
  waiting = processes.start(
    "learner",
    f"--workdir={tmp_path / 'w'}",
    f"--syncer_address=@{tmp_path / 'nobody'}",
    "--devices_per_host=1",
  )
  until((tmp_path / "w").is_dir, "the learner to start", 60)
  until(lambda: _handles(waiting.pid, signal.SIGTERM), "its handler", 60)
  waiting.send_signal(signal.SIGTERM)
  until(lambda: waiting.poll() is not None, "it to leave", 60)
  assert waiting.returncode == 128 + signal.SIGTERM
  [stopped] = of("stopped", events(tmp_path / "w"))
  assert stopped["outcome"] == "nothing_to_save"
  assert "Traceback" not in processes.said(waiting)


def _handles(pid: int, number: signal.Signals) -> bool:
  """Whether a process has a handler for a signal (Linux)."""
  status = Path(f"/proc/{pid}/status").read_text("ascii")
  caught = next(x for x in status.splitlines() if x.startswith("SigCgt:"))
  return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
