"""Is a learner that exchanges still a plain training? Two exact checks.

    python benchmarks/plain_equivalence.py           (about a minute)

A language model (float32 compute), 200 steps with warm-up: the learner's own
loop, exchanging over gRPC with a syncer in a process of its own, against the
same compiled step called in a plain loop. One JSON line:

  bit_identical_without_merges   every fragment is extracted and sent, but the
                                 quorum (2) is never reached: losses of all
                                 steps and all parameters equal, bit for bit
  max_rel_loss_diff_with_merges  one learner, tau = 0, eta = 1, mu = 0, average,
                                 float32 wire: largest relative difference of a
                                 step's loss                      (<= 1e-4)

  fragments_sent   of the first check: fragments that the syncer accepted
  rounds           of the second check: rounds that were merged and adopted
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jobs
import live

# isort: split
import jax
import numpy as np

from decoupled import config as configs
from decoupled.learner import mesh as meshes
from decoupled.learner import step as steps

COMMON = (
  "Transformer.compute_dtype='float32'",
  "Schedule.warmup_steps=50",
  "Exchange.codec='float32'",
)
# tau = H: all fragments' rounds may be open at once, so that all are sent
NO_MERGES = (
  *COMMON,
  "Exchange.quorum=2",
  "Exchange.tau=24",
  "Exchange.max_unsynced_steps=0",
  "Limits.heartbeat_s=0.5",
  "Limits.lease_s=2.5",
  "Limits.start_s=3.0",  # the second learner never comes
)
MERGES = (
  *COMMON,
  "Exchange.tau=0",
  "Exchange.adopt_step=False",
  "Outer.learning_rate=1.0",
  "Outer.momentum=0.0",
  "Outer.merge='average'",
  "Outer.presence_exponent=0.0",
)


class Result(NamedTuple):
  """A training: loss of each step, final parameters."""

  losses: list[float]
  params: list[np.ndarray]
  sent: dict[int, int]
  rounds: int


class Recorded:
  """The inner step, keeping its losses."""

  def __init__(self, step: Any):
    self._step = step
    self._losses: list[jax.Array] = []

  def __call__(self, *args: Any) -> Any:
    state, metrics = self._step(*args)
    self._losses.append(metrics["loss"])
    return state, metrics

  def result(self, params: Any, sent: dict[int, int], rounds: int) -> Result:
    losses = [float(loss) for loss in self._losses]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    return Result(losses, leaves, sent, rounds)


def plain(program: live.Program, count: int) -> Result:
  """`count` steps without any exchange."""
  step, state = Recorded(program.step), program.state()
  everywhere = meshes.replicated(program.mesh)

  def scalar(value: int) -> jax.Array:
    return jax.device_put(np.int32(value), everywhere)

  with program.batches() as batches:
    for k in range(count):
      batch = steps.put_batch(next(batches).rows, program.mesh)
      state, _ = step(state, batch, scalar(k), scalar(k), scalar(0))
  return step.result(state.params, {}, 0)


def exchanged(
  bindings: tuple[str, ...], program: live.Program, learners: int, count: int
) -> Result:
  """The same steps in the learner's loop, with a live syncer."""
  config = configs.resolve([], list(bindings))
  step = Recorded(program.step)
  with tempfile.TemporaryDirectory(prefix="decoupled-bench-") as name:
    folder = Path(name)
    with (
      live.syncer(folder, list(bindings), learners),
      live.learner(program._replace(config=config), folder) as learner,
    ):
      learner.train(count, step)
      params = learner.done.state.params
      rounds = sum(version.round > 0 for version in learner.link.versions)
      rounds = max(rounds, max(v.round for v in learner.link.versions))
      return step.result(params, learner.wire.sent, rounds)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--steps", type=int, default=200)
  parser.add_argument("--smoke", action="store_true", help="seconds, no result")
  args = parser.parse_args()
  count = 40 if args.smoke else args.steps
  program = live.compiled(configs.resolve([], list(COMMON)))
  expected = plain(program, count)
  alone = exchanged(NO_MERGES, program, 2, count)
  merged = exchanged(MERGES, program, 1, count)
  if alone.rounds or not merged.rounds:
    raise SystemExit(f"{alone.rounds} and {merged.rounds} rounds were merged")
  same = alone.losses == expected.losses and all(
    np.array_equal(a, b)
    for a, b in zip(alone.params, expected.params, strict=True)
  )
  apart = max(
    abs(a - b) / abs(b)
    for a, b in zip(merged.losses, expected.losses, strict=True)
  )
  jobs.say(
    {
      "bit_identical_without_merges": same,
      "max_rel_loss_diff_with_merges": apart,
      "steps": count,
      "fragments_sent": len(alone.sent),
      "rounds": merged.rounds,
      "final_loss": expected.losses[-1],
      "wire": "grpc",
    }
  )


if __name__ == "__main__":
  main()
