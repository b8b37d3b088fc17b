"""One syncer at a time: terms, lapses, and those that come back too late."""

import os
import signal
import subprocess
import sys

import pytest

from decoupled.clock import ManualClock
from decoupled.errors import DecoupledError
from decoupled.syncer import lease as lease_lib
from decoupled.syncer.lease import Fenced

LEASE_S = 5.0


@pytest.fixture
def clock():
  return ManualClock()


@pytest.fixture
def claim(tmp_path, clock):
  """Claims for `host:pid` of a machine that nobody can look into."""

  def make(holder, meanwhile=lambda: None, place="elsewhere"):
    def sleep(seconds):
      clock.advance(seconds)
      meanwhile()

    return lease_lib.claim(
      tmp_path / "lease",
      LEASE_S,
      clock=clock,
      sleep=sleep,
      here=(holder, place),
    )

  return make


def test_a_second_syncer_is_refused_and_told_who_serves(claim):
  first = claim("a:1")
  with pytest.raises(DecoupledError, match=r"a:1 serves .* term 1") as caught:
    claim("b:2", meanwhile=first.renew)
  assert not isinstance(caught.value, Fenced)
  first.renew()  # and is none the worse for it


def test_a_silent_one_is_succeeded_after_its_lease_and_not_before(claim, clock):
  claim("a:1").serve("run-7")
  at = clock.now()
  second = claim("b:2")
  assert LEASE_S <= clock.now() - at < LEASE_S + 1
  assert second.term == 2
  assert second.before.run_id == "run-7"


def test_one_that_was_stopped_and_continues_finds_itself_fenced(claim, clock):
  first = claim("a:1")
  second = claim("b:2")
  for act in (first.renew, first.check, first.guard):
    with pytest.raises(Fenced, match=r"b:2 .* term 2.*term 1"):
      act()
  first.release()  # says nothing, and takes nothing from its successor
  second.renew()
  with pytest.raises(DecoupledError, match="b:2"):
    claim("c:3", meanwhile=second.renew)


def test_the_guard_looks_only_where_the_claim_may_have_lapsed(claim, clock):
  first = claim("a:1")
  first.guard()
  claim("b:2")
  with pytest.raises(Fenced):
    first.guard()


def test_a_released_claim_is_free_at_once(claim, clock):
  first = claim("a:1")
  first.release()
  at = clock.now()
  assert claim("b:2").term == 2
  assert clock.now() == at


def test_the_term_is_above_that_of_the_snapshot(claim):
  first = claim("a:1")
  first.rise_above(6)
  assert first.term == 7
  first.rise_above(6)
  assert first.term == 7
  first.renew()
  first.release()
  assert claim("b:2").term == 8
  with pytest.raises(Fenced):
    first.rise_above(9)


def test_one_that_lost_the_race_for_a_term_takes_the_next(claim, monkeypatch):
  claim("a:1").release()
  make, lost = lease_lib._make, []

  def slow(path, text):
    if not lost:
      lost.append(path)
      claim("b:2").release()
    return make(path, text)

  monkeypatch.setattr(lease_lib, "_make", slow)
  assert claim("c:3").term == 3


def test_a_torn_file_counts_as_held(claim, tmp_path, clock):
  claim("a:1")
  (tmp_path / "lease" / "000000001.json").write_text("{")
  at = clock.now()
  assert claim("b:2").term == 2
  assert clock.now() - at >= LEASE_S


def test_old_files_are_cleared_away(claim, tmp_path):
  for number in range(12):
    claim(f"a:{number}").release()
  names = sorted(p.name for p in (tmp_path / "lease").iterdir())
  assert len(names) <= 6
  assert names[-1] == "000000012.json"


@pytest.mark.parametrize("reaped", [True, False])
def test_a_dead_holder_on_this_machine_is_not_waited_for(tmp_path, reaped):
  code = (
    "import sys, pathlib, time; from decoupled.syncer import lease; "
    "lease.claim(pathlib.Path(sys.argv[1]), 3600.0); print('up', flush=True); "
    "time.sleep(600)"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
  )
  assert process.stdout.readline() == b"up\n"
  os.kill(process.pid, signal.SIGKILL)
  if reaped:
    process.wait(10)
  else:
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
  found = lease_lib.claim(tmp_path, 1.0)
  process.wait(10)
  process.stdout.close()
  assert found.term == 2
