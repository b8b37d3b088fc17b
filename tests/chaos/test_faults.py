"""Points of the protocol at which a test lets a process fail."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from decoupled import faults
from decoupled.errors import ConfigError

ROOT = Path(__file__).parents[2] / "decoupled"
# hooks of what donates and receives come with it


@pytest.fixture
def log(tmp_path):
  path = tmp_path / "faults.jsonl"
  path.touch()
  yield path
  faults.disarm()


def environ(text: str, log: Path) -> dict[str, str]:
  return {faults.VARIABLE: text, faults.LOG_VARIABLE: str(log)}


def process(text: str, log: Path, passes: str) -> subprocess.Popen[str]:
  code = (
    "from decoupled import faults\n"
    "faults.arm('learner/0')\n"
    f"for point in {passes!r}.split():\n"
    "  faults.reached(point)\n"
    "  print(point, flush=True)\n"
  )
  return subprocess.Popen(
    [sys.executable, "-c", code],
    env={**os.environ, **environ(text, log)},
    stdout=subprocess.PIPE,
    text=True,
  )


def test_every_point_is_placed_and_every_place_is_a_point():
  placed = set()
  for path in ROOT.rglob("*.py"):
    text = path.read_text("utf-8")
    placed |= set(re.findall(r'faults\.reached\(\s*"([^"]*)"', text))
  assert placed - set(faults.POINTS) == set()
  assert set(faults.POINTS) - placed == set()


def test_a_text_is_read_and_written():
  text = "learner/1@link.landed:kill:3; syncer @ syncer.merged:stop:2:1.5;"
  found = faults.parse(text)
  assert [str(f) for f in found] == [
    "learner/1@link.landed:kill:3",
    "syncer@syncer.merged:stop:2:1.5",
  ]
  assert faults.parse("; ".join(map(str, found))) == found


@pytest.mark.parametrize(
  ("text", "says"),
  [
    ("learner/1@link.after_reprot:kill:3", "'link.after_report'"),
    ("learner/1@link.after_report:kil:3", "'kill'"),
    ("learner/1@link.after_report:kill:0", "is no fault"),
    ("link.after_report:kill:1", "is no fault"),
  ],
)
def test_what_is_no_fault_is_refused_with_the_nearest(text, says):
  with pytest.raises(ConfigError, match=re.escape(says)):
    faults.parse(text)


@pytest.mark.parametrize(
  "env",
  [
    {faults.VARIABLE: "syncer@syncer.merged:kill:1"},
    {
      faults.VARIABLE: "syncer@syncer.merged:kill:1",
      faults.LOG_VARIABLE: "absent",
    },
    {faults.LOG_VARIABLE: __file__},
  ],
)
def test_half_of_the_variables_starts_nothing(env):
  with pytest.raises(ConfigError, match="faults are for tests"):
    faults.arm("syncer", env)


def test_only_the_own_role_at_the_asked_passing_and_in_turn(log, monkeypatch):
  done = []
  monkeypatch.setattr(faults, "_do", lambda fault: done.append(str(fault)))
  text = (
    "syncer@syncer.merged:kill:2;learner/0@link.landed:kill:1;"
    "syncer@syncer.received:cut:1"
  )
  faults.arm("syncer", environ(text, log))
  for point in ("syncer.received", "syncer.merged", "link.landed"):
    faults.reached(point)
  assert done == []
  faults.reached("syncer.merged")
  assert done == ["syncer@syncer.merged:kill:2"]
  for _ in range(3):
    faults.reached("syncer.merged")
    faults.reached("syncer.received")
  assert done[1:] == ["syncer@syncer.received:cut:1"]
  assert [said["number"] for said in faults.read(log)] == [0, 2]


def test_a_process_that_is_started_again_goes_on_with_the_next(log):
  text = "learner/0@link.landed:kill:2;learner/0@link.staged:term:1"
  passes = "link.landed link.staged link.landed link.staged link.landed"
  first = process(text, log, passes)
  out, _ = first.communicate(timeout=30)
  assert first.returncode == -signal.SIGKILL
  assert out.split() == ["link.landed", "link.staged"]
  second = process(text, log, passes)
  out, _ = second.communicate(timeout=30)
  assert second.returncode == -signal.SIGTERM
  assert out.split()[:1] == ["link.landed"]
  third = process(text, log, passes)
  out, _ = third.communicate(timeout=30)
  assert third.returncode == 0
  assert out.split() == passes.split()
  said = faults.read(log)
  assert [s["pid"] for s in said] == [first.pid, second.pid]
  assert [s["point"] for s in said] == ["link.landed", "link.staged"]


def test_a_stopped_process_is_continued(log):
  stopped = process("learner/0@link.landed:stop:1:0.2", log, "link.landed")
  _, status = os.waitpid(stopped.pid, os.WUNTRACED)
  assert os.WIFSTOPPED(status)
  out, _ = stopped.communicate(timeout=30)
  assert stopped.returncode == 0
  assert out == "link.landed\n"


def test_a_cut_ends_connections_and_leaves_listeners(log):
  server = socket.create_server(("127.0.0.1", 0))
  near = socket.create_connection(server.getsockname())
  far, _ = server.accept()
  with server, near, far:
    faults.arm("syncer", environ("syncer@syncer.merged:cut:1", log))
    faults.reached("syncer.merged")
    assert near.recv(1) == b""
    with pytest.raises(OSError, match="Broken pipe"):
      far.send(b"x")
    again = socket.create_connection(server.getsockname())
    with again, server.accept()[0] as other:
      again.send(b"y")
      assert other.recv(1) == b"y"


def test_what_is_still_being_written_is_not_read(log):
  log.write_text(json.dumps({"number": 0}) + '\n{"num')
  assert faults.read(log) == [{"number": 0}]
