"""SIGTERM for a syncer, at each of its points: a successor goes on.

Only the syncer is a process of its own; two learners of the library are
threads here, so that each start costs seconds.
"""

import contextlib
import itertools
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from decoupled import faults
from decoupled.checkpoint import syncer_store
from decoupled.link import connect, digests
from decoupled.link.link import Link
from decoupled.wire.client import AdminClient
from decoupled.wire.credentials import read_token
from tests.matrix.points import SYNCER, SYNCER_END
from tests.run.processes import Processes, events, of, until

_STEP_S = 0.01
_LIMIT_S = 120


class Toy(threading.Thread):
  """A learner of a few tensors; trains until the run has ended."""

  def __init__(self, address: str, token: Path, number: int):
    super().__init__(daemon=True)
    self.held: tuple[list[list[int]], str] | None = None
    self.failed: Exception | None = None
    self._params = {f"w{i}": jnp.full((8,), 1.0 + i) for i in range(4)}
    self._where = (address, token, number)
    self.start()

  def run(self) -> None:
    address, token, number = self._where
    try:
      link = connect(
        address, self._params, learner_id=number, token_file=str(token)
      )
      with contextlib.closing(link):
        self._train(link)
    except Exception as error:
      self.failed = error

  def _train(self, link: Link) -> None:
    params, step = link.begin(self._params), 0
    while not link.done:
      params = jax.tree.map(lambda x: 0.999 * x, params)
      time.sleep(_STEP_S)  # stands for the step
      step += 1
      params = link.boundary(params, step=step, tokens=10 * step)
    versions = [list(version) for version in link.versions]
    self.held = (versions, link.digest(params))


_TOLD = 128 + signal.SIGTERM


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", [0, 1])
def test_it_hands_the_run_over(
  tmp_path: Path, processes: Processes, part: int
) -> None:
  workdir, log = tmp_path / "job", tmp_path / "faults.jsonl"
  log.touch()
  points = SYNCER[part::2]
  chain = [f"syncer@{point}:term:{_passing(point)}" for point in points]
  # one that is killed while it hands over is any dead syncer
  chain += ["syncer@syncer.received:term:40"] * part
  chain += ["syncer@syncer.handing_over:kill:1"] * part
  serve: tuple[str, ...] = _command(workdir, 1000000)
  env = {faults.VARIABLE: ";".join(chain), faults.LOG_VARIABLE: str(log)}
  syncer = processes.start(*serve, env=env)
  toys = _toys(workdir)
  address = (workdir / "syncer.address").read_text().strip()
  serve = (*serve, f"--bind={address}")  # where they look for the next one
  ends = []
  while len(faults.read(log)) < len(chain):
    until(lambda: syncer.poll() is not None, _left(log, chain), _LIMIT_S)  # noqa: B023
    ends.append(syncer.returncode)
    assert "Traceback" not in processes.said(syncer)
    syncer = processes.start(*serve, env=env)
  # (one that is told twice, the second time in its last save, hands over once)
  told = len(ends) - part
  assert ends == [_TOLD] * told + [-signal.SIGKILL] * part
  # everybody goes on with the last one, and ends when that is asked for
  term = len(ends) + 1
  until(
    lambda: len([r for r in _rounds(workdir) if r["term"] == term]) > 20,
    "rounds under the last term",
    _LIMIT_S,
  )
  with AdminClient(address, read_token(workdir / "run.token")) as admin:
    admin.drain("enough")
  until(lambda: syncer.poll() is not None, "the end", _LIMIT_S)
  assert syncer.returncode == 0, processes.said(syncer)
  for before, after in itertools.pairwise(range(1, term + 1)):
    if ends[before - 1] == _TOLD:
      _nothing_lost(workdir, before, after)
  _everybody_has_the_same(workdir, toys)


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", SYNCER_END)
def test_it_finishes_a_run_that_is_at_its_end(
  tmp_path: Path, processes: Processes, point: str
) -> None:
  workdir, log = tmp_path / "job", tmp_path / "faults.jsonl"
  log.touch()
  env = {
    faults.VARIABLE: f"syncer@{point}:term:1",
    faults.LOG_VARIABLE: str(log),
  }
  syncer = processes.start(*_command(workdir, 40), env=env)
  toys = _toys(workdir)
  until(lambda: syncer.poll() is not None, "the syncer to end", _LIMIT_S)
  assert [said["point"] for said in faults.read(log)] == [point]
  said = processes.said(syncer)
  assert "Traceback" not in said
  assert syncer.returncode == 0, said
  assert [e["outcome"] for e in of("stopped", events(workdir))] == ["ended"]
  assert of("phase", events(workdir))[-1]["phase"] == "ended"
  _everybody_has_the_same(workdir, toys)


def _passing(point: str) -> int:
  if point == "syncer.granted":
    return 1
  if point == "syncer.renewing" or point.startswith("checkpoint."):
    return 4
  return 40  # training has begun by then


def _command(workdir: Path, rounds: int) -> tuple[str, ...]:
  return (
    "syncer",
    f"--workdir={workdir}",
    "--learners=2",
    f"--rounds={rounds}",
    "Exchange.H=4",
    "Exchange.P=4",
    "Checkpoint.every_rounds=10",
    "Checkpoint.least_s=0",
    "Checkpoint.keep=100000",
  )


def _toys(workdir: Path) -> list[Toy]:
  address = workdir / "syncer.address"
  until(address.exists, "the syncer's address", _LIMIT_S)
  where = address.read_text().strip()
  return [Toy(where, workdir / "run.token", i) for i in range(2)]


def _left(log: Path, chain: list[str]) -> str:
  happened = {said["number"] for said in faults.read(log)}
  return f"{[f for i, f in enumerate(chain) if i not in happened]}"


def _rounds(workdir: Path) -> list[dict[str, Any]]:
  return [e for e in of("round", events(workdir)) if e["counted"]]


def _nothing_lost(workdir: Path, before: int, after: int) -> None:
  """A term goes on with the round after the last of the one before it."""
  found = _rounds(workdir)
  ended = [e["round"] for e in found if e["term"] == before]
  began = [e["round"] for e in found if e["term"] == after]
  if not ended or not began:  # a term may end before its first round
    return
  assert min(began) == max(ended) + 1, (before, after)
  assert sorted(ended) == list(range(min(ended), max(ended) + 1))


def _everybody_has_the_same(workdir: Path, toys: list[Toy]) -> None:
  (lease, *_) = sorted((workdir / "lease").glob("*.json"), reverse=True)
  assert json.loads(lease.read_text())["released"]
  for toy in toys:
    toy.join(_LIMIT_S)
    assert not toy.is_alive()
  snapshot = syncer_store.restore_newest(workdir / "checkpoints").value
  versions = [list(version) for version in snapshot.versions]
  for toy in toys:
    assert toy.failed is None
    assert toy.held == (versions, digests.of(snapshot.fragments))
