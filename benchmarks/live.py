"""A learner in this process, exchanging with a syncer in one of its own.

Import this module before jax: it asks for one XLA thread on one CPU device.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"NPROC": "1", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import jobs

# isort: split

import jax
import numpy as np

from decoupled.clock import MonotonicClock
from decoupled.config import Config, contract_lines
from decoupled.data import corpus
from decoupled.data.pipeline import Batches, batch_spec
from decoupled.launch import address
from decoupled.learner import allocator, loop
from decoupled.learner import mesh as meshes
from decoupled.learner import step as steps
from decoupled.learner.optimizer import make_optimizer
from decoupled.learner.pace import Pace
from decoupled.link.link import Link
from decoupled.models.task import LanguageModel
from decoupled.types import Arrays, Contribution, Hello
from decoupled.wire import client, credentials

_START_S = 60.0


class Program(NamedTuple):
  """What is compiled once, and what it is fed with."""

  config: Config
  task: LanguageModel
  mesh: jax.sharding.Mesh
  init: Any
  step: Any
  text: Any

  @property
  def tokens(self) -> int:
    """Tokens of one step."""
    return self.config.corpus.context * self.config.batch.sequences

  def state(self) -> steps.TrainState:
    return self.init(np.uint32(0))

  def batches(self) -> Batches:
    config = self.config
    return Batches(self.text, config.corpus.context, config.batch.sequences)


def compiled(config: Config) -> Program:
  """The learner's own inner step, compiled as the learner compiles it."""
  allocator.keep_freed_memory()
  mesh = meshes.make_mesh(config.mesh, jax.devices()[:1])
  task = LanguageModel(config.transformer)
  optimizer = make_optimizer(config.optimizer, task.tensor_specs())
  step = steps.compile_train_step(
    steps.make_train_step(
      task, optimizer, config.optimizer, config.schedule, mesh
    ),
    steps.state_specs(task, optimizer, mesh),
    batch_spec(config.corpus.context, config.batch.sequences),
    mesh,
  )
  init = steps.make_init(task, optimizer, mesh)
  return Program(
    config, task, mesh, init, step, corpus.load(config.corpus).train
  )


@contextlib.contextmanager
def syncer(
  folder: Path,
  bindings: list[str],
  learners: int = 1,
  more: Sequence[str] = (),
) -> Iterator[int]:
  """A live syncer that never ends by itself; gives its process id."""
  with (folder / "syncer.log").open("wb") as log:
    process = subprocess.Popen(
      [
        *(sys.executable, "-m", "decoupled.cli", "syncer", *bindings),
        f"--workdir={folder}",
        f"--learners={learners}",
        *more,
      ],
      stdout=log,
      stderr=log,
      env={**os.environ, **jobs.tied()},
    )
  try:
    deadline = time.monotonic() + _START_S
    while not (folder / "syncer.address").exists():
      if process.poll() is not None or time.monotonic() > deadline:
        raise SystemExit((folder / "syncer.log").read_text())
      time.sleep(0.1)
    yield process.pid
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()


class Wire(client.GrpcLearnerWire):
  """The learner's wire, which remembers what the syncer accepted.

  Attributes:
    sent: per fragment the number of copies accepted; version 0 not counted.
  """

  def __init__(self, folder: Path):
    super().__init__(
      address.resolve(f"@{folder / 'syncer.address'}", _START_S),
      credentials.read_token(folder / "run.token"),
    )
    self.sent: dict[int, int] = {}

  def contribute(self, contribution: Contribution, base: Arrays | None) -> str:
    refusal = super().contribute(contribution, base)
    copy = contribution.header.copy
    if not refusal and copy.round > 0:
      self.sent[copy.fragment] = self.sent.get(copy.fragment, 0) + 1
    return refusal


@dataclasses.dataclass
class Learner:
  """A learner that has joined; trains as many steps as it is told to."""

  program: Program
  wire: Wire
  link: Link
  done: loop.Trained
  batches: Batches
  pace: Pace

  def train(
    self,
    count: int,
    train_step: Any = None,
    after_step: Callable[[loop.Trained], None] = lambda _: None,
  ) -> None:
    """`count` more steps of the learner's own loop."""
    goal = self.done.step + count
    loop.train(
      self.link,
      self.done,
      train_step or self.program.step,
      self.batches,
      self.program.mesh,
      self.pace,
      tokens_per_step=self.program.tokens,
      learner_id=0,
      stopping=lambda: self.done.step >= goal,
      after_step=after_step,
    )


@contextlib.contextmanager
def learner(program: Program, folder: Path) -> Iterator[Learner]:
  """Joins the syncer that listens in `folder`; leaves at the end."""
  state, config = program.state(), program.config
  hello = Hello(
    learner_id=0,
    holder="benchmark",
    run_id="",
    tensors=program.task.tensor_specs(),
    contract=contract_lines(config),
  )
  wire = Wire(folder)
  link = Link(wire, state.params, hello)
  state = state._replace(params=link.begin(state.params))
  done = loop.Trained(state=state, schedule_step=0, position=(0, 0))
  pace = Pace(MonotonicClock())
  batches = program.batches()
  try:
    yield Learner(program, wire, link, done, batches, pace)
  finally:
    pace.close()
    link.close()
    batches.close()
