"""What a learner that was away for long does to the run when it is back.

    python benchmarks/absence.py                    (about half an hour)

Four learners on the in-memory wire (the real rounds and links, no processes),
configs/quality.gin with H = P = 8. After a warm-up one of them is cut off for
1, 10 and 100 x H of its steps, trains on alone, and comes back. The loss is
that of the syncer's global model on the validation split, after every
`--every`-th round, against the same job without the absence. One JSON line for
each absence:

  loss_before_return   last loss with the learner away
  peak_after_return    highest loss within 4 x H rounds after it was back
  undisturbed          loss of the other job at the round of that peak
  rounds_until_back    rounds from the return until the loss is within 0.5 % of
                       the undisturbed job's; null: not within 8 x H rounds
  alone_steps          inner steps that it did while it was away
  discarded_absence    tokens discarded on its return, and as a share of those
                       (max_unsynced_steps = 50 x H pauses it)
"""

import argparse
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("NPROC", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jobs

from decoupled import config as configs
from decoupled.data import corpus, pipeline
from decoupled.launch.in_memory import InMemoryJob
from decoupled.launch.language import LanguageTrainer, Program
from decoupled.link import tree
from decoupled.syncer import snapshots

RECIPE = str(Path(__file__).resolve().parent.parent / "configs" / "quality.gin")
LEARNERS = 4
AWAY = 1
WITHIN = 1.005


class Curve(NamedTuple):
  """A job's validation loss by round, and what became of the absent one."""

  losses: dict[int, float]
  returned: int
  alone_steps: int
  discarded: float


class Validation:
  """Loss of the global model on some validation batches."""

  def __init__(self, program: Program, text: Any, batches: int):
    context = program.config.corpus.context
    self._batches = list(pipeline.heldout_batches(text, context, 32, batches))
    self._loss = jax.jit(lambda p, b: program.task.loss(p, b, None)[0])

  def __call__(self, job: InMemoryJob) -> float:
    params = job.learners[0].trainer.params
    whole = snapshots.cut(job.rounds)().tensors()
    leaves = [
      whole.get(name, leaf)
      for name, leaf in zip(
        tree.names(params), jax.tree.leaves(params), strict=True
      )
    ]
    model = jax.tree.unflatten(jax.tree.structure(params), leaves)
    losses = [float(self._loss(model, batch)) for batch in self._batches]
    return sum(losses) / len(losses)


def curve(
  program: Program,
  text: Any,
  validation: Validation,
  absence: int,
  warm: int,
  rounds: int,
  every: int,
  seed: int,
) -> Curve:
  """Trains `rounds` rounds; one learner is away for `absence` seconds."""
  config = program.config
  job = InMemoryJob(config.exchange, config.outer, LEARNERS, rounds)
  for i in range(LEARNERS):
    noise = random.Random(1000 * seed + i)
    job.add(
      i,
      LanguageTrainer(program, text.train, seed, i, LEARNERS),
      lambda _, noise=noise: 1 + 0.05 * noise.uniform(-1, 1),
      tensors=program.task.tensor_specs(),
    )
  away, losses = job.learners[AWAY], {}
  cut = returned = alone = 0

  def closed(number: int) -> Callable[[], bool]:
    return lambda: job.rounds.rounds_closed >= number

  def is_back() -> bool:
    return away.link.welcome.incarnation > 1

  for number in range(every, rounds, every):
    reached = closed(number)
    if cut and not returned:
      job.run_until(lambda reached=reached: reached() or is_back())
      if is_back():
        returned, alone = job.rounds.rounds_closed, away.step - alone
    job.run_until(reached)
    losses[job.rounds.rounds_closed] = validation(job)
    if absence and not cut and number >= warm:
      cut, alone = number, away.step
      away.wire.partition()
      job.network.after(absence, away.wire.heal)
  job.run()
  lost = job.rounds.accounts.discarded.get("absence", 0.0)
  return Curve(losses, returned, alone, lost)


def line(
  absence: int, H: int, found: Curve, plain: Curve, tokens: int
) -> dict[str, Any]:
  """One line of the output."""
  before = [n for n in found.losses if n < found.returned]
  after = {
    n: loss
    for n, loss in found.losses.items()
    if found.returned <= n <= found.returned + 4 * H
  }
  peak = max(after, key=after.__getitem__)
  nearest = {
    n: min(plain.losses, key=lambda m, n=n: abs(m - n)) for n in found.losses
  }
  back = [
    n - found.returned
    for n, loss in found.losses.items()
    if found.returned <= n <= found.returned + 8 * H
    and loss <= WITHIN * plain.losses[nearest[n]]
  ]
  alone = found.alone_steps * tokens
  return {
    "absence_in_H": absence,
    "H": H,
    "loss_before_return": round(found.losses[before[-1]], 4),
    "peak_after_return": round(after[peak], 4),
    "undisturbed": round(plain.losses[nearest[peak]], 4),
    "rounds_until_back": min(back, default=None),
    "alone_steps": found.alone_steps,
    "discarded_absence": round(found.discarded),
    "discarded_over_alone": round(found.discarded / max(1, alone), 3),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--smoke", action="store_true", help="seconds, no result")
  parser.add_argument("--absences", type=int, nargs="*", default=[1, 10, 100])
  parser.add_argument("--seed", type=int, default=101)
  parser.add_argument("--every", type=int, default=4)
  args = parser.parse_args()
  H, warm, batches, absences = 8, 400, 16, args.absences
  bindings = [f"Exchange.H={H}", f"Exchange.P={H}"]
  if args.smoke:
    warm, batches, absences = 16, 1, [1]
    bindings += ["Transformer.width=32", "Transformer.mlp_width=32"]
    bindings += ["Corpus.max_bytes=1000000"]
  config = configs.resolve([RECIPE], bindings)
  text = corpus.load(config.corpus)
  program = Program(config)
  validation = Validation(program, text.validation, batches)
  tokens = config.batch.sequences * config.corpus.context
  rounds = warm + (max(absences) + 12) * H
  plain = curve(
    program, text, validation, 0, warm, rounds, args.every, args.seed
  )
  for absence in absences:
    found = curve(
      program,
      text,
      validation,
      absence * H,
      warm,
      warm + (absence + 12) * H,
      args.every,
      args.seed,
    )
    jobs.say(line(absence, H, found, plain, tokens))


if __name__ == "__main__":
  main()
