"""In-memory jobs of toy learners, and what is true of every one that ended."""

import itertools
import random
from collections.abc import Callable
from typing import Any

from decoupled.algorithm.policy import Exchange, Outer
from decoupled.launch.in_memory import InMemoryJob, SimulatedLearner
from tests.exchange import toy


def jittered(seed: int, mean: float = 1.0, share: float = 0.05) -> Any:
  draw = random.Random(seed)
  return lambda _step: mean * (1 + share * draw.uniform(-1, 1))


def job(
  exchange: Exchange | None = None,
  learners: int = 3,
  rounds: int = 120,
  outer: Outer | None = None,
  step_s: Callable[[int], Any] = jittered,
  trainer: Callable[[int], Any] | None = None,
  **options: Any,
) -> InMemoryJob:
  """Toy learners whose starts are staggered; nothing has run yet."""
  times = {"latency_s": 0.005, "transfer_s": 0.02, "merge_s": 0.01}
  made = InMemoryJob(
    exchange or Exchange(),
    outer or Outer(),
    learners,
    rounds,
    **{**times, **options},
  )
  for i in range(learners):
    trained = None if trainer is None else trainer(i)
    add(made, i, step_s(i), delay_s=0.3 * i, trainer=trained)
  return made


def add(
  made: InMemoryJob,
  learner_id: int,
  step_s: Any = 1.0,
  delay_s: float = 0.0,
  init_seed: int = 0,
  trainer: Any = None,
  data: Any = None,
) -> SimulatedLearner:
  return made.add(
    learner_id,
    trainer or toy.Toy(100 + learner_id, init_seed=init_seed),
    step_s,
    roles=toy.roles,
    stacked=toy.STACKED,
    delay_s=delay_s,
    data=data,
  )


def counted(made: InMemoryJob) -> list[dict[str, Any]]:
  return [e for e in made.events.of("round") if e["counted"]]


def merged_by(made: InMemoryJob, learner_id: int) -> list[dict[str, Any]]:
  return [e for e in counted(made) if learner_id in e["participants"]]


def cadence(made: InMemoryJob, learner_id: int) -> list[float]:
  """Times between the ends of a learner's steps."""
  ends = [
    end
    for event in made.events.of("steps")
    if event["learner"] == learner_id
    for end in event["ends"]
  ]
  return [b - a for a, b in itertools.pairwise(ends)]


def check_ended(made: InMemoryJob) -> None:
  """What holds at the end of every job, whatever happened on the way."""
  assert made.rounds.ended
  published = {
    f"{unit.tensor}.{unit.layer}": array
    for units, fragment in zip(
      made.rounds.model.manifest.fragments,
      made.rounds.model.fragments,
      strict=True,
    )
    for unit, array in zip(units, fragment.published, strict=True)
  }
  alive = [x for x in made.learners.values() if x.link is not None]
  for learner in alive:
    assert learner.link.done
    if learner.link._over:
      continue  # it was away when the run ended, and was told so
    held = toy.learner_params(learner.trainer.params, made)
    for name, array in published.items():
      assert (held[name] == array).all(), (learner.learner_id, name)
  written: dict[int, tuple[int, int]] = {}
  for event in made.events.of("round"):
    version = (event["term"], event["round"])
    assert version > written.get(event["fragment"], (0, 0))
    written[event["fragment"]] = version
