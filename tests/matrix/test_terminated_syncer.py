"""SIGTERM for a syncer, at each of its points: the run ends in order.

Only the syncer is a process of its own; two learners of the library are
threads here, so that each end costs seconds.
"""

import json
import signal
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from decoupled import faults
from decoupled.checkpoint import syncer_store
from decoupled.link import connect, digests
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
    self._link = connect(
      address, self._params, learner_id=number, token_file=str(token)
    )
    self.start()

  def run(self) -> None:
    try:
      self._train()
    except Exception as error:
      self.failed = error
    finally:
      self._link.close()

  def _train(self) -> None:
    link, step = self._link, 0
    params = link.begin(self._params)
    while not link.done:
      params = jax.tree.map(lambda x: 0.999 * x, params)
      time.sleep(_STEP_S)  # stands for the step
      step += 1
      params = link.boundary(params, step=step, tokens=10 * step)
    versions = [list(version) for version in link.versions]
    self.held = (versions, link.digest(params))


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", [*SYNCER, *SYNCER_END])
def test_it_ends_the_run_in_order(
  tmp_path: Path, processes: Processes, point: str
) -> None:
  workdir, log = tmp_path / "job", tmp_path / "faults.jsonl"
  log.touch()
  if point in ("syncer.granted", *SYNCER_END):
    passing = 1
  elif point == "syncer.renewing" or point.startswith("checkpoint."):
    passing = 4
  else:
    passing = 40  # training has begun by then
  at_the_end = point in SYNCER_END
  syncer = processes.start(
    "syncer",
    f"--workdir={workdir}",
    "--learners=2",
    f"--rounds={40 if at_the_end else 1000000}",
    "Exchange.H=4",
    "Exchange.P=4",
    "Checkpoint.every_rounds=10",
    "Checkpoint.least_s=0",
    env={
      faults.VARIABLE: f"syncer@{point}:term:{passing}",
      faults.LOG_VARIABLE: str(log),
    },
  )
  address = workdir / "syncer.address"
  until(address.exists, "the syncer's address", _LIMIT_S)
  where = address.read_text().strip()
  toys = [Toy(where, workdir / "run.token", i) for i in range(2)]
  until(lambda: syncer.poll() is not None, "the syncer to end", _LIMIT_S)
  assert [said["point"] for said in faults.read(log)] == [point]
  said = processes.said(syncer)
  assert "Traceback" not in said
  assert syncer.returncode in (0, 128 + signal.SIGTERM), said
  found = events(workdir)
  phases = [(e["phase"], e["why"]) for e in of("phase", found)]
  assert phases[-1][0] == "ended"
  if not at_the_end:
    assert "stopped by" in phases[-1][1]
  (lease,) = (workdir / "lease").glob("*.json")
  assert json.loads(lease.read_text())["released"]
  if point == "syncer.granted":
    return  # it ended before there was anything; its learners look for another
  for toy in toys:
    toy.join(_LIMIT_S)
    assert not toy.is_alive()
  snapshot = syncer_store.restore_newest(workdir / "checkpoints").value
  versions = [list(version) for version in snapshot.versions]
  for toy in toys:
    assert toy.failed is None
    assert toy.held == (versions, digests.of(snapshot.fragments))
