"""Standbys of a real job: one takes over, one dies in the act, one as planned.

One job for all of it, since what takes long is that processes boot.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from decoupled import cli
from decoupled.errors import Refused
from decoupled.wire import credentials
from decoupled.wire.address import published_address
from decoupled.wire.client import AdminClient
from tests.run.processes import QUICK, Processes, decoupled, events, of, until

LIMIT_S = 280


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_standbys_take_over_one_after_the_other_and_end_with_the_run(
  tmp_path: Path, processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
  workdir = tmp_path / "job"
  job = processes.start(
    "run",
    f"--workdir={workdir}",
    "--learners=2",
    "--standbys=2",
    "--devices_per_host=2",
    "--rounds=100000",
    *QUICK,
    "Local.pad_s=0.3",  # leaves the processor to those that boot
  )
  until(lambda: len(_ready(workdir)) == 2, "two standbys", LIMIT_S)
  found = (
    f"--syncer_address=@{workdir / 'syncer.address'}",
    f"--token_file={workdir / 'run.token'}",
  )
  for command in (["status", f"--workdir={workdir}"], ["status", *found]):
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "standby/0" in said
    assert "ready" in said
    assert "fingerprint" in said

  # of another contract: refused in one line, and the rest trains on
  other = decoupled(
    *("standby", f"--workdir={tmp_path / 'other'}", *found),
    "Optimizer.learning_rate=0.5",
  )
  assert other.returncode == 2
  assert len(other.stderr.strip().splitlines()) == 1
  assert "Optimizer.learning_rate = 0.5 here (from binding)" in other.stderr

  # a learner dies; the standby that is asked first freezes, then dies, too
  first, second = _ready(workdir)
  os.kill(_pid(first), signal.SIGSTOP)
  os.kill(_pid(_holder(workdir, 0)), signal.SIGKILL)
  until(lambda: bool(_decided(workdir)), "the decision", LIMIT_S)
  assert _decided(workdir)[0]["standby"] == first["standby"]
  os.kill(_pid(first), signal.SIGKILL)
  until(lambda: len(_promoted(workdir)) == 1, "the promotion", LIMIT_S)
  promoted = _promoted(workdir)[0]
  assert promoted["standby"] == second["standby"]
  assert promoted["holder"] == second["holder"]
  assert (promoted["learner"], promoted["incarnation"]) == (0, 2)
  until(lambda: _stepped(workdir, 0) == 2, "its first step", LIMIT_S)

  # what cannot be swapped trains on; what can is, while it trains
  with pytest.raises(Refused, match="learner 7 is not in the run; there are"):
    _swap(workdir, 7)
  until(lambda: bool(_ready(workdir)), "another standby", LIMIT_S)
  assert cli.main(["drain", "learner/0", *found]) == 0
  assert "learner/0 is standby/" in capsys.readouterr().out
  assert _promoted(workdir)[1]["incarnation"] == 3
  assert of("handover", events(workdir))[-1]["state"] == "done"
  until(lambda: _stepped(workdir, 0) == 3, "its first step", LIMIT_S)

  assert cli.main(["stop", *found]) == 0
  until(lambda: job.poll() is not None, "the end", LIMIT_S)
  assert job.returncode == 0, processes.said(job)
  _of_the_end(workdir)


def _of_the_end(workdir: Path) -> None:
  job = events(workdir)
  assert {e["compiles"] for e in of("takeover", job)} == {0}
  exits = of("exit", job)
  ended = [e for e in exits if e["role"].startswith("standby/")]
  assert [e["signal"] for e in ended[:1]] == ["SIGKILL"]
  # one that still boots is told to end; the one that was drained left as asked
  assert {e["code"] for e in ended[1:]} <= {0, 128 + signal.SIGTERM}
  assert 0 in {e["code"] for e in ended[1:]}
  report: dict[str, Any] = json.loads((workdir / "report.json").read_text())
  assert report["status"] == "completed"
  struck = [f for f in report["failures"] if f["target"] == "learner/0"]
  assert len(struck) == 1  # a planned swap is no failure
  for failure in struck:
    assert failure["cold"] is False
    assert failure["compiles_after_takeover"] == 0
    assert failure["state_source"] == "donor"
    phases = dict(failure["phases"])
    assert phases.pop("torn_down_s") is None
    times = list(phases.values())
    assert None not in times
    assert phases["detected_s"] <= phases["decided_s"]
    assert phases["decided_s"] <= phases["connected_s"]
    assert phases["connected_s"] <= phases["state_received_s"]
    assert phases["state_received_s"] <= phases["first_step_s"]
  ready = [e for e in of("ready", job) if e["learner"] == 0][-1]
  assert (ready["state_source"], ready["donor"]) == ("donor", 0)
  assert report["data"]["units_repeated"] <= 2


def _ready(workdir: Path) -> list[dict[str, Any]]:
  """Standbys that are ready now, in the order in which they became so."""
  standing: dict[str, dict[str, Any]] = {}
  for event in events(workdir):
    if event["kind"] in ("standby", "promoted"):
      standing.pop(event["holder"], None)
      if event.get("state") == "ready":
        standing[event["holder"]] = event
  return list(standing.values())


def _decided(workdir: Path) -> list[dict[str, Any]]:
  return of("decided", events(workdir))


def _promoted(workdir: Path) -> list[dict[str, Any]]:
  return of("promoted", events(workdir))


def _holder(workdir: Path, learner: int) -> dict[str, Any]:
  joins = of("join", events(workdir))
  return [e for e in joins if e["learner"] == learner][-1]


def _stepped(workdir: Path, learner: int) -> int:
  """The newest incarnation that has finished a step."""
  firsts = of("first_step", events(workdir))
  return max(e["incarnation"] for e in firsts if e["learner"] == learner)


def _swap(workdir: Path, learner: int) -> None:
  token = credentials.read_token(workdir / "run.token")
  address = published_address(workdir / "syncer.address")
  assert address is not None
  with AdminClient(address, token) as syncer:
    syncer.swap(learner)


def _pid(event: dict[str, Any]) -> int:
  return int(event["holder"].rpartition(":")[2])
