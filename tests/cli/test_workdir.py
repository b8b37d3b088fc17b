"""The directory of a run: lock, resume, contract, permissions."""

import json
import os
import stat
import subprocess
import sys
import time

import pytest

from decoupled import config as config_lib
from decoupled.errors import ConfigError, DecoupledError
from decoupled.launch.workdir import Standing, Workdir
from decoupled.observe.events import EventLog

CONTRACT = (("Exchange.H", "24"), ("--seed", "0"))
LIMIT_S = 20.0


@pytest.fixture
def workdir(tmp_path):
  workdir = Workdir(tmp_path / "run")
  workdir.create()
  return workdir


def begin(workdir, contract=CONTRACT):
  workdir.begin("Exchange.H = 24\n", contract)


def standing(workdir, contract=CONTRACT, resume="auto", rounds=600, tokens=0):
  return workdir.standing(contract, resume, rounds, tokens)


def finish(workdir, rounds, status="completed", tokens=1000):
  log = EventLog(workdir.events, time.monotonic())
  log.emit("round", round=rounds, counted=True)
  log.emit("round", round=rounds + 5, counted=False)  # of the drain
  report = {"status": status, "tokens_total": tokens}
  workdir.report.write_text(json.dumps(report))


def test_an_empty_workdir_begins_anew(workdir):
  assert standing(workdir) == Standing()
  assert standing(workdir, resume="never") == Standing()
  with pytest.raises(ConfigError, match="--resume=required"):
    standing(workdir, resume="required")


def test_the_same_contract_goes_on(workdir):
  begin(workdir)
  finish(workdir, 400, "interrupted")
  assert standing(workdir) == Standing(True, False, 400, 1000)
  assert standing(workdir, resume="required").resumed
  with pytest.raises(ConfigError, match="--resume=never"):
    standing(workdir, resume="never")


def test_a_complete_run_is_complete_until_more_is_asked_for(workdir):
  begin(workdir)
  finish(workdir, 600)
  assert standing(workdir, rounds=600).complete
  assert not standing(workdir, rounds=900).complete
  assert standing(workdir, rounds=900).rounds == 600
  assert standing(workdir, rounds=0, tokens=1000).complete
  assert not standing(workdir, rounds=0, tokens=1001).complete


def test_enough_rounds_without_a_proper_end_are_not_complete(workdir):
  begin(workdir)
  finish(workdir, 600, "failed")
  assert not standing(workdir, rounds=600).complete


def test_another_contract_is_refused_with_the_line_that_differs(workdir):
  begin(workdir)
  other = (("Exchange.H", "48"), ("--seed", "0"))
  with pytest.raises(ConfigError, match=r"Exchange\.H is 48 here and 24 there"):
    standing(workdir, other)
  with pytest.raises(ConfigError, match="--seed is 1 here and 0 there"):
    standing(workdir, (CONTRACT[0], ("--seed", "1")))


def test_a_damaged_contract_is_refused_rather_than_overwritten(workdir):
  begin(workdir)
  workdir.contract.write_text("{")
  with pytest.raises(ConfigError, match="is damaged"):
    standing(workdir)


def test_a_real_contract_survives_the_way_through_the_file(workdir):
  contract = config_lib.contract_lines(config_lib.resolve())
  begin(workdir, contract)
  assert standing(workdir, contract).resumed


def test_the_token_is_secret_and_new_for_each_job(workdir):
  before = os.umask(0)
  try:
    begin(workdir)
    first = workdir.token.read_text()
    begin(workdir)
  finally:
    os.umask(before)
  assert stat.S_IMODE(workdir.token.stat().st_mode) == 0o600
  assert len(first.strip()) >= 32
  assert workdir.token.read_text() != first


def test_what_the_last_job_published_is_gone(workdir):
  begin(workdir)
  workdir.address.write_text("127.0.0.1:1\n")
  workdir.chaos.mkdir()
  (workdir.chaos / "learner-0.json").write_text('{"slow": 3}')
  begin(workdir)
  assert not workdir.address.exists()
  assert not workdir.chaos.exists()


def test_a_second_run_in_the_same_workdir_is_refused(workdir):
  code = (
    "import pathlib, sys, time\n"
    "from decoupled.launch.workdir import Workdir\n"
    f"Workdir(pathlib.Path({str(workdir.path)!r})).lock()\n"
    "print('locked', flush=True)\n"
    "time.sleep(600)\n"
  )
  with subprocess.Popen(
    [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
  ) as other:
    assert other.stdout.readline() == "locked\n"
    assert workdir.live_process() == other.pid
    with pytest.raises(DecoupledError, match=f"process {other.pid}"):
      workdir.lock()
    other.kill()
  # Nothing is left to clean up: the lock dies with its process.
  assert workdir.live_process() is None
  workdir.lock()
  workdir.unlock()


def test_a_path_through_a_file_is_one_clear_line(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(DecoupledError, match="cannot be written") as caught:
    Workdir(tmp_path / "file" / "run").create()
  assert "\n" not in str(caught.value)
