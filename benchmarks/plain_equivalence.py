"""Is a learner that exchanges still a plain training? Two exact checks.

    python benchmarks/plain_equivalence.py           (about a minute)

A language model (float32 compute), 200 steps with warm-up, on the in-memory
wire, against the same step called in a plain loop. One JSON line:

  bit_identical_without_merges   every fragment extracted and sent, but the
                                 quorum (2) is never reached: losses of all
                                 steps and all parameters equal, bit for bit
  max_rel_loss_diff_with_merges  one learner, tau = 0, eta = 1, mu = 0, average,
                                 float32 wire: largest relative difference of a
                                 step's loss                      (<= 1e-4)
"""

import argparse
import json
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from decoupled import config as configs
from decoupled.algorithm.policy import Exchange, Outer
from decoupled.data import corpus
from decoupled.launch.in_memory import InMemoryJob
from decoupled.launch.language import LanguageTrainer, Program


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--steps", type=int, default=200)
  args = parser.parse_args()
  config = configs.resolve([], ["Schedule.warmup_steps=50"])
  text = corpus.load(config.corpus).train
  program = Program(config)

  def trainer() -> LanguageTrainer:
    return LanguageTrainer(program, text, seed=7)

  plain = trainer()
  losses = [plain.step(k + 1, k)[1] for k in range(args.steps)]

  def exchanged(exchange: Exchange, outer: Outer) -> tuple[list[float], int]:
    job = InMemoryJob(exchange, outer, learners=1, rounds=0)
    trained = trainer()
    learner = job.add(0, trained, 1.0, tensors=program.task.tensor_specs())
    job.run_until(lambda: learner.step >= args.steps)
    copies.append(trained.params)
    return learner.losses[: args.steps], job.rounds.rounds_closed

  copies: list[object] = []
  alone, closed = exchanged(Exchange(quorum=2, max_unsynced_steps=0), Outer())
  assert closed == 0
  same = alone == losses and all(
    np.array_equal(np.asarray(a), np.asarray(b))
    for a, b in zip(
      jax.tree.leaves(copies[0]), jax.tree.leaves(plain.params), strict=True
    )
  )
  merged, closed = exchanged(
    Exchange(tau=0, adopt_step=False),
    Outer(
      learning_rate=1.0, momentum=0.0, merge="average", presence_exponent=0.0
    ),
  )
  assert closed > args.steps // 2
  apart = max(abs(a - b) / abs(b) for a, b in zip(merged, losses, strict=True))
  print(
    json.dumps(
      {
        "bit_identical_without_merges": same,
        "max_rel_loss_diff_with_merges": apart,
        "steps": args.steps,
        "rounds": closed,
        "wire": "in memory",
      }
    )
  )


if __name__ == "__main__":
  main()
