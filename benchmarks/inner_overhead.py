"""What does exchanging a fragment every step cost the inner loop?

    python benchmarks/inner_overhead.py              (about 6 minutes)

One process trains the same compiled, unpadded step (one XLA thread, one
device) in interleaved segments of 100 steps: as a bare jitted loop that
dispatches the next step before it reads the last loss, and as the learner's
own loop with a live syncer (a process of its own) and H = P, so that a
fragment leaves and one comes back in every step. Both take their batches from
the same pipeline. Total times of paired segments are divided; one JSON line:

  ratio            median over the pairs of learner / bare   (<= 1.02 ...)
  step_s           of the bare loop, median over the pairs   (... at >= 0.05)
  rounds_per_step  rounds that really went through in the timed segments
  cpu_ratio        the same ratio of this process's CPU time, all threads: the
                   work that went to other cores, and little moved by noise
  syncer_cpu_s     CPU time of the syncer per step of the learner

After each bare segment the learner's loop runs some untimed steps, since the
syncer takes the silence before them for a slow step and opens rounds late.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jobs
import live

# isort: split
import jax
import numpy as np

from decoupled import config as configs
from decoupled.learner import mesh as meshes
from decoupled.learner import step as steps

BINDINGS = ("Exchange.H=24", "Exchange.P=24", "Exchange.quorum=1")
SETTLE_STEPS = 30


class Segment(NamedTuple):
  """What a number of steps took, in seconds; rounds adopted meanwhile."""

  wall_s: float
  cpu_s: float
  syncer_s: float
  rounds: int


def bare(learner: live.Learner, count: int) -> None:
  """`count` steps of a plain loop on the learner's state and batches."""
  program, batches = learner.program, learner.batches
  everywhere = meshes.replicated(program.mesh)

  def scalar(value: int) -> jax.Array:
    return jax.device_put(np.int32(value), everywhere)

  zero, last = scalar(0), None
  state, schedule_step = learner.done.state, learner.done.schedule_step
  batch = steps.put_batch(next(batches).rows, program.mesh)
  for k in range(count):
    state, metrics = program.step(
      state, batch, scalar(schedule_step + k), scalar(k), zero
    )
    batch = steps.put_batch(next(batches).rows, program.mesh)
    if last is not None:
      float(last)
    last = metrics["loss"]
  float(last)
  learner.done.state = state


def segment(run, learner: live.Learner, count: int, syncer: int) -> Segment:
  """Times `run(count)`."""
  rounds, syncer_s = learner.link.common_step, jobs.cpu_s(syncer)
  cpu_s, began = time.process_time(), time.monotonic()
  run(count)
  wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu_s
  return Segment(
    wall_s,
    cpu_s,
    jobs.cpu_s(syncer) - syncer_s,
    learner.link.common_step - rounds,
  )


def measure(learner: live.Learner, args, syncer: int):
  """Pairs (bare, learner), the one that begins alternating."""
  plain = lambda: segment(  # noqa: E731
    lambda n: bare(learner, n), learner, args.steps, syncer
  )

  def exchanging() -> Segment:
    learner.train(args.settle)
    return segment(learner.train, learner, args.steps, syncer)

  plain()
  exchanging()
  pairs = []
  for pair in range(args.pairs):
    if pair % 2:
      second, first = exchanging(), plain()
    else:
      first, second = plain(), exchanging()
    pairs.append((first, second))
  return pairs


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--pairs", type=int, default=9)
  parser.add_argument("--steps", type=int, default=100)
  parser.add_argument("--settle", type=int, default=SETTLE_STEPS)
  parser.add_argument("--sequences", type=int, default=64)
  parser.add_argument("--smoke", action="store_true", help="seconds, no result")
  args = parser.parse_args()
  if args.smoke:
    args.pairs, args.steps, args.settle, args.sequences = 1, 40, 40, 8
  bindings = [*BINDINGS, f"Batch.sequences={args.sequences}"]
  program = live.compiled(configs.resolve([], bindings))
  with tempfile.TemporaryDirectory(prefix="decoupled-bench-") as name:
    folder = Path(name)
    with (
      live.syncer(folder, bindings) as syncer,
      live.learner(program, folder) as learner,
    ):
      pairs = measure(learner, args, syncer)
  steps_timed = args.pairs * args.steps
  ratios = [b.wall_s / a.wall_s for a, b in pairs]
  jobs.say(
    {
      "ratio": round(jobs.median(ratios), 4),
      "ratios": [round(r, 4) for r in ratios],
      "step_s": round(
        jobs.median([a.wall_s for a, _ in pairs]) / args.steps, 5
      ),
      "rounds_per_step": round(
        sum(b.rounds for _, b in pairs) / steps_timed, 3
      ),
      "cpu_ratio": round(jobs.median([b.cpu_s / a.cpu_s for a, b in pairs]), 4),
      "syncer_cpu_s": round(sum(b.syncer_s for _, b in pairs) / steps_timed, 5),
      "pairs": args.pairs,
      "steps": args.steps,
      "padded_s": 0.0,
    }
  )


if __name__ == "__main__":
  main()
