"""The log survives torn lines, bad disks and several writers."""

import ast
import enum
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import decoupled
from decoupled.clock import ManualClock
from decoupled.observe import events
from decoupled.observe.events import EventLog, EventReader


def _log(path, started_at=100.0):
  clock = ManualClock(started_at)
  return EventLog(path, started_at, clock), clock


def test_times_count_from_the_jobs_start(tmp_path):
  log, clock = _log(tmp_path / "events.jsonl")
  clock.advance(2.5)
  log.emit("phase", phase="training", why="")
  assert list(events.read(log.path)) == [
    {"t": 2.5, "kind": "phase", "phase": "training", "why": ""}
  ]


def test_values_become_json(tmp_path):
  class Word(enum.StrEnum):
    A = "a"

  log, _ = _log(tmp_path / "events.jsonl")
  log.emit(
    "steps",
    loss=float("nan"),
    ends=np.array([1.0, np.inf]),
    step=np.int64(3),
    phase=Word.A,
    weights={0: np.float32(0.5)},
    who={2, 1},
    path=tmp_path,
  )
  (event,) = events.read(log.path)
  assert event["loss"] is None
  assert event["ends"] == [1.0, None]
  assert event["step"] == 3
  assert event["phase"] == "a"
  assert event["weights"] == {"0": 0.5}
  assert event["who"] == [1, 2]
  assert event["path"] == str(tmp_path)


@given(
  st.dictionaries(
    st.text(), st.floats() | st.text() | st.integers() | st.none()
  )
)
def test_every_event_is_one_line_of_strict_json(values):
  line = events.encode({"t": 0.0, "kind": "x", "values": values})
  assert line.count(b"\n") == 1
  assert line.endswith(b"\n")

  def refuse(name):
    raise AssertionError(name)

  assert json.loads(line, parse_constant=refuse)["kind"] == "x"


def test_torn_and_foreign_lines_are_passed_over_and_counted(tmp_path):
  path = tmp_path / "events.jsonl"
  log, _ = _log(path)
  log.emit("end", status="completed", reason="")
  with path.open("ab") as file:
    file.write(b'\x00\xff garbage\n[1]\n{"kind": "x"}\n{"t": 1, "ki')
  reader = EventReader(path)
  assert [e["kind"] for e in reader.rest()] == ["end"]
  assert reader.skipped == 4


def test_a_writer_that_finds_a_torn_line_starts_a_new_one(tmp_path):
  path = tmp_path / "events.jsonl"
  path.write_bytes(b'{"t": 1, "ki')
  log, _ = _log(path)
  log.emit("end", status="completed", reason="")
  reader = EventReader(path)
  assert [e["kind"] for e in reader.rest()] == ["end"]
  assert reader.skipped == 1


def test_a_reader_that_follows_waits_for_the_end_of_a_line(tmp_path):
  path = tmp_path / "events.jsonl"
  reader = EventReader(path)
  assert reader.new() == []  # not there yet
  path.write_bytes(b'{"t": 1, "kind": "a"}\n{"t": 2, "k')
  assert [e["kind"] for e in reader.new()] == ["a"]
  assert reader.new() == []
  with path.open("ab") as file:
    file.write(b'ind": "b"}\n')
  assert [e["kind"] for e in reader.new()] == ["b"]
  assert reader.skipped == 0


def test_a_failing_disk_is_counted_and_said_once(tmp_path, caplog):
  log, _ = _log(tmp_path / "absent" / "events.jsonl")
  for _ in range(3):
    log.emit("end", status="completed", reason="")
  assert log.failed == 3
  assert len(caplog.records) == 1
  assert "absent" in caplog.text
  (tmp_path / "absent").mkdir()
  log.emit("end", status="completed", reason="")  # it has recovered
  assert len(list(events.read(log.path))) == 1


def test_a_short_write_does_not_swallow_the_next_event(tmp_path, monkeypatch):
  log, _ = _log(tmp_path / "events.jsonl")
  log.emit("end", status="first", reason="")
  real = os.write
  monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:9]))
  log.emit("end", status="torn", reason="")
  monkeypatch.setattr(os, "write", real)
  log.emit("end", status="last", reason="")
  reader = EventReader(log.path)
  assert [e["status"] for e in reader.rest()] == ["first", "last"]
  assert (log.failed, reader.skipped) == (1, 1)


def test_what_has_no_json_form_never_raises(tmp_path, caplog):
  log, _ = _log(tmp_path / "events.jsonl")
  log.emit("end", status=object(), reason="")
  assert log.failed == 1
  assert "has no JSON form" in caplog.text


_WRITER = """
import sys
from decoupled.observe.events import EventLog
log = EventLog(sys.argv[1], 0.0)
for i in range(200):
  log.emit("end", status=sys.argv[2], reason="x" * (i * 7 % 900))
"""


def test_processes_and_threads_write_at_once(tmp_path):
  path = tmp_path / "events.jsonl"
  processes = [
    subprocess.Popen([sys.executable, "-c", _WRITER, str(path), name])
    for name in ("a", "b")
  ]
  log, _ = _log(path)

  def write():
    for _ in range(200):
      log.emit("end", status="c", reason="y" * 300)

  threads = [threading.Thread(target=write) for _ in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert [p.wait(60) for p in processes] == [0, 0]
  reader = EventReader(path)
  found = [e["status"] for e in reader.rest()]
  assert reader.skipped == 0
  assert {name: found.count(name) for name in "abc"} == {
    "a": 200,
    "b": 200,
    "c": 400,
  }


def test_the_schema_finds_what_is_missing_and_what_is_unknown(demo):
  assert [p for event in demo for p in events.problems(event)] == []
  assert events.problems({"t": 0, "kind": "phase", "phase": "x", "y": 1}) == [
    "phase lacks why",
    "phase does not know y",
  ]
  assert events.problems({"t": 0, "kind": "nonsense"}) == [
    "unknown kind 'nonsense'"
  ]


@pytest.mark.parametrize("name", events.KINDS)
def test_every_kind_is_documented(name):
  kind = events.KINDS[name]
  assert kind.says.endswith(".")
  assert not set(kind.required) & set(kind.optional)
  assert f"| `{name}` | {kind.says} |" in events.schema_table()


def test_the_last_of_several_jobs(demo):
  again = [{**demo[0], "run_id": "again"}, {"t": 1.0, "kind": "end"}]
  assert events.last_job(demo + again) == again
  assert events.last_job(again[1:]) == again[1:]


def test_tee_hands_events_to_each(tmp_path):
  one, _ = _log(tmp_path / "one")
  two, _ = _log(tmp_path / "two")
  events.Tee(one, two).emit("end", status="completed", reason="")
  assert list(events.read(one.path)) == list(events.read(two.path))


def _emitted():
  """(file, line, kind, fields, whether fields are spread) of each call."""
  root = Path(decoupled.__file__).parent
  for path in sorted(root.rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
      if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "emit"
        and node.args
        and isinstance(node.args[0], ast.Constant)
      ):
        fields = {keyword.arg for keyword in node.keywords}
        where = f"{path.relative_to(root)}:{node.lineno}"
        yield where, node.args[0].value, fields - {None}, None in fields


def test_what_the_program_emits_is_what_the_schema_says():
  calls = list(_emitted())
  assert calls
  wrong = []
  for where, name, fields, spread in calls:
    kind = events.KINDS.get(name)
    if kind is None:
      wrong.append(f"{where}: unknown kind {name}")
      continue
    unknown = fields - {*kind.required, *kind.optional}
    missing = set() if spread else set(kind.required) - fields
    if unknown or missing:
      wrong.append(f"{where}: {name} unknown {unknown}, missing {missing}")
  assert wrong == []
