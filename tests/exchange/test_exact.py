"""The exact checks of design section 4; `test_replay` has another."""

import numpy as np

from decoupled.algorithm.policy import Exchange, Outer, exchange_lines
from tests.exchange import jobs, toy


def plain(steps: int, seed: int = 100) -> toy.Toy:
  trainer = toy.Toy(seed)
  for k in range(steps):
    trainer.step(k + 1, k)
  return trainer


def test_extracting_and_sending_changes_nothing_bit_for_bit():
  """A quorum that is never reached: nothing merges, everything is sent."""
  made = jobs.job(
    Exchange(H=8, P=8, quorum=2, max_unsynced_steps=0), learners=1, rounds=0
  )
  learner = made.learners[0]
  made.run_until(lambda: learner.step >= 50)
  assert made.rounds.rounds_closed == 0
  assert made.rounds._received  # it did send
  expected = plain(50)
  for name, value in expected.params.items():
    assert (np.asarray(learner.trainer.params[name]) == value).all()


def test_one_learner_in_lock_step_is_plain_training():
  made = jobs.job(
    Exchange(H=8, P=8, tau=0, adopt_step=False),
    learners=1,
    rounds=60,
    outer=Outer(
      learning_rate=1.0, momentum=0.0, merge="average", presence_exponent=0.0
    ),
  )
  made.run(1000)
  learner = made.learners[0]
  assert learner.step > 30
  expected = plain(learner.step)
  for name, value in expected.params.items():
    np.testing.assert_allclose(
      np.asarray(learner.trainer.params[name]), value, rtol=1e-5, atol=1e-6
    )
  assert made.rounds.accounts.discarded == {}


def test_the_contract_spells_the_exchange():
  from decoupled.algorithm.policy import exchange_of

  policy = Exchange(H=16, P=4, tau=3, codec="bfloat16", adoption="carry")
  assert exchange_of(dict(exchange_lines(policy))) == policy
