"""Each snapshot is evaluated once, as it comes, until the run has ended."""

import json
import os
import threading

import pytest
from etils import epath

from decoupled import evaluate, follow
from decoupled.checkpoint import arrays, syncer_store
from decoupled.clock import ManualClock
from decoupled.launch.options import EvaluateOptions
from decoupled.observe import events, page
from tests.checkpoint.test_evaluate import _snapshot, config_fixture
from tests.exchange.outages import restore_quickly, save_quickly

config = config_fixture  # a fixture of this module, too


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(arrays, "save", save_quickly)
  monkeypatch.setattr(arrays, "restore_flat", restore_quickly)
  monkeypatch.setattr(evaluate, "_TOKENS", 64)


class Script(threading.Event):
  """An event whose every wait does the next thing that happens in the run."""

  def __init__(self, *deeds, clock=None):
    super().__init__()
    self.deeds = list(deeds)
    self.clock = clock

  def wait(self, timeout=None):
    if self.clock is not None:
      self.clock.advance(timeout)
    if not self.deeds:
      raise AssertionError("it waits for something after the end")
    self.deeds.pop(0)()
    return self.is_set()


def saves(store, config, rounds, **more):
  return lambda: syncer_store.save_global(
    store, rounds, _snapshot(config, rounds, **more), keep=2
  )


def says(log, kind, **fields):
  return lambda: log.emit(kind, **fields)


def heldout(log):
  return [e for e in events.read(log.path) if e["kind"] == "heldout"]


def started(tmp_path):
  log = events.EventLog(tmp_path / "events.jsonl", 0.0)
  log.emit("phase", phase="training", why="")
  return log


def test_the_curve_grows_with_the_run(tmp_path, config, capsys):
  log, store = started(tmp_path), f"{tmp_path}/store"
  script = Script(
    saves(store, config, 0),
    saves(store, config, 10, change=3.0),
    lambda: None,
    says(log, "phase", phase="ended", why=""),
    saves(store, config, 20, change=9.0),  # the final one comes after the end
    says(log, "end", status="completed", reason=""),
  )
  options = EvaluateOptions(tmp_path, store=store, follow=True)
  assert follow.follow(config, options, script) == 0
  found = heldout(log)
  assert [e["round"] for e in found] == [0, 10, 20]
  assert all(events.problems(e) == [] for e in found)
  assert len({e["loss"] for e in found}) == 3
  said = capsys.readouterr().out.splitlines()
  assert [f"{e['loss']:.4f}" in s for e, s in zip(found, said, strict=False)]
  assert said[-1] == "the run has ended: 3 snapshots evaluated"
  assert list((tmp_path / "metrics" / "eval").iterdir())


def test_a_run_that_goes_on_after_its_end_is_followed(tmp_path, config):
  """A syncer that dies in the drain comes back and trains."""
  log, store = started(tmp_path), str(tmp_path / "store")
  script = Script(
    saves(store, config, 0),
    says(log, "phase", phase="ended", why=""),
    says(log, "phase", phase="training", why=""),
    saves(store, config, 10),
    says(log, "phase", phase="ended", why=""),
    says(
      log, "checkpoint", what="save", round=20, path="", ok=True, error="",
      role="syncer",
    ),
  )  # fmt: skip
  options = EvaluateOptions(tmp_path, store=store)
  follow.follow(config, options, script)
  assert script.deeds == []
  assert [e["round"] for e in heldout(log)] == [0, 10]


def test_a_syncer_that_ends_without_a_last_word_is_not_waited_for(
  tmp_path, config
):
  log, store = started(tmp_path), str(tmp_path / "store")
  clock = ManualClock()
  deeds = [says(log, "phase", phase="ended", why="")]
  script = Script(*deeds, *[lambda: None] * 30, clock=clock)
  follow.follow(config, EvaluateOptions(tmp_path, store=store), script, clock)
  assert script.deeds == []


def test_what_is_dropped_while_it_is_read_is_passed_over(
  tmp_path, config, capsys, monkeypatch
):
  log, store = started(tmp_path), str(tmp_path / "store")
  read = syncer_store.read

  def slowly(path):
    if "000000000010-" in os.fspath(path):
      epath.Path(path).rmtree()
    return read(path)

  monkeypatch.setattr(syncer_store, "read", slowly)
  for rounds in (0, 10, 20):
    saves(store, config, rounds)()
  path = next((tmp_path / "store" / "global").glob("000000000020-*"))
  data = path / "arrays.npz"
  data.write_bytes(data.read_bytes()[:-1] + b"?")
  script = Script(says(log, "end", status="completed", reason=""))
  follow.follow(config, EvaluateOptions(tmp_path, store=store), script)
  assert [e["round"] for e in heldout(log)] == [0]
  said = capsys.readouterr().out
  assert "000000000010-" in said
  assert "was dropped meanwhile" in said
  assert "arrays.npz has other bytes than saved" in said


def test_a_signal_ends_it_amid_an_evaluation(tmp_path, config, capsys):
  log, store = started(tmp_path), str(tmp_path / "store")
  for rounds in (0, 10):
    saves(store, config, rounds)()
  stopping = Script()
  evaluator = evaluate.Evaluator(config)
  curve = follow.Curve(store, evaluator, log, follow.Metrics(tmp_path / "m"))
  asked = []

  def amid():
    asked.append(1)
    return len(asked) > 1

  assert curve.look(amid)
  assert (curve.count, heldout(log)) == (0, [])
  stopping.set()
  assert follow.follow(config, EvaluateOptions(tmp_path), stopping) == 0
  assert "stopped by a signal: 0 snapshots" in capsys.readouterr().out


def test_the_page_shows_the_curve(tmp_path):
  log = events.EventLog(tmp_path / "events.jsonl", 0.0)
  log.emit("start", run_id="r", seed=0, wall_time="", learners=1, config={})
  where = {"path": "p", "term": 1, "tokens": 64}
  log.emit("join", learner=0, incarnation=1, hosts=1, holder="", previous=0)
  log.emit(
    "steps", learner=0, incarnation=1, step=1, tokens=1, schedule_step=1,
    ends=[1.0], loss=5.0, position=[0, 8],
  )  # fmt: skip
  log.emit("heldout", loss=5.5, round=0, **where)
  log.emit("heldout", loss=4.5, round=10, **where)
  log.emit("end", status="completed", reason="")
  text = page.write(tmp_path).read_text()
  assert "held-out loss of 2 snapshots" in text
  assert json.dumps("NaN") not in text
