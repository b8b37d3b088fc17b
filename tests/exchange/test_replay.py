"""What was recorded, merged again: the same bits, through every restart."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from decoupled.algorithm.policy import Exchange
from decoupled.checkpoint import arrays, commit, syncer_store
from decoupled.errors import DecoupledError
from decoupled.launch.replay import lines
from decoupled.observe import report
from decoupled.observe.events import Tee
from decoupled.syncer import tape
from decoupled.syncer.recording import Recording
from decoupled.syncer.replay import replay
from decoupled.syncer.tape import Tape
from tests.exchange import jobs
from tests.exchange.outages import (
  Timed,
  restore_quickly,
  save_quickly,
  saving,
  syncer_dies,
  syncer_returns,
)

H8 = Exchange(H=8, P=8)


@pytest.fixture(autouse=True)
def quick_files(monkeypatch):
  monkeypatch.setattr(arrays, "save", save_quickly)
  monkeypatch.setattr(arrays, "restore_flat", restore_quickly)


def taping(made, folder, restored=None, **limits):
  """The job's syncer saves itself, and records, from now on."""
  saving(made, folder / "store", every_rounds=10)
  recording = Recording(Tape(folder / "tape", **limits))
  made.rounds._tape = recording
  made.rounds._events = Tee(made.rounds._events, recording)
  recording.watch(made.rounds, restored)
  return recording


def job(tmp_path, exchange=H8, rounds=40, learners=2, **limits):
  made = jobs.job(exchange, learners=learners, rounds=rounds, events=Timed())
  made.events.clock = made.clock
  return made, taping(made, tmp_path, **limits)


def after(made, rounds):
  made.run_until(lambda: made.rounds.rounds_closed >= rounds)


def killed(made, recording, tmp_path):
  """The syncer dies between two merges; its successor goes on, and records."""
  made.run_until(lambda: not any(r.merging for r in made.rounds._open.values()))
  recording.flush()
  old = syncer_dies(made)
  restored = syncer_returns(made, old, tmp_path / "store")
  return taping(made, tmp_path, restored)


def ends(made, recording, tmp_path):
  """The job ends as `syncer.main` does: the final snapshot comes last."""
  made.run(2000)
  jobs.check_ended(made)
  recording.close()
  saving(made, tmp_path / "store").save()


def replayed(made, tmp_path):
  closed = {}
  for e in jobs.counted(made):
    closed.setdefault(e["term"], []).append(e["round"])
  return replay(tmp_path / "tape", tmp_path / "store", closed)


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_a_recording_leads_to_the_bits_that_were_saved(tmp_path, codec):
  made, recording = job(tmp_path, Exchange(H=8, P=8, codec=codec), learners=3)
  ends(made, recording, tmp_path)
  done = replayed(made, tmp_path)
  assert done.problems == done.notes == []
  [term] = done.terms
  assert (len(term.counted), term.drained, term.lost) == (40, 8, 0)
  # version 0, the newest that stayed, and the final one, after the drain
  assert sorted(term.same) == [0, 30, 40, 40]
  assert done.newest.versions == made.rounds.model.versions
  *_, verdict = lines(done)
  assert verdict.startswith("verdict: the same bits as ")


def test_it_goes_through_the_death_of_syncers(tmp_path):
  made, recording = job(tmp_path, rounds=60)
  after(made, 27)
  recording = killed(made, recording, tmp_path)
  after(made, 24)
  # dies again before it has saved anything of its own
  recording = killed(made, recording, tmp_path)
  after(made, 45)
  recording = killed(made, recording, tmp_path)
  ends(made, recording, tmp_path)
  done = replayed(made, tmp_path)
  assert done.problems == done.notes == []
  assert [t.began for t in done.terms] == [
    "version 0",
    "round 20 of term 1",
    "round 20 of term 1",
    "round 40 of term 3",
  ]
  lost = [term.lost for term in done.terms]
  assert lost[0] >= 7
  assert lost[1] >= 4
  assert lost[2] >= 5
  assert lost[3] == 0
  assert sum(lost) == report.build(made.events.events)["rounds"]["lost"]
  assert 0 in done.terms[0].same
  assert done.terms[3].same.count(60) == 2


def test_a_changed_contribution_is_found_and_named(tmp_path):
  made, recording = job(tmp_path)
  ends(made, recording, tmp_path)
  path = tmp_path / "tape" / "000001-000000035.npz"
  header, values = tape.read(path)
  name, value = next(iter(values.items()))
  values[name] = np.nextafter(value, np.float32(np.inf))
  path.write_bytes(tape._npz(header, values))
  done = replayed(made, tmp_path)
  found = [p for p in done.problems if f"fragment {header['fragment']}" in p]
  unit = made.rounds.manifest.fragments[header["fragment"]][0]
  assert f"parameters of {unit.tensor}" in found[0]
  assert " elements by up to " in found[0]
  assert "outer state 0" in " ".join(found) or "more)" in found[0]
  assert lines(done)[-1].startswith("verdict: DIFFERS: ")
  # what was saved before it agrees
  assert 30 in done.terms[0].same


def test_a_snapshot_that_is_gone_is_compared_by_its_digests(tmp_path):
  made, recording = job(tmp_path, rounds=80)
  after(made, 15)
  recording = killed(made, recording, tmp_path)
  ends(made, recording, tmp_path)
  assert not [
    s for s in syncer_store.listed(tmp_path / "store") if s.rounds == 10
  ]
  path = tmp_path / "tape" / "000001-000000004.npz"
  header, values = tape.read(path)
  values = {name: value + 1 for name, value in values.items()}
  path.write_bytes(tape._npz(header, values))
  done = replayed(made, tmp_path)
  said = " ".join(done.problems)
  assert f"parameters of fragment {header['fragment']} are not those" in said
  assert "term 2 began from" in said


def test_a_full_recording_says_so(tmp_path, caplog):
  made, recording = job(tmp_path, limit_bytes=40_000)
  ends(made, recording, tmp_path)
  files = list((tmp_path / "tape").glob("*.npz"))
  assert 1 < len(files) < 30
  assert sum(f.stat().st_size for f in files) <= 40_000
  assert "full" in caplog.text
  done = replayed(made, tmp_path)
  assert "does not reach" in done.problems[0]
  assert "it was full after" in done.problems[0]


def test_what_a_dying_syncer_left_half_written_does_no_harm(tmp_path):
  made, recording = job(tmp_path)
  after(made, 27)
  recording.flush()
  folder = tmp_path / "tape"
  torn = sorted(folder.glob("000001-0*.npz"))[-1]
  torn.write_bytes(torn.read_bytes()[:-40])  # never by this program
  (folder / ".000001-000000099.npz.1").write_bytes(b"half")
  recording = killed(made, recording, tmp_path)
  recording.flush()
  assert not list(folder.glob(".*"))
  ends(made, recording, tmp_path)
  done = replayed(made, tmp_path)
  assert done.problems == []
  assert str(torn) in done.notes[0]
  first = done.terms[0]
  assert len(first.unwritten) == 1
  lost = report.build(made.events.events)["rounds"]["lost"]
  assert first.lost == lost


def test_a_lost_file_is_named(tmp_path):
  made, recording = job(tmp_path)
  ends(made, recording, tmp_path)
  (tmp_path / "tape" / "000001-000000012.npz").unlink()
  done = replayed(made, tmp_path)
  assert "000000012 is missing" in done.problems[0]
  (tmp_path / "tape" / "000001-start.npz").unlink()
  assert "what term 1 began from" in replayed(made, tmp_path).problems[0]


def test_a_recording_may_begin_in_the_middle_of_a_run(tmp_path):
  made = jobs.job(H8, learners=2, rounds=40, events=Timed())
  made.events.clock = made.clock
  saving(made, tmp_path / "store", every_rounds=10)
  after(made, 15)
  old = syncer_dies(made)
  restored = syncer_returns(made, old, tmp_path / "store")
  recording = taping(made, tmp_path, restored)
  ends(made, recording, tmp_path)
  done = replayed(made, tmp_path)
  assert done.problems == []
  assert [t.term for t in done.terms] == [2]
  assert done.terms[0].began == "round 10 of term 1"
  # and one that goes on without it does not count
  syncer_returns(made, syncer_dies(made), tmp_path / "store")
  saving(made, tmp_path / "store").save()
  *_, said = replayed(made, tmp_path).problems
  assert "term 3 was not recorded" in said


def test_a_term_may_be_missing_between_two(tmp_path):
  made, recording = job(tmp_path)
  after(made, 15)
  recording.flush()
  made.run_until(lambda: not any(r.merging for r in made.rounds._open.values()))
  syncer_returns(made, syncer_dies(made), tmp_path / "store")
  saving(made, tmp_path / "store", every_rounds=10)  # and no --tape
  after(made, 25)
  recording = killed(made, recording, tmp_path)
  ends(made, recording, tmp_path)
  done = replayed(made, tmp_path)
  assert done.problems == []
  assert [t.began for t in done.terms] == ["version 0", "round 20 of term 2"]


def test_a_syncer_that_saved_nothing_is_succeeded_from_its_learners(tmp_path):
  made, recording = job(tmp_path)
  after(made, 5)
  recording.flush()
  for folder in commit.folders(tmp_path / "store" / "global"):
    folder.rmtree()
  recording = killed(made, recording, tmp_path)
  ends(made, recording, tmp_path)
  done = replayed(made, tmp_path)
  assert done.problems == []
  assert [t.began for t in done.terms] == ["version 0", "version 0"]
  assert done.terms[0].lost >= 5


def test_merging_never_waits_for_a_disk_that_cannot_keep_up(tmp_path, caplog):
  made = jobs.job(H8, learners=2, rounds=40)
  saving(made, tmp_path / "store", every_rounds=10)
  written = Tape(tmp_path / "tape")
  stuck = threading.Event()
  record = written.record
  written.record = lambda j: (stuck.wait(20), record(j))
  recording = Recording(written, waiting_bytes=2000)
  made.rounds._tape = recording
  made.rounds._events = Tee(made.rounds._events, recording)
  recording.watch(made.rounds, None)
  made.run(1000)  # with the first round still not written
  jobs.check_ended(made)
  stuck.set()
  recording.flush()
  assert "could not keep up" in caplog.text
  end = json.loads((tmp_path / "tape" / "000001-end.json").read_text())
  assert 0 < end["records"] < 40
  saving(made, tmp_path / "store").save()
  assert "could not keep up" in replayed(made, tmp_path).problems[0]


def test_nothing_recorded_and_nothing_saved_are_one_line(tmp_path: Path):
  with pytest.raises(DecoupledError, match="no snapshot lies under"):
    replay(tmp_path / "tape", tmp_path / "store", {})
  made, recording = job(tmp_path / "job", rounds=8)
  ends(made, recording, tmp_path / "job")
  with pytest.raises(DecoupledError, match="run the job with --tape"):
    replay(tmp_path / "tape", tmp_path / "job" / "store", {})
