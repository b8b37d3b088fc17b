"""Epochs in real processes: ranks die or freeze, and the job forms anew."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoupled.errors import ConfigError
from decoupled.learner import epochs
from decoupled.wire import credentials
from tests.learner.test_coordinator import coordinator

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 120.0
_STEPS = 60


class Rank:
  """A worker process and the lines it says."""

  def __init__(self, rank: int, hosts: int, devices: int = 1):
    self.rank = rank
    self._said: queue.Queue[str] = queue.Queue()
    self.process = subprocess.Popen(
      [
        *(sys.executable, "-m", "tests.learner.epoch_worker"),
        *map(str, (rank, hosts, devices, _STEPS)),
      ],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=_ROOT,
      env=os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "1"},
    )
    self.errors: list[str] = []
    for stream, put in (
      (self.process.stdout, self._said.put),
      (self.process.stderr, self.errors.append),
    ):
      threading.Thread(target=_drain, args=(stream, put), daemon=True).start()

  def join(self, address: str) -> None:
    assert self.process.stdin is not None
    self.process.stdin.write(f"{address}\n")
    self.process.stdin.flush()

  def wait_for(self, what: str, least: int = 0) -> dict[str, Any]:
    until = time.monotonic() + _LIMIT_S
    while time.monotonic() < until:
      with contextlib.suppress(queue.Empty):
        said = self._said.get(timeout=0.5)
        found: dict[str, Any] = json.loads(said) if said[:1] == "{" else {}
        if found.get("what") == what and found.get("step", 0) >= least:
          return found
        continue
      status = self.process.poll()
      assert status is None, (
        f"rank {self.rank} ended with {status} before it said {what!r}: "
        + "".join(self.errors[-20:])
      )
    raise AssertionError(
      f"rank {self.rank} has not said {what!r} within {_LIMIT_S:g} s: "
      + "".join(self.errors[-20:])
    )


def _drain(stream: Any, put: Any) -> None:
  for line in stream:
    put(line)


@contextlib.contextmanager
def ranks(hosts: int, fresh: int = 0, devices: int = 1) -> Iterator[list[Rank]]:
  """`hosts` ranks, and one more process with the id of `fresh` behind them."""
  made = [Rank(rank, hosts, devices) for rank in (*range(hosts), fresh)]
  try:
    yield made
  finally:
    for rank in made:
      rank.process.kill()
      rank.process.wait()


def service(hosts: int) -> epochs.Service:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  return epochs.Service(f"127.0.0.1:{port}", hosts)


def undisturbed(hosts: int) -> np.ndarray:
  w = np.zeros(4, np.float32)
  for step in range(_STEPS):
    rows = [(rank + 1) * 0.01 * np.cos(step) for rank in range(hosts)]
    w = w + np.float32(0.1) * np.sin(w) + np.float32(np.mean(rows))
  return w


@pytest.mark.slow
@pytest.mark.parametrize(
  ("hosts", "dies", "how", "devices"),
  [
    (3, 2, signal.SIGKILL, 1),
    (2, 1, signal.SIGSTOP, 1),
  ],
)
def test_a_rank_is_replaced_and_the_numbers_stay_the_same(
  hosts: int, dies: int, how: signal.Signals, devices: int
) -> None:
  first = service(hosts)
  with ranks(hosts, fresh=dies, devices=devices) as (*old, new):
    for rank in old:
      rank.join(first.bind)
    for rank in old:
      rank.wait_for("formed")
    old[dies].wait_for("step", 10)
    # nobody needs the service of an epoch that has formed
    first.close()
    old[dies].wait_for("step", 20)
    old[dies].process.send_signal(how)
    second = service(hosts)
    new.join(second.bind)
    survivors = [rank for rank in old if rank.rank != dies]
    for rank in survivors:
      rank.wait_for("lost")
      rank.join(second.bind)
    done = [rank.wait_for("done") for rank in (*survivors, new)]
    for said in done:
      assert said["released"], said
      np.testing.assert_allclose(said["w"], undisturbed(hosts), rtol=1e-5)
    if how is signal.SIGSTOP:  # a zombie finds nobody, and is not aborted
      old[dies].process.send_signal(signal.SIGCONT)
      old[dies].wait_for("lost")
    second.close()


@pytest.mark.slow
def test_rank_0_is_replaced_and_the_coordinator_dies_before_that(
  tmp_path: Path,
) -> None:
  """Two devices a host; whoever is left meets at its successor."""
  token = credentials.make_token(tmp_path / "run.token")
  where = tmp_path / "coordinator.address"
  with ranks(2, fresh=0, devices=2) as (zero, one, new):
    with coordinator(tmp_path):
      for rank in (zero, one):
        rank.join(f"{where} {token} 1")
      for rank in (zero, one):
        rank.wait_for("formed")
      zero.wait_for("step", 10)
    where.unlink()
    zero.wait_for("step", 20)
    zero.process.kill()
    one.wait_for("lost")
    for rank in (one, new):  # they wait for the successor
      rank.join(f"{where} {token} 2")
    with coordinator(tmp_path):
      done = [rank.wait_for("done") for rank in (one, new)]
    for said in done:
      assert said["released"], said
      np.testing.assert_allclose(said["w"], undisturbed(2), rtol=1e-5)


@pytest.mark.slow
def test_an_epoch_that_does_not_form_raises_and_the_next_can_be_joined() -> (
  None
):
  script = """
import sys
from decoupled.learner import epochs
limits = epochs.EpochLimits(connect_s=7.0, collective_s=3)
epochs.prepare(limits)
for address, hosts in zip(sys.argv[1::2], sys.argv[2::2]):
  try:
    epochs.connect(address, 0, int(hosts), limits)
    epochs.settle()
    print("in", flush=True)
  except epochs.Lost as error:
    print(error, flush=True)
  epochs.tear_down()
"""
  alone, enough = service(2), service(1)
  said = subprocess.run(
    [sys.executable, "-c", script, alone.bind, "2", enough.bind, "1"],
    capture_output=True,
    text=True,
    timeout=_LIMIT_S,
    cwd=_ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "1"},
  )
  assert said.returncode == 0, said.stderr
  first, second = said.stdout.splitlines()
  assert first.startswith("rank 0 of 2 waited")
  assert "not all of them came" in first
  assert second == "in"
  for one in (alone, enough):
    epochs.close_in_background(one).join(30.0)


def test_a_process_that_has_used_jax_cannot_prepare() -> None:
  with pytest.raises(ConfigError, match="prepare epochs before anything else"):
    epochs.prepare(epochs.EpochLimits())


def test_whose_fault_an_error_is() -> None:
  gloo = ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed")
  assert epochs.lost_peer(gloo)
  assert not epochs.lost_peer(ValueError("shapes (3,) and (4,) do not match"))
  assert not epochs.lost_peer(KeyError("gloo"))
