"""What people are told while a job runs and when it is over."""

import io

import pytest
from observe_logs import write_log

from decoupled.clock import ManualClock
from decoupled.errors import DecoupledError
from decoupled.observe import report, status, summary
from decoupled.observe.events import encode
from decoupled.observe.progress import LINE_EVERY_S, Progress


class _Terminal(io.StringIO):
  def isatty(self):
    return True


def _told(tmp_path, events, out, clock=None):
  path = tmp_path / "events.jsonl"
  path.touch()
  progress = Progress(tmp_path, rounds=700, learners=3, out=out, clock=clock)
  for event in events:
    with path.open("ab") as file:
      file.write(encode(event))
    if clock is not None:
      clock.set(event["t"])
    progress.update()
  progress.close()
  return progress


def test_lines_every_few_seconds_and_what_happens(tmp_path, demo):
  out = io.StringIO()
  _told(tmp_path, demo, out, ManualClock(0.0))
  lines = out.getvalue().splitlines()
  rounds = [line for line in lines if "round " in line and "/700" in line]
  assert 50 / LINE_EVERY_S <= len(rounds) <= 60 / LINE_EVERY_S + 1
  assert any("loss 3." in line and "tokens/s" in line for line in rounds)
  text = out.getvalue()
  assert "[   15.0 s] chaos: kill learner/1" in text
  assert "learner/1 ended by SIGKILL" in text
  assert "learner/1 is back after 6.1 s" in text


def test_a_line_says_who_is_live(tmp_path, demo):
  progress = _told(tmp_path, [e for e in demo if e["t"] < 18], io.StringIO())
  assert "learners 0,2 of 3  training" in progress.line()


def test_bars_on_a_terminal(tmp_path, demo, monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  out = _Terminal()
  _told(tmp_path, demo[:80], out)
  assert "round" in out.getvalue()
  assert "/700" in out.getvalue()


def test_earlier_jobs_are_not_retold(tmp_path, demo):
  write_log(tmp_path, demo)
  out = io.StringIO()
  progress = Progress(tmp_path, rounds=900, out=out, clock=ManualClock())
  progress.update()
  assert out.getvalue() == ""


def test_a_reader_that_went_away_does_not_end_the_job(tmp_path, demo):
  class Gone(io.StringIO):
    def write(self, text):
      raise BrokenPipeError

  _told(tmp_path, demo[:60], Gone(), ManualClock(0.0))


def test_tokens_per_second_and_loss(tmp_path, demo):
  before = [e for e in demo if e["t"] < 15]
  live = _told(tmp_path, before, io.StringIO()).live
  assert live.tokens_per_second == pytest.approx(3 * 512 / 0.06, rel=0.15)
  assert live.alive == [0, 1, 2]
  assert live.loss == pytest.approx(3.5, abs=0.3)
  assert live.participation == pytest.approx(1, abs=0.05)


def test_summary_says_what_matters(demo_workdir):
  lines = summary.summary_lines(report.write(demo_workdir))
  text = "\n".join(lines)
  assert "5.610 before, 1.830 after (held out, 65,536 tokens)" in text
  assert "700 closed" in text
  assert "99.1 %, 2.84 learners a round" in text
  assert "lost: 700 failure" in text
  assert "learner/1 was killed at 15.0 s, back at 21.1 s (down 6.0 s)" in text
  assert "longest gap 60 ms = 1.0 steps of 60 ms" in text
  assert text.count("undisturbed") == 2
  assert f"{demo_workdir}/report.html" in text
  assert "--rounds 1400" in text


def test_summary_of_a_job_that_failed_at_once():
  text = "\n".join(summary.summary_lines(report.build([], "failed", "no port")))
  assert "failed: no port" in text
  assert "not evaluated" in text


def test_status_of_a_running_job(tmp_path, demo):
  write_log(tmp_path, [e for e in demo if e["t"] < 18])
  lines = status.status_lines(tmp_path)
  assert lines[0].startswith("training (version 0) at 18.0 s: round 19")
  assert "2 learners live" in lines[0]
  assert "learner/1: down, incarnation 2, step 166" in lines[2]
  assert "data at unit" in lines[1]


def test_status_of_nothing_is_one_line(tmp_path):
  with pytest.raises(DecoupledError, match="no status of"):
    status.status_lines(tmp_path)
