"""The syncer is away, alone or for all: learners go on, and come together."""

import numpy as np
import pytest

from decoupled.algorithm.policy import Exchange, Outer
from decoupled.launch.in_memory import Recorder
from decoupled.syncer.rounds import Plan, Rounds
from decoupled.syncer.settings import Limits
from tests.exchange import jobs, toy


def cut_all(made, for_s):
  for learner in made.learners.values():
    learner.wire.partition()
    made.network.after(for_s, learner.wire.heal)


def everything_is_adopted(made):
  """Else a version under way would be news enough to go on."""
  newest = made.rounds.model.versions
  return not any(r.merging for r in made.rounds._open.values()) and all(
    learner.link.versions == newest for learner in made.learners.values()
  )


@pytest.mark.parametrize("learners", [1, 2])
def test_learners_that_all_paused_go_on_when_the_network_is_back(learners):
  """Nobody steps, so nobody finishes a step: their copies must count."""
  exchange = Exchange(H=8, P=8, max_unsynced_steps=16)
  made = jobs.job(exchange, learners, rounds=60)
  made.run_until(
    lambda: made.rounds.rounds_closed >= 20 and everything_is_adopted(made)
  )
  cut_all(made, 60.0)
  at = made.clock.now()
  made.run_until(lambda: made.clock.now() > at + 59)
  paused = [learner.step for learner in made.learners.values()]
  assert max(paused) < 20 + 16 + 8
  made.run(at + 60 + 120)
  jobs.check_ended(made)
  assert made.rounds.rounds_closed == 60
  for before, learner in zip(paused, made.learners.values(), strict=True):
    assert learner.step > before


def snapshot(rounds):
  """What a store would hold."""
  return (
    rounds.manifest,
    [(f.arrays, f.outer_state) for f in rounds.model.fragments],
    rounds.rounds_closed,
    dict(rounds.contract),
    dict(rounds.membership.incarnations),
    dict(rounds.positions),
    rounds.fullest,
    dict(rounds.tokens),
  )


def restart_syncer(made, saved, learners, rounds):
  """Another process in its place, under a higher term."""
  old = made.rounds
  new = Rounds(
    Plan("memory", learners, rounds, contract=tuple(old.contract.items())),
    made._exchange,
    Outer(),
    Limits(),
    term=old.term + 1,
    events=made.events,
  )
  new.restore(*saved)
  made.rounds = made.network.rounds = new
  made.network._tick_at = np.inf
  for learner in made.learners.values():
    made.network.disconnected(learner.wire)
    learner.wire._on_lost("connection reset")
  return new


@pytest.mark.parametrize("adoption", ["overwrite", "carry"])
def test_a_restarted_syncer_wins_over_what_learners_hold(adoption):
  exchange = Exchange(H=8, P=8, adoption=adoption)
  made = jobs.job(
    exchange, 2, 60, trainer=lambda _: toy.Counter(), outer=Outer()
  )
  made.run_until(lambda: made.rounds.rounds_closed >= 16)
  saved = snapshot(made.rounds)
  at_snapshot = toy.global_params(made)
  made.run_until(lambda: made.rounds.rounds_closed >= 40)
  for learner in made.learners.values():
    made.network.disconnected(learner.wire)
  new = restart_syncer(made, saved, 2, 60)
  made.run_until(
    lambda: all(
      x.link.versions == ((2, 16),) * 8 or new.rounds_closed > 16
      for x in made.learners.values()
    ),
    made.clock.now() + 20,
  )
  steps = [x.step for x in made.learners.values()]
  # the lost timeline (rounds 17 to 40) is gone, whatever the adoption rule
  for learner in made.learners.values():
    held = toy.learner_params(learner.trainer.params, made)
    for name, value in at_snapshot.items():
      assert np.abs(held[name] - value).max() <= 8
  made.run(1000)
  jobs.check_ended(made)
  joins = [e["incarnation"] for e in made.events.of("join")]
  assert sorted(joins) == [1, 1, 2, 2]
  second = [e for e in jobs.counted(made) if e["term"] == 2]
  assert [e["round"] for e in second] == list(range(17, 61))
  assert all(e["opened"] >= 0 for e in second)
  for before, learner in zip(steps, made.learners.values(), strict=True):
    assert learner.step > before
    rates = learner.trainer.schedule_steps
    assert rates == sorted(rates)


def test_the_snapshot_of_another_contract_is_refused_with_both_values():
  from decoupled.errors import Refused

  made = jobs.job(Exchange(H=8, P=8), 1, 8)
  made.run(1000)
  saved = snapshot(made.rounds)
  other = Rounds(
    Plan("memory", contract=(("Exchange.H", "16"),)),
    Exchange(H=16, P=8),
    Outer(),
    Limits(),
    term=2,
    events=Recorder(),
  )
  with pytest.raises(Refused, match=r"Exchange\.H = 8.*says 16"):
    other.restore(*saved)


def test_a_sole_learner_trains_through_an_outage_at_its_pace():
  made = jobs.job(Exchange(H=8, P=8), 1, rounds=60)
  made.run_until(lambda: made.rounds.rounds_closed >= 20)
  cut_all(made, 15.0)
  made.run(1000)
  jobs.check_ended(made)
  learner = made.learners[0]
  assert made.rounds.rounds_closed == 60
  assert learner.step >= 60 + 5
  # it stepped at the same cadence all the time
  assert learner.step >= 0.93 * (made.clock.now() - 2)
