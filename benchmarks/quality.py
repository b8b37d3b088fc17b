"""Is the model as good as one trained tightly coupled?

    python benchmarks/quality.py --quick      (three seeds, about 25 minutes)

For each seed: a real job of four learners (processes over gRPC, H = P = 24,
tau = 2, quorum 1 plus grace, padded so that the exchange fits into tau), and
plain data-parallel training of the same model on the same number of processed
tokens, four learners' batches to a step. Both are evaluated on the same
held-out split, the decoupled one as the syncer's global model. One JSON line:

  data_parallel, decoupled   held-out losses, a seed each
  ratio                      median over seeds of decoupled / data-parallel
                             (<= 1.02)
  ratios                     of every seed
  data_parallel_best, ratio_best, ratios_best
                             the same against data-parallel training with
                             moments of its own as well

The recipe is configs/quality.gin, for both but for the inner rate, which each
has its own. Adam's moments in it are those that suit decoupled training, and
data-parallel training does better with others: hence the second comparison.
All of this comes from quality_sweep.py, on other seeds and on the validation
split.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path

import jobs

ROOT = Path(__file__).resolve().parent
RECIPE = "quality.gin"
LEARNERS = 4
# The best of those tried, from the sweep: of rates, and of rates and moments.
DATA_PARALLEL = ("Optimizer.learning_rate=0.006",)
BEST = (*DATA_PARALLEL, "Optimizer.b1=0.6", "Optimizer.b2=0.95")


def decoupled(seed: int, rounds: int) -> tuple[float, int, dict[str, object]]:
  """(held-out loss, tokens processed, what else to say) of a real job."""
  job = jobs.run(
    f"--learners={LEARNERS}",
    f"--rounds={rounds}",
    f"--seed={seed}",
    "--devices_per_host=1",
    config=RECIPE,
  )
  rounds_said = job.report["rounds"]
  more = {
    "participation": rounds_said["participation"],
    "discarded": job.report["discarded"],
    "wall_s": job.report["wall_s"],
  }
  return job.report["eval_loss"], job.report["tokens_total"], more


def data_parallel(seed: int, tokens: int, bindings: Sequence[str]) -> float:
  """Held-out loss of plain training, in a process of its own."""
  job = ("--data_parallel", str(seed), str(tokens), *bindings)
  done = subprocess.run(
    [sys.executable, __file__, *job],
    capture_output=True,
    text=True,
    env={**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "1"},
    check=True,
  )
  return float(done.stdout.strip())


def train_data_parallel(
  seed: int, tokens: int, bindings: Sequence[str]
) -> float:
  """Four learners' batches to a step, for `tokens` in all."""
  import jax

  from decoupled import config as configs
  from decoupled.data import corpus, pipeline
  from decoupled.launch.language import LanguageTrainer, Program

  recipe = str(ROOT.parent / "configs" / RECIPE)
  config = configs.resolve([recipe], list(bindings))
  text, context = corpus.load(config.corpus), config.corpus.context
  program = Program(config, config.batch.sequences * LEARNERS)
  trainer = LanguageTrainer(
    program, text.train, seed, 0, LEARNERS, shards=LEARNERS
  )
  for k in range(tokens // (program.sequences * context)):
    trainer.step(k + 1, k)
  loss = jax.jit(lambda p, b: program.task.loss(p, b, None)[0])
  batches = pipeline.heldout_batches(text.heldout, context, 32, 32)
  losses = [float(loss(trainer.params, batch)) for batch in batches]
  return sum(losses) / len(losses)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true", help="three seeds")
  parser.add_argument("--rounds", type=int, default=3600)
  parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
  parser.add_argument("--data_parallel", nargs="*", default=None)
  args = parser.parse_args()
  if args.data_parallel:
    seed, tokens, *bindings = args.data_parallel
    print(train_data_parallel(int(seed), int(tokens), bindings))
    return
  seeds = args.seeds if args.quick else [*args.seeds, 3, 4]
  ours, processed, more = [], [], []
  for seed in seeds:
    loss, tokens, said = decoupled(seed, args.rounds)
    ours.append(loss)
    processed.append(tokens)
    more.append(said)
  # one thread each, side by side: their small products gain little from more
  with futures.ThreadPoolExecutor(3) as pool:
    plain, best = (
      list(pool.map(data_parallel, seeds, processed, [bindings] * len(seeds)))
      for bindings in (DATA_PARALLEL, BEST)
    )
  ratios, to_best = (
    [a / b for a, b in zip(ours, theirs, strict=True)]
    for theirs in (plain, best)
  )
  jobs.say(
    {
      "data_parallel": plain,
      "decoupled": ours,
      "ratio": round(jobs.median(ratios), 4),
      "ratios": [round(r, 4) for r in ratios],
      "seeds": seeds,
      "data_parallel_best": best,
      "ratio_best": round(jobs.median(to_best), 4),
      "ratios_best": [round(r, 4) for r in to_best],
      "rounds": args.rounds,
      "jobs": more,
    }
  )


if __name__ == "__main__":
  main()
