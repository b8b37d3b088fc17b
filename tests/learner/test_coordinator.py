"""Where hosts meet: the table of epochs, and the real process."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled.errors import Refused
from decoupled.launch import address
from decoupled.learner.coordinator import Table
from decoupled.wire import credentials
from decoupled.wire.epochs import EpochsClient

_LIMIT_S = 60.0
_SOON_S = 30.0  # ends at once where all is well


@dataclasses.dataclass
class Recorded:
  """A service that only remembers whether it runs; the table's counterpart."""

  bind: str
  running: bool = True

  def close(self) -> None:
    self.running = False


class Fixture:
  def __init__(self, max_epochs: int = 8):
    self.started: list[Recorded] = []
    self.table = Table(self._start, lambda service: service.close(), max_epochs)

  def _start(self, hosts: int) -> Recorded:
    self.started.append(Recorded(f"h:{len(self.started)}"))
    return self.started[-1]

  def running(self) -> list[str]:
    return [service.bind for service in self.started if service.running]


def refused(reason: str, *words: str) -> "pytest.RaisesExc[Refused]":
  def fits(error: Refused) -> bool:
    return error.reason == reason and all(word in str(error) for word in words)

  return pytest.RaisesExc(Refused, check=fits)


def test_opening_is_idempotent_and_numbers_only_rise() -> None:
  async def check() -> None:
    f = Fixture()
    assert f.table.open(0, 1, 2) is f.table.open(0, 1, 2)
    with refused("hosts", "has 2 hosts, not 3"):
      f.table.open(0, 1, 3)
    f.table.open(0, 2, 2)
    with refused("old_epoch", "epoch 2 is open"):
      f.table.open(0, 1, 2)
    f.table.open(1, 1, 2)  # another learner's numbers are its own
    assert f.running() == ["h:0", "h:1", "h:2"]
    assert f.table.close(0, 1) == 1
    assert f.running() == ["h:1", "h:2"]

  asyncio.run(check())


def test_the_table_is_bounded() -> None:
  async def check() -> None:
    f = Fixture(max_epochs=2)
    f.table.open(0, 1, 2)
    f.table.open(1, 1, 2)
    with refused("full", "no more than 2"):
      f.table.open(2, 1, 2)
    f.table.close_all()
    assert f.running() == []
    f.table.open(2, 1, 2)

  asyncio.run(check())


def test_whoever_gathers_waits_for_all_and_older_epochs_end_then() -> None:
  async def check() -> None:
    f = Fixture()
    waits = asyncio.create_task(f.table.gather(0, 1, 2, 0, "a", _SOON_S))
    await asyncio.sleep(0)
    with refused("claimed", "held by a, not by z"):
      await f.table.gather(0, 1, 2, 0, "z", _SOON_S)
    with refused("malformed"):
      await f.table.gather(0, 1, 2, 2, "b", _SOON_S)
    assert not waits.done()
    await f.table.gather(0, 1, 2, 1, "b", _SOON_S)
    assert (await waits).service.bind == "h:0"
    second = asyncio.create_task(f.table.gather(0, 2, 2, 0, "a", _SOON_S))
    await asyncio.sleep(0)
    assert f.running() == ["h:0", "h:1"]  # a rank may still be in the old one
    await f.table.gather(0, 2, 2, 1, "c", _SOON_S)
    await second
    assert f.running() == ["h:1"]

  asyncio.run(check())


def test_a_wait_ends_with_the_missing_or_with_a_newer_epoch() -> None:
  async def check() -> None:
    f = Fixture()
    with refused("missing", "rank 1, 2 of 3 has not come"):
      await f.table.gather(0, 1, 3, 0, "a", 0.01)
    waits = asyncio.create_task(f.table.gather(0, 1, 3, 0, "a", _SOON_S))
    await asyncio.sleep(0)
    f.table.open(0, 2, 3)
    with refused("old_epoch", "epoch 2 has been opened"):
      await waits

  asyncio.run(check())


@contextlib.contextmanager
def coordinator(workdir: Path) -> Iterator[subprocess.Popen[str]]:
  process = subprocess.Popen(
    [
      *(sys.executable, "-m", "decoupled.cli", "coordinator"),
      f"--workdir={workdir}",
    ],
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )
  try:
    yield process
  finally:
    process.kill()
    process.wait()


@pytest.mark.slow
def test_the_process_dies_comes_back_elsewhere_and_ends_when_told(
  tmp_path: Path,
) -> None:
  token = credentials.make_token(tmp_path / "run.token")
  published = tmp_path / "coordinator.address"
  spec = f"@{published}"
  with coordinator(tmp_path) as process:
    with EpochsClient(address.resolve(spec, _LIMIT_S), token) as client:
      first = client.open(0, 1, 2)
      assert client.open(0, 1, 2) == first
      answers: list[str] = []
      other = threading.Thread(
        target=lambda: answers.append(client.gather(0, 1, 2, 1, "b", _LIMIT_S))
      )
      other.start()
      answers.append(client.gather(0, 1, 2, 0, "a", _LIMIT_S))
      other.join(_LIMIT_S)
      assert answers == [first, first]
      with refused("missing", "rank 1 of 2"):
        client.gather(0, 2, 2, 0, "a", 0.1)
    with (
      EpochsClient(address.resolve(spec, 1.0), "x" * 32) as stranger,
      refused("unauthenticated"),
    ):
      stranger.open(0, 9, 2)
    process.kill()
    process.wait()
  published.unlink()
  with coordinator(tmp_path) as process:
    with EpochsClient(address.resolve(spec, _LIMIT_S), token) as client:
      client.open(0, 3, 2)  # the numbers are the syncer's: it remembers none
      assert client.close_epochs(0, 3) == 1
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(_LIMIT_S) == 128 + signal.SIGTERM
    assert time.monotonic() - began < _LIMIT_S
