"""Where the rates of benchmarks/quality.py come from.

    python benchmarks/quality_sweep.py dp Optimizer.learning_rate=0.004
    python benchmarks/quality_sweep.py diloco Outer.learning_rate=0.4

Each call trains configs/quality.gin with the bindings given, on the in-memory
wire (four jittered learners, the real rounds and links, no processes), on
seeds that quality.py does not use, and prints one JSON line with the loss on
the *validation* split, which neither training nor the final evaluation sees.
Results are appended to benchmarks/results/quality_sweep.jsonl.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("NPROC", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from decoupled import config as configs
from decoupled.data import corpus, pipeline
from decoupled.launch.in_memory import InMemoryJob
from decoupled.launch.language import LanguageTrainer, Program

ROOT = Path(__file__).resolve().parent
RECIPE = str(ROOT.parent / "configs" / "quality.gin")
RESULTS = ROOT / "results" / "quality_sweep.jsonl"
LEARNERS = 4
SEEDS = (101, 102)


def validation_loss(program: Program, params: object, text: object) -> float:
  """Mean loss over about 65 thousand tokens of the validation split."""
  context = program.config.corpus.context
  loss = jax.jit(lambda p, b: program.task.loss(p, b, None)[0])
  batches = pipeline.heldout_batches(text, context, 32, 32)
  values = [float(loss(params, batch)) for batch in batches]
  return sum(values) / len(values)


def data_parallel(config: configs.Config, seed: int, steps: int) -> float:
  """One model, the batches of all four learners in every step."""
  text = corpus.load(config.corpus)
  program = Program(config, config.batch.sequences * LEARNERS)
  trainer = LanguageTrainer(
    program, text.train, seed, 0, LEARNERS, shards=LEARNERS
  )
  for k in range(steps):
    trainer.step(k + 1, k)
  return validation_loss(program, trainer.params, text.validation)


def diloco(config: configs.Config, seed: int, rounds: int) -> float:
  """Four learners, 5 % jitter, the real exchange; the global model's loss."""
  text = corpus.load(config.corpus)
  program = Program(config)
  job = InMemoryJob(config.exchange, config.outer, LEARNERS, rounds)
  for i in range(LEARNERS):
    noise = random.Random(1000 * seed + i)
    job.add(
      i,
      LanguageTrainer(program, text.train, seed, i, LEARNERS),
      lambda _, noise=noise: 1 + 0.05 * noise.uniform(-1, 1),
      tensors=program.task.tensor_specs(),
    )
  job.run()
  params = job.learners[0].trainer.params  # equal to the global model
  return validation_loss(program, params, text.validation)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("arm", choices=("dp", "diloco"))
  parser.add_argument("bindings", nargs="*")
  parser.add_argument("--steps", type=int, default=3600)
  parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
  args = parser.parse_args()
  config = configs.resolve([RECIPE], args.bindings)
  train = data_parallel if args.arm == "dp" else diloco
  RESULTS.parent.mkdir(exist_ok=True)
  for seed in args.seeds:
    began = time.monotonic()
    loss = train(config, seed, args.steps)
    line = json.dumps(
      {
        "arm": args.arm,
        "bindings": args.bindings,
        "seed": seed,
        "steps": args.steps,
        "validation_loss": round(loss, 5),
        "wall_s": round(time.monotonic() - began, 1),
      }
    )
    print(line, flush=True)
    with RESULTS.open("a") as results:
      results.write(line + "\n")


if __name__ == "__main__":
  sys.exit(main())
