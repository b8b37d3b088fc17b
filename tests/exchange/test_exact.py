"""The exact checks of design section 4, and replay to the bit."""

import numpy as np
import pytest

from decoupled.algorithm.policy import Exchange, Outer, exchange_lines
from decoupled.errors import ConfigError
from decoupled.syncer import tape
from decoupled.syncer.model import GlobalModel
from decoupled.types import Version
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


def test_a_recording_replays_to_the_same_bits(tmp_path):
  exchange, outer = Exchange(H=8, P=8), Outer()
  made = jobs.job(
    exchange, learners=3, rounds=40, outer=outer, tape=tape.Tape(tmp_path)
  )
  # version 0 is where the replay starts from
  made.run_until(lambda: made.rounds.model is not None)
  made.run_until(lambda: made.rounds.has_history)
  start = [made.rounds.model.get(p).arrays for p in range(8)]
  made.run(1000)
  again = GlobalModel(made.rounds.manifest, exchange, outer)
  for p, arrays in enumerate(start):
    again.start(p, Version(1, 0), arrays, 0)
  replayed = tape.replay(tmp_path, again)
  assert replayed == 40 + 8
  for p in range(8):
    ours, theirs = again.get(p), made.rounds.model.get(p)
    assert ours.version == theirs.version
    for a, b in zip(ours.arrays, theirs.arrays, strict=True):
      assert a.tobytes() == b.tobytes()


def test_a_recording_is_refused_by_a_model_that_stands_elsewhere(tmp_path):
  exchange, outer = Exchange(H=8, P=8), Outer()
  made = jobs.job(
    exchange, learners=2, rounds=12, outer=outer, tape=tape.Tape(tmp_path)
  )
  made.run(1000)
  again = GlobalModel(made.rounds.manifest, exchange, outer)
  for p in range(8):
    again.start(p, Version(1, 3), made.rounds.model.get(p).arrays, 0)
  with pytest.raises(ConfigError, match="stands at"):
    tape.replay(tmp_path, again)


def test_a_second_recording_does_not_write_over_the_first(tmp_path):
  for term in (1, 2):
    made = jobs.job(
      Exchange(H=8, P=8), learners=1, rounds=8, tape=tape.Tape(tmp_path)
    )
    made.rounds.term = term
    made.run(1000)
  assert len(list(tmp_path.glob("*.npz"))) == 2 * (8 + 8)


def test_a_full_tape_stops_recording_and_says_so(tmp_path, caplog):
  made = jobs.job(
    Exchange(H=8, P=8),
    learners=2,
    rounds=16,
    tape=tape.Tape(tmp_path, limit_bytes=4000),
  )
  made.run(1000)
  jobs.check_ended(made)
  files = list(tmp_path.glob("*.npz"))
  assert 0 < len(files) < 16
  assert sum(f.stat().st_size for f in files) <= 4000
  assert "full" in caplog.text


def test_the_contract_spells_the_exchange():
  from decoupled.algorithm.policy import exchange_of

  policy = Exchange(H=16, P=4, tau=3, codec="bfloat16", adoption="carry")
  assert exchange_of(dict(exchange_lines(policy))) == policy
