"""What does exchanging a fragment every step cost the inner loop?

    python benchmarks/inner_overhead.py              (about 3 minutes)

One process trains the same compiled, unpadded step (one XLA thread, one
device) in interleaved segments of 100 steps: as a bare jitted loop that
dispatches the next step before it reads the last loss, and as the learner's
own loop with a live syncer (a process of its own) and H = P, so that a
fragment leaves and one comes back in every step. Total times of paired
segments are divided; prints one JSON line with the median over the pairs:

  ratio            learner / bare                     (<= 1.02 at >= 50 ms)
  step_s           of the bare loop
  rounds_per_step  how many fragments really went through, per learner step
"""

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["NPROC"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import jax
import jobs
import numpy as np

from decoupled import config as configs
from decoupled.clock import MonotonicClock
from decoupled.config import contract_lines
from decoupled.data import corpus
from decoupled.data.pipeline import Batches, batch_spec
from decoupled.learner import loop
from decoupled.learner import mesh as meshes
from decoupled.learner import step as steps
from decoupled.learner.optimizer import make_optimizer
from decoupled.learner.pace import Pace
from decoupled.link.link import Link
from decoupled.models.task import LanguageModel
from decoupled.types import Hello
from decoupled.wire import address, client, credentials

BINDINGS = ("Exchange.H=24", "Exchange.P=24", "Exchange.quorum=1")


@dataclasses.dataclass
class Bench:
  """Everything both loops share."""

  link: Link
  done: loop.Trained
  train_step: Any
  batches: Batches
  mesh: jax.sharding.Mesh
  pace: Pace
  tokens: int

  def bare(self, count: int) -> float:
    """Seconds of `count` steps of a plain loop."""
    everywhere = meshes.replicated(self.mesh)

    def scalar(value: int) -> jax.Array:
      return jax.device_put(np.int32(value), everywhere)

    learner = scalar(0)
    state, last = self.done.state, None
    batch = steps.put_batch(next(self.batches).rows, self.mesh)
    began = time.monotonic()
    for k in range(count):
      state, metrics = self.train_step(
        state, batch, scalar(k), scalar(k), learner
      )
      batch = steps.put_batch(next(self.batches).rows, self.mesh)
      if last is not None:
        float(last)
      last = metrics["loss"]
    float(last)
    took = time.monotonic() - began
    self.done.state = state
    return took

  def learner(self, count: int) -> float:
    """Seconds of `count` steps of the learner's loop."""
    goal = self.done.step + count
    began = time.monotonic()
    loop.train(
      self.link,
      self.done,
      self.train_step,
      self.batches,
      self.mesh,
      self.pace,
      tokens_per_step=self.tokens,
      learner_id=0,
      stopping=lambda: self.done.step >= goal,
    )
    return time.monotonic() - began


def bench(config: configs.Config, folder: Path) -> Bench:
  """Compiles, joins the syncer that listens in `folder`, is ready to step."""
  mesh = meshes.make_mesh(config.mesh, jax.devices()[:1])
  text = corpus.load(config.corpus)
  task = LanguageModel(config.transformer)
  optimizer = make_optimizer(config.optimizer, task.tensor_specs())
  train_step = steps.compile_train_step(
    steps.make_train_step(
      task, optimizer, config.optimizer, config.schedule, mesh
    ),
    steps.state_specs(task, optimizer, mesh),
    batch_spec(config.corpus.context, config.batch.sequences),
    mesh,
  )
  state = steps.make_init(task, optimizer, mesh)(np.uint32(0))
  hello = Hello(
    learner_id=0,
    holder="bench",
    run_id="",
    tensors=task.tensor_specs(),
    contract=contract_lines(config),
  )
  wire = client.GrpcLearnerWire(
    address.published_address(folder / "syncer.address"),
    credentials.read_token(folder / "run.token"),
  )
  link = Link(wire, state.params, hello)
  state = state._replace(params=link.begin(state.params))
  batches = Batches(text.train, config.corpus.context, config.batch.sequences)
  done = loop.Trained(state=state, schedule_step=0, position=(0, 0))
  tokens = config.corpus.context * config.batch.sequences
  pace = Pace(MonotonicClock())
  return Bench(link, done, train_step, batches, mesh, pace, tokens)


def syncer(folder: Path, bindings: list[str]) -> Iterator[None]:
  """A live syncer in a process of its own."""
  with (folder / "syncer.log").open("wb") as log:
    process = subprocess.Popen(
      [
        *(sys.executable, "-m", "decoupled.cli", "syncer", *bindings),
        *(f"--workdir={folder}", "--rounds=10000000", "--learners=1"),
      ],
      stdout=log,
      stderr=log,
    )
  try:
    deadline = time.monotonic() + 60
    while not (folder / "syncer.address").exists():
      if process.poll() is not None or time.monotonic() > deadline:
        raise SystemExit((folder / "syncer.log").read_text())
      time.sleep(0.1)
    yield
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--pairs", type=int, default=9)
  parser.add_argument("--steps", type=int, default=100)
  parser.add_argument("--sequences", type=int, default=28)
  args = parser.parse_args()
  bindings = [*BINDINGS, f"Batch.sequences={args.sequences}"]
  config = configs.resolve([], bindings)
  with tempfile.TemporaryDirectory(prefix="decoupled-bench-") as name:
    folder = Path(name)
    for _ in syncer(folder, bindings):
      both = bench(config, folder)
      both.bare(5)
      both.learner(5 + args.steps // 5)
      ratios, bare_s = [], []
      before = both.link.common_step
      for pair in range(args.pairs):
        if pair % 2:
          learner_s, plain_s = both.learner(args.steps), both.bare(args.steps)
        else:
          plain_s, learner_s = both.bare(args.steps), both.learner(args.steps)
        ratios.append(learner_s / plain_s)
        bare_s.append(plain_s / args.steps)
      rounds = both.link.common_step - before
      both.link.close()
      both.batches.close()
  jobs.say(
    {
      "ratio": round(jobs.median(ratios), 4),
      "ratios": [round(r, 4) for r in ratios],
      "step_s": round(jobs.median(bare_s), 5),
      "rounds_per_step": round(rounds / (args.pairs * args.steps), 3),
      "pairs": args.pairs,
      "steps": args.steps,
    }
  )


if __name__ == "__main__":
  main()
