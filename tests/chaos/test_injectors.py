"""Faults on real processes and real connections."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from decoupled.chaos import slow
from decoupled.chaos.injectors import Injectors
from decoupled.chaos.plan import parse
from decoupled.chaos.proxy import Proxy
from decoupled.chaos.slow import Slowdown
from decoupled.observe import events

LIMIT_S = 20.0


def until(condition, what):
  deadline = time.monotonic() + LIMIT_S
  while not condition():
    assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
    time.sleep(0.005)


class Sleeper:
  """One real process that stands for learner/0."""

  def __init__(self):
    self.popen = subprocess.Popen(
      [sys.executable, "-c", "import time; time.sleep(600)"]
    )
    self.expected = []

  def pid(self, role):
    return self.popen.pid if self.popen.poll() is None else None

  def send(self, role, number):
    os.kill(self.popen.pid, number)
    return True

  def resume(self, pid):
    os.kill(pid, signal.SIGCONT)

  def expect_fault(self, role, restart):
    self.expected.append((role, restart))

  def state(self):
    with open(f"/proc/{self.popen.pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0]


@pytest.fixture
def sleeper():
  process = Sleeper()
  yield process
  process.popen.kill()
  process.popen.wait()


@pytest.fixture
def log(tmp_path):
  return events.EventLog(tmp_path / "events.jsonl", time.monotonic())


def faults(log):
  return [e for e in events.read(log.path) if e["kind"] == "fault"]


@pytest.mark.parametrize(
  ("action", "number"), [("kill", signal.SIGKILL), ("term", signal.SIGTERM)]
)
def test_kill_and_term(sleeper, log, action, number):
  (fault,) = parse(f"{action} learner/0 @1s norestart")
  inject = Injectors(sleeper, {}, {}, log)
  assert inject.inject(fault, 1.0)
  assert sleeper.popen.wait(LIMIT_S) == -number
  assert sleeper.expected == [("learner/0", False)]
  (event,) = faults(log)
  assert not events.problems(event)
  assert (event["action"], event["target"]) == (action, "learner/0")
  # Its target is down: recorded, but nothing is expected of it.
  assert not inject.inject(fault, 2.0)
  assert "down" in faults(log)[1]["error"]
  assert not events.problems(faults(log)[1])
  assert len(sleeper.expected) == 1


def test_pause_stops_and_continues(sleeper, log):
  (fault,) = parse("pause learner/0 @1s for 20s")
  inject = Injectors(sleeper, {}, {}, log)
  inject.inject(fault, 1.0)
  until(lambda: sleeper.state() == "T", "stopped")
  assert inject.next_at_s == 21.0
  inject.heal_due(20.9)
  assert sleeper.state() == "T"
  inject.heal_due(21.0)
  until(lambda: sleeper.state() != "T", "continued")
  assert inject.next_at_s == float("inf")


def test_a_stopped_job_leaves_nobody_paused(sleeper, log):
  (fault,) = parse("pause learner/0 @1s for 20s")
  inject = Injectors(sleeper, {}, {}, log)
  inject.inject(fault, 1.0)
  until(lambda: sleeper.state() == "T", "stopped")
  inject.heal_all()
  until(lambda: sleeper.state() != "T", "continued")


def test_slow_reaches_the_learner_s_attribute(sleeper, log, tmp_path):
  control = tmp_path / "chaos" / "learner-0.json"
  slowdown = Slowdown(control)
  assert slowdown.factor == 1.0
  (fault,) = parse("slow learner/0 @1s by 3 for 5s")
  inject = Injectors(sleeper, {0: control}, {}, log)
  inject.inject(fault, 1.0)
  until(lambda: slowdown.factor == 3.0, "slow")
  inject.heal_due(6.0)
  until(lambda: slowdown.factor == 1.0, "fast again")
  slowdown.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"slow": "x"}', "null"])
def test_a_damaged_control_file_means_full_speed(tmp_path, text):
  file = tmp_path / "control.json"
  file.write_text(text)
  assert slow.read(file) == 1.0
  file.write_text(json.dumps({"slow": 2}))
  assert slow.read(file) == 2.0
  assert slow.read(tmp_path / "none.json") == 1.0


def test_without_the_variable_nothing_is_polled(monkeypatch):
  monkeypatch.delenv(slow.VARIABLE, raising=False)
  before = threading.active_count()
  assert Slowdown.from_environment().factor == 1.0
  assert threading.active_count() == before


# ---- partition ---------------------------------------------------------------


@pytest.fixture
def echo():
  """A server that sends back what it gets."""
  server = socket.create_server(("127.0.0.1", 0))

  def serve(connection):
    with connection, contextlib.suppress(OSError):
      while data := connection.recv(4096):
        connection.sendall(data)

  def accept():
    with contextlib.suppress(OSError):
      while True:
        connection, _ = server.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()

  threading.Thread(target=accept, daemon=True).start()
  yield server.getsockname()
  server.close()


def connect(proxy):
  host, _, port = proxy.address.rpartition(":")
  client = socket.create_connection((host, int(port)), LIMIT_S)
  client.settimeout(LIMIT_S)
  return client


def is_dropped(client):
  try:
    client.sendall(b"x")
    return client.recv(1) == b""
  except TimeoutError:
    return False
  except OSError:
    return True


def test_partition_cuts_and_heals(echo, sleeper, log):
  proxy = Proxy(lambda: echo)
  (fault,) = parse("partition learner/0 @1s for 3s")
  inject = Injectors(sleeper, {}, {0: proxy}, log)
  client = connect(proxy)
  client.sendall(b"hello")
  assert client.recv(5) == b"hello"

  inject.inject(fault, 1.0)
  until(lambda: is_dropped(client), "the connection is dropped")
  assert is_dropped(connect(proxy))

  inject.heal_due(4.0)
  with connect(proxy) as again:
    again.sendall(b"again")
    assert again.recv(5) == b"again"
  proxy.close()


def test_a_large_message_passes_the_proxy_unchanged(echo):
  proxy = Proxy(lambda: echo)
  data = os.urandom(1 << 20)
  with connect(proxy) as client:
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    received = bytearray()
    while len(received) < len(data):
      received += client.recv(1 << 16)
    sender.join(LIMIT_S)
  assert bytes(received) == data
  proxy.close()


def test_the_proxy_is_there_before_the_syncer(echo):
  known = []
  proxy = Proxy(lambda: known[0] if known else None)
  assert is_dropped(connect(proxy))
  known.append(echo)
  with connect(proxy) as client:
    client.sendall(b"now")
    assert client.recv(3) == b"now"
  proxy.close()


def test_partition_of_the_syncer_cuts_everybody(echo, sleeper, log):
  proxies = {number: Proxy(lambda: echo) for number in range(3)}
  clients = [connect(proxy) for proxy in proxies.values()]
  (fault,) = parse("partition syncer @1s")
  Injectors(sleeper, {}, proxies, log).inject(fault, 1.0)
  for client in clients:
    until(lambda client=client: is_dropped(client), "dropped")
  for proxy in proxies.values():
    proxy.close()
