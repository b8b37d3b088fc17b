"""No step is lost or counted twice where `carry` promises to keep it.

Learners here only count: each step adds 1 to every parameter, so that a value
says how many steps are in it. With eta = 1, mu = 0 and the average, a sole
learner that carries its overlap must hold exactly its number of steps.
"""

import numpy as np
import pytest

from decoupled.algorithm.policy import Exchange, Outer
from tests.exchange import jobs, storms, toy

PLAIN = Outer(
  learning_rate=1.0, momentum=0.0, merge="average", presence_exponent=0.0
)
CARRY = Exchange(H=8, P=8, adoption="carry")


def counting(learners, rounds, exchange=CARRY, **options):
  return jobs.job(
    exchange,
    learners,
    rounds,
    outer=PLAIN,
    trainer=lambda _: toy.Counter(),
    **options,
  )


def values(learner):
  params = learner.trainer.params
  return np.concatenate(
    [np.ravel(params[name]) for name in ("embed", "layers", "out")]
  )


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
@pytest.mark.parametrize("transfer_s", [0.02, 1.4])
def test_a_sole_learner_keeps_every_step(codec, transfer_s):
  exchange = Exchange(H=8, P=8, adoption="carry", codec=codec)
  made = counting(1, 60, exchange, transfer_s=transfer_s)
  made.run(1000)
  jobs.check_ended(made)
  [learner] = made.learners.values()
  assert learner.step >= 58
  assert (values(learner) == learner.step).all()


@pytest.mark.parametrize("seed", range(4))
def test_repeated_and_late_messages_count_no_step_twice(seed):
  made = counting(1, 80, fault=storms.Storm(seed, 0.0, 0.3, 0.5))
  made.run(1000)
  jobs.check_ended(made)
  [learner] = made.learners.values()
  assert (values(learner) == learner.step).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("adoption", ["overwrite", "carry", "blend"])
def test_no_storm_puts_a_step_in_twice(adoption, seed):
  """Only learner 1 makes progress: nobody may ever hold more than its steps.

  It loses its connection on the way, while merges are running.
  """
  made = jobs.job(
    Exchange(H=8, P=8, adoption=adoption),
    3,
    60,
    outer=PLAIN,
    trainer=lambda i: toy.Counter(amount=int(i == 1)),
    fault=storms.Storm(seed, 0.15, 0.2, 0.3),
    merge_s=0.4,
  )
  made.run_until(lambda: made.rounds.rounds_closed >= 20)
  made.learners[1].wire.partition()
  made.network.after(4.0, made.learners[1].wire.heal)
  made.run(3000)
  jobs.check_ended(made)
  for learner in made.learners.values():
    assert values(learner).max() <= made.learners[1].step + 1e-3


def test_a_copy_merged_for_a_lost_connection_is_not_carried_on_again():
  """The merge included the copy of an incarnation that has since ended."""
  made = counting(1, 60, merge_s=0.5)
  learner = made.learners[0]
  open_ = made.rounds._open
  made.run_until(
    lambda: (
      made.rounds.rounds_closed >= 20 and any(r.merging for r in open_.values())
    )
  )
  learner.wire.partition()
  learner.wire.heal()
  made.run_until(lambda: made.rounds.rounds_closed >= 40)
  assert learner.link.welcome.incarnation == 2
  assert values(learner).max() <= learner.step
  made.run(1000)
  jobs.check_ended(made)
  assert values(learner).max() <= learner.step
