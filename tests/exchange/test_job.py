"""Whole jobs without any fault: they end, agree, learn and keep time."""

import statistics

import pytest

from decoupled.algorithm.policy import Exchange
from tests.exchange import jobs, toy


@pytest.fixture(scope="module")
def calm():
  """Four learners with 5 % jitter, H = P, tau = 2, K = 1 and grace."""
  made = jobs.job(Exchange(), learners=4, rounds=240)
  made.run(1000)
  return made


def test_four_jittered_learners_agree_and_learn(calm):
  jobs.check_ended(calm)
  assert calm.rounds.rounds_closed == 240
  rounds = jobs.counted(calm)
  assert [e["round"] for e in rounds] == list(range(1, 241))
  assert len(calm.events.of("round")) == 240 + 24  # and the drain's
  before = float(toy.loss(toy.init(), toy.TARGET))
  assert toy.global_loss(calm) < 0.1 * before


def test_nearly_everybody_takes_part_and_adopts_within_tau_steps(calm):
  shares = [
    len(e["participants"]) / max(1, len(e["alive"])) for e in jobs.counted(calm)
  ]
  assert statistics.mean(shares) >= 0.95
  adopted_s = [s for e in calm.events.of("steps") for s in e["adopted_after_s"]]
  assert len(adopted_s) > 900
  assert statistics.median(adopted_s) <= 2.0


def test_the_pace_is_one_round_a_step(calm):
  opened = [e["opened"] for e in jobs.counted(calm)][24:]
  assert (opened[-1] - opened[0]) / (len(opened) - 1) == pytest.approx(
    1.0, rel=0.03
  )


def test_the_same_job_runs_the_same_to_the_bit():
  once, again = (
    jobs.job(Exchange(H=8, P=8), learners=3, rounds=32) for _ in range(2)
  )
  for made in (once, again):
    made.run_until(lambda made=made: made.rounds.rounds_closed >= 16)
    made.kill(1)
    jobs.add(made, 1, delay_s=3.0)
    made.run(1000)
  assert repr(again.events.events) == repr(once.events.events)
  ours, theirs = toy.global_params(again), toy.global_params(once)
  for name, array in ours.items():
    assert array.tobytes() == theirs[name].tobytes()


def test_an_early_copy_is_merged_but_does_not_make_the_quorum():
  """Ids, not times: only a report after the opening counts as fresh."""
  made = jobs.job(
    Exchange(quorum=2),
    learners=2,
    rounds=72,
    step_s=lambda i: 3.0 if i == 1 else 1.0,
  )
  made.run(1000)
  jobs.check_ended(made)
  rounds = jobs.counted(made)
  assert all(e["participants"] == [0, 1] for e in rounds[24:])
  # the slow one reports every 3 s; it alone completes the quorum
  waits = [e["quorum_at"] - e["opened"] for e in rounds[24:]]
  assert max(waits) > 1.5


def test_the_schedule_never_goes_back_and_follows_the_larger_step():
  made = jobs.job(Exchange(), learners=3, rounds=120)
  late = jobs.add(made, 3, 1.0, delay_s=60.0)
  made.run(1000)
  jobs.check_ended(made)
  for learner in made.learners.values():
    steps = learner.trainer.schedule_steps
    assert steps == sorted(steps)
    assert len(set(steps)) == len(steps)
  # the late one starts where the run is, within the fragments it adopted
  assert late.trainer.schedule_steps[0] >= 50
  assert late.schedule_step >= 118


@pytest.mark.parametrize("seed", range(8))
def test_the_drain_follows_the_last_round_at_once(seed):
  """Copies made ahead by learners with stalls once held it up (30 s)."""
  import random

  draw = random.Random(seed)

  def stalls(_learner):
    return lambda _step: 0.03 * (1 + (draw.random() < 0.2) * 6 * draw.random())

  made = jobs.job(Exchange(), learners=2, rounds=60, step_s=stalls)
  made.run(1000)
  jobs.check_ended(made)
  last = max(e["merged"] for e in jobs.counted(made))
  assert made.clock.now() - last < 1.0


@pytest.mark.parametrize(
  ("H", "P", "tau"), [(24, 24, 2), (24, 8, 3), (6, 1, 2)]
)
@pytest.mark.parametrize("adoption", ["overwrite", "carry", "blend"])
def test_every_shape_of_exchange_ends_and_agrees(H, P, tau, adoption):
  exchange = Exchange(H=H, P=P, tau=tau, adoption=adoption)
  made = jobs.job(exchange, learners=3, rounds=4 * P)
  made.run(1000)
  jobs.check_ended(made)
  assert made.rounds.common_step == 4 * H


@pytest.mark.parametrize("adoption", ["overwrite", "carry"])
def test_bfloat16_holds_what_was_published_and_does_not_drift(adoption):
  losses = {}
  for codec in ("float32", "bfloat16"):
    exchange = Exchange(H=8, P=8, codec=codec, adoption=adoption)
    made = jobs.job(exchange, learners=3, rounds=96)
    made.run(1000)
    jobs.check_ended(made)
    losses[codec] = toy.global_loss(made)
  assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)


@pytest.mark.parametrize("slower", [1.18, 2.0, 3.0, 4.0])
def test_a_slow_learner_contributes_to_every_fragment(slower):
  made = jobs.job(
    Exchange(),
    learners=3,
    rounds=240,
    step_s=lambda i: slower if i == 2 else 1.0,
  )
  made.run(1000)
  jobs.check_ended(made)
  visited = {e["fragment"] for e in jobs.merged_by(made, 2)}
  assert visited == set(range(24))
  merged = dict.fromkeys(range(3), 0.0)
  for event in jobs.counted(made):
    for learner, tokens in event["tokens"].items():
      merged[int(learner)] += tokens * event["share"]
  processed = {x.learner_id: x.tokens for x in made.learners.values()}
  share = merged[2] / sum(merged.values())
  assert share >= 0.8 * processed[2] / sum(processed.values())
  # and the fast ones are not held up by it
  assert max(jobs.cadence(made, 0)) == pytest.approx(1.0, abs=0.01)
  assert made.learners[0].step >= 232
