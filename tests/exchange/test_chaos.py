"""Any mixture of deaths, freezes, cuts and bad messages ends in agreement."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decoupled.algorithm.policy import Exchange
from tests.exchange import jobs, storms


def disturb(made, draw):
  """Does something to a random learner that is there; undoes it later."""
  there = [
    x for x in made.learners.values() if x.link is not None and x.wire.welcome
  ]
  if made.rounds.phase != "training" or not there:
    return
  learner = draw.choice(there)
  what, for_s = draw.choice(["kill", "freeze", "cut"]), draw.uniform(0.2, 12)
  if what == "kill":
    made.kill(learner.learner_id)
    jobs.add(made, learner.learner_id, jobs.jittered(7), delay_s=for_s)
    made.rounds.expect(made.clock.now(), learner.learner_id, 60.0)
  elif what == "freeze":
    made.freeze(learner.learner_id, for_s)
  elif not learner.wire.cut and not learner.wire.frozen:
    learner.wire.partition()
    made.network.after(for_s, learner.wire.heal)


def chaos(seed, **policy):
  draw = random.Random(seed)
  exchange = Exchange(H=8, P=8, **policy)
  storm = storms.Storm(seed, 0.05, 0.1, 0.1)
  made = jobs.job(exchange, learners=3, rounds=50, fault=storm)
  for _ in range(8):
    made.network.after(draw.uniform(3, 60), lambda: disturb(made, draw))
  made.run(5000)
  return made


@settings(
  max_examples=4,
  deadline=None,
  derandomize=True,
  suppress_health_check=[HealthCheck.too_slow],
)
@given(
  seed=st.integers(0, 10_000),
  adoption=st.sampled_from(["overwrite", "carry", "blend"]),
  codec=st.sampled_from(["float32", "bfloat16"]),
  quorum=st.integers(1, 3),
  tau=st.integers(0, 3),
)
def test_any_chaos_ends_in_agreement(seed, adoption, codec, quorum, tau):
  made = chaos(seed, adoption=adoption, codec=codec, quorum=quorum, tau=tau)
  jobs.check_ended(made)
  assert made.rounds.rounds_closed == 50
  assert all(tokens >= 0 for tokens in made.rounds.accounts.discarded.values())
