"""A learner that was away: what it did alone is merged or lost, once."""

import pytest

from decoupled.algorithm.policy import Exchange
from tests.exchange import jobs
from tests.exchange.outages import saving, syncer_dies, syncer_returns
from tests.exchange.test_accounts import (
  ADOPTIONS,
  balance,
  causes,
  check_balanced,
)

H = 8
TOKENS = 100  # of a step


def away(adoption, seconds, learners=3, rounds=0, **options):
  """One learner of three is cut off for so long; (job, its step then, back)."""
  exchange = Exchange(H=H, P=H, adoption=adoption)
  made = jobs.job(exchange, learners, rounds or 60 + int(seconds), **options)
  made.run_until(lambda: made.rounds.rounds_closed >= 20)
  learner = made.learners[1]
  at, step = made.clock.now(), learner.step
  learner.wire.partition()
  made.network.after(seconds, learner.wire.heal)
  made.run_until(lambda: made.clock.now() > at + seconds)
  made.run_until(lambda: learner.link.welcome.incarnation > 1)
  return made, step, learner.step


@pytest.mark.parametrize("adoption", ADOPTIONS)
@pytest.mark.parametrize("absence", [1, 10, 100])
def test_what_it_did_alone_is_lost_and_counted_once(adoption, absence):
  made, cut, back = away(adoption, absence * H)
  joined = len(made.events.events)
  made.run(3000)
  jobs.check_ended(made)
  check_balanced(made)
  alone = (back - cut) * TOKENS
  if absence == 100:
    # it has paused meanwhile: max_unsynced_steps is 50 H
    assert 49 * H <= back - cut <= 51 * H + 1
  else:
    assert back - cut >= 0.9 * absence * H
  lost = balance(made)[1][2]
  if absence > 1 or adoption != "carry":
    # and what it had not merged when it was cut off, less than a cycle
    assert 0.9 * alone <= lost["absence"] <= alone + 1.5 * H * TOKENS
  assert lost["failure"] == pytest.approx(0)
  # nothing stale: what is merged from now on was done since
  after = [
    e
    for e in made.events.events[joined:]
    if e["kind"] == "round" and "1" in e["tokens"]
  ]
  assert after
  for event in after:
    since = made.learners[1].step - back
    assert event["steps"]["1"] <= min(since, 3 * H)
  assert made.rounds.refused.get("base", 0) == 0


def test_where_nobody_merged_meanwhile_its_work_is_the_runs():
  """Alone with its syncer: the base it left is the base it finds."""
  sole = jobs.job(Exchange(H=H, P=H), 1, 80)
  sole.run_until(lambda: sole.rounds.rounds_closed >= 20)
  sole.learners[0].wire.partition()
  sole.network.after(3 * H, sole.learners[0].wire.heal)
  sole.run(3000)
  jobs.check_ended(sole)
  check_balanced(sole)
  lost = balance(sole)[0][2]
  assert lost["absence"] <= 4 * TOKENS  # versions that were on their way
  assert lost["failure"] == pytest.approx(0)


def test_again_and_again():
  made, *_ = away("overwrite", 2 * H, rounds=200)
  for k in range(3):
    wire = made.learners[1].wire
    made.run_until(lambda k=k: made.rounds.rounds_closed >= 60 + 40 * k)
    wire.partition()
    made.network.after(1.5 * H, wire.heal)
  made.run(3000)
  jobs.check_ended(made)
  check_balanced(made)
  assert causes(made) >= {"absence"}


def test_one_that_was_stopped_for_longer_than_its_lease():
  """It comes back with nothing done, but with what it had not merged."""
  made = jobs.job(Exchange(H=H, P=H), 3, 100)
  made.run_until(lambda: made.rounds.rounds_closed >= 20)
  made.freeze(1, 30.0)
  made.run(3000)
  jobs.check_ended(made)
  assert made.learners[1].link.welcome.incarnation == 2
  check_balanced(made)
  lost = balance(made)[1][2]
  assert 0 < lost["absence"] <= 1.5 * H * TOKENS


def test_what_learners_did_while_the_syncer_was_dead_is_counted(
  tmp_path, monkeypatch
):
  from decoupled.checkpoint import arrays
  from tests.exchange.outages import restore_quickly, save_quickly

  monkeypatch.setattr(arrays, "save", save_quickly)
  monkeypatch.setattr(arrays, "restore_flat", restore_quickly)
  made = jobs.job(Exchange(H=H, P=H), 2, 100)
  saving(made, tmp_path, every_rounds=20)
  made.run_until(lambda: made.rounds.rounds_closed >= 45)
  steps = {i: x.step for i, x in made.learners.items()}
  old = syncer_dies(made)
  at = made.clock.now()
  made.run_until(lambda: made.clock.now() > at + 4 * H)
  syncer_returns(made, old, tmp_path)
  made.run_until(
    lambda: all(x.link.welcome.term == 2 for x in made.learners.values())
  )
  alone = {i: (x.step - steps[i]) * TOKENS for i, x in made.learners.items()}
  made.run(3000)
  jobs.check_ended(made)
  for learner, (_, _, discarded) in balance(made).items():
    assert discarded["absence"] == pytest.approx(alone[learner], abs=2 * TOKENS)
