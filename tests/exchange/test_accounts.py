"""Every token is merged, or discarded for a named cause, once (design §2)."""

import collections

import pytest

from decoupled.algorithm.policy import Exchange
from tests.exchange import jobs, storms

ADOPTIONS = ("overwrite", "carry", "blend")


def exchange(adoption="overwrite", **fields):
  return Exchange(H=8, P=8, adoption=adoption, **fields)


def balance(made):
  """Per learner (processed, merged, discarded by cause)."""
  merged = collections.Counter()
  for event in made.events.of("round"):
    for learner, tokens in event["tokens"].items():
      merged[int(learner)] += tokens * event["share"]
  discarded = collections.defaultdict(collections.Counter)
  for event in made.events.of("discard"):
    discarded[event["learner"]][event["cause"]] += event["tokens"]
  return {
    learner: (processed, merged[learner], discarded[learner])
    for learner, processed in made.rounds.tokens.items()
  }


def check_balanced(made, slack=1.0):
  """The run has drained, so nothing is left unmerged."""
  for learner, (processed, merged, discarded) in balance(made).items():
    total = merged + sum(discarded.values())
    assert total == pytest.approx(processed, abs=slack), (learner, discarded)
    assert all(tokens >= 0 for tokens in discarded.values())


def causes(made):
  found = collections.Counter()
  for _, _, discarded in balance(made).values():
    found.update(discarded)
  return {cause for cause, tokens in found.items() if tokens > 0.5}


@pytest.mark.parametrize("adoption", ADOPTIONS)
@pytest.mark.parametrize("transfer_s", [0.02, 1.3])
def test_a_calm_run(adoption, transfer_s):
  made = jobs.job(exchange(adoption), 3, 60, transfer_s=transfer_s)
  made.run(1000)
  jobs.check_ended(made)
  check_balanced(made)
  lost = causes(made)
  assert lost <= {"overlap", "left_out"}
  if adoption == "carry":
    assert lost == set()
  elif transfer_s > 1:
    assert "overlap" in lost


@pytest.mark.parametrize("adoption", ADOPTIONS)
def test_rounds_that_leave_a_learner_out(adoption):
  made = jobs.job(
    exchange(adoption, gamma=0.0), 3, 60, step_s=lambda i: 1.0 + 0.15 * i
  )
  made.run(1000)
  jobs.check_ended(made)
  check_balanced(made)
  assert ("left_out" in causes(made)) == (adoption != "carry")


@pytest.mark.parametrize("adoption", ADOPTIONS)
@pytest.mark.parametrize("merge_s", [0.01, 0.7])
def test_a_death(adoption, merge_s):
  made = jobs.job(exchange(adoption), 3, 60, merge_s=merge_s)
  made.run_until(lambda: made.rounds.rounds_closed >= 20)
  made.run_until(lambda: any(r.merging for r in made.rounds._open.values()))
  made.kill(1)
  jobs.add(made, 1, 1.0, delay_s=4.0)
  made.run(1000)
  jobs.check_ended(made)
  check_balanced(made)
  assert "failure" in causes(made)


@pytest.mark.parametrize("adoption", ADOPTIONS)
def test_a_freeze_that_skips_versions(adoption):
  """Shorter than the lease, longer than a cycle: some versions never adopted.

  One of them included a copy of the frozen learner.
  """
  made = jobs.job(
    exchange(adoption), 3, 120, step_s=lambda i: jobs.jittered(i, 0.1),
    latency_s=0.001, transfer_s=0.002, merge_s=0.001,
  )  # fmt: skip
  for k in range(4):
    made.run_until(lambda k=k: made.rounds.rounds_closed >= 20 + 22 * k)
    made.freeze(1, 3.0)
  made.run(1000)
  jobs.check_ended(made)
  assert made.learners[1].link.welcome.incarnation == 1
  check_balanced(made)


@pytest.mark.parametrize("adoption", ADOPTIONS)
def test_a_partition(adoption):
  made = jobs.job(exchange(adoption), 3, 60)
  made.run_until(lambda: made.rounds.rounds_closed >= 20)
  made.learners[1].wire.partition()
  made.network.after(9.0, made.learners[1].wire.heal)
  made.run(1000)
  jobs.check_ended(made)
  check_balanced(made)


def test_refused_copies():
  import numpy as np

  made = jobs.job(exchange(), 3, 60)
  real, spoilt = made.rounds.contribution, []

  def spoil(now, c):
    if c.learner_id == 1 and 20 <= c.header.copy.round < 24:
      spoilt.append(c.header.copy)
      nan = tuple(np.full_like(a, np.nan) for a in c.arrays)
      c = type(c)(c.learner_id, c.header, nan)
    return real(now, c)

  made.rounds.contribution = spoil
  made.run(1000)
  jobs.check_ended(made)
  check_balanced(made)
  assert spoilt
  assert balance(made)[1][2]["refusal"] > 0


@pytest.mark.parametrize("seed", range(2))
def test_a_storm(seed):
  made = jobs.job(exchange(), 3, 60, fault=storms.Storm(seed, 0.1, 0.2, 0.2))
  made.run(3000)
  jobs.check_ended(made)
  # reports that are lost hide an adoption or two
  check_balanced(made, slack=0.05 * sum(made.rounds.tokens.values()))
