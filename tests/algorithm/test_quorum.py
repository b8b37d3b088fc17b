"""When a round closes: quorum, the free wait beyond it, and the transfers."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled.algorithm.grace import Estimates, ema, grace_s
from decoupled.algorithm.policy import Exchange
from decoupled.algorithm.quorum import close_time, explain, may_merge, select

INF = math.inf
NAN = math.nan
QUICK = settings(max_examples=150, deadline=None)

times = st.one_of(st.just(INF), st.floats(0.0, 2.0))
seconds = st.floats(0.0, 1.0)
estimates = st.builds(
  Estimates,
  step_s=st.one_of(st.just(NAN), seconds),
  sync_s=st.one_of(st.just(NAN), seconds),
  round_s=st.one_of(st.just(NAN), seconds),
)
policies = st.builds(
  Exchange,
  tau=st.integers(0, 6),
  quorum=st.integers(1, 4),
  gamma=st.floats(0.0, 1.0),
  max_grace_rounds=st.floats(0.0, 3.0),
)


@st.composite
def rounds(draw):
  """(opened, report times [M], alive [M])."""
  learners = draw(st.integers(1, 5))
  reports = draw(st.lists(times, min_size=learners, max_size=learners))
  alive = draw(st.lists(st.booleans(), min_size=learners, max_size=learners))
  opened = 10.0
  return opened, opened + np.array(reports), np.array(alive)


# Running estimates


def test_ema_takes_the_first_sample_whole_and_ignores_unknown_ones():
  np.testing.assert_allclose(
    ema([NAN, 1.0, 1.0, NAN], [3.0, 2.0, NAN, NAN], 0.2), [3.0, 1.2, 1.0, NAN]
  )
  assert ema(NAN, 3.0, 0.2) == 3.0


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(0, 1))
@QUICK
def test_ema_stays_between_old_and_sample(old, sample, weight):
  mixed = float(ema(old, sample, weight))
  assert min(old, sample) - 1e-9 <= mixed <= max(old, sample) + 1e-9


# Grace: Equation 3


def test_grace_by_hand():
  policy = Exchange(tau=2, gamma=0.5, max_grace_rounds=1.0)
  # 0.5 x (2 x 0.10 - (0.02 + 0.08)) = 0.05
  assert grace_s(policy, 0.10, 0.02, 0.08, 0.10) == pytest.approx(0.05)
  # 0.5 x (2 x 0.50 - 0.10) = 0.45, but a round lasts 0.10
  assert grace_s(policy, 0.50, 0.02, 0.08, 0.10) == pytest.approx(0.10)
  # The slack is used up
  assert grace_s(policy, 0.10, 0.15, 0.08, 0.10) == 0.0


@pytest.mark.parametrize("unknown", range(4))
def test_no_grace_while_anything_is_unknown(unknown):
  values = [0.1, 0.0, 0.01, 0.1]
  assert grace_s(Exchange(), *values) > 0
  values[unknown] = NAN
  assert grace_s(Exchange(), *values) == 0.0


@given(policies, seconds, seconds, seconds, seconds, seconds)
@QUICK
def test_grace_is_bounded_and_shrinks_with_the_time_spent(
  policy, step, wait, more, sync, length
):
  grace = float(grace_s(policy, step, wait, sync, length))
  assert 0.0 <= grace <= policy.max_grace_rounds * length
  slack = policy.tau * step - (wait + sync)
  assert grace <= max(0.0, policy.gamma * slack)
  later = grace_s(policy, step, wait + more, sync, length)
  assert later <= grace
  assert grace_s(policy, step, wait, sync + more, length) <= grace
  assert grace_s(policy, step + more, wait, sync, length) >= grace


# Closing


@given(rounds(), estimates, policies)
@QUICK
def test_closing_against_a_plain_loop(a_round, known, policy):
  opened, reports, alive = a_round
  decision = close_time(opened, reports, alive, known, policy)
  there = sorted(
    t for t, live in zip(reports, alive, strict=True) if live and t < INF
  )
  assert decision.reported == len(there)
  assert decision.alive == sum(alive)
  assert decision.missing.tolist() == [
    bool(live) and t == INF for t, live in zip(reports, alive, strict=True)
  ]
  if len(there) < policy.quorum:  # never before K
    assert decision.close_at == INF
    return
  quorum_at = there[policy.quorum - 1]
  grace = float(grace_s(policy, known[0], quorum_at - opened, *known[1:]))
  expected = quorum_at + grace
  if len(there) == sum(alive):
    expected = min(expected, there[-1])
  assert decision.quorum_at == quorum_at
  assert decision.grace_s == grace
  assert decision.close_at == expected
  assert decision.close_at >= quorum_at


@given(rounds(), estimates, policies, st.data())
@QUICK
def test_an_earlier_report_never_delays_a_round(a_round, known, policy, data):
  # Each second the quorum comes earlier lengthens the grace by gamma at most.
  opened, reports, alive = a_round
  before = close_time(opened, reports, alive, known, policy)
  who = data.draw(st.integers(0, len(reports) - 1))
  latest = min(float(reports[who]), 12.0)
  earlier = reports.copy()
  earlier[who] = data.draw(st.floats(opened, latest))
  after = close_time(opened, earlier, alive, known, policy)
  assert after.close_at <= before.close_at + 1e-9


@given(rounds(), estimates, policies, st.data())
@QUICK
def test_the_dead_are_irrelevant(a_round, known, policy, data):
  opened, reports, alive = a_round
  noise = data.draw(
    st.lists(times, min_size=len(reports), max_size=len(reports))
  )
  other = np.where(alive, reports, np.array(noise))
  first = close_time(opened, reports, alive, known, policy)
  second = close_time(opened, other, alive, known, policy)
  for one, two in zip(first, second, strict=True):
    np.testing.assert_array_equal(one, two)


@given(
  st.lists(st.floats(10.0, 12.0), min_size=1, max_size=5),
  estimates,
  policies,
  st.data(),
)
@QUICK
def test_a_frozen_learner_costs_the_grace_window_and_no_more(
  reports, known, policy, data
):
  quorum = data.draw(st.integers(1, len(reports)))
  policy = dataclasses.replace(policy, quorum=quorum)
  alive = [True] * len(reports)
  without = close_time(10.0, reports, alive, known, policy)
  frozen = close_time(10.0, [*reports, INF], [*alive, True], known, policy)
  assert frozen.quorum_at == without.quorum_at < INF
  assert frozen.close_at == frozen.quorum_at + frozen.grace_s
  bound = np.nan_to_num(policy.max_grace_rounds * known.round_s)
  assert frozen.close_at <= without.quorum_at + bound + 1e-9


def test_all_there_closes_at_once():
  known = Estimates(step_s=0.1, sync_s=0.0, round_s=0.1)
  decision = close_time(0.0, [0.01, 0.02, INF], [1, 1, 0], known, Exchange())
  assert decision.grace_s > 0.05
  assert decision.close_at == 0.02


def test_too_few_live_learners_keep_the_round_open():
  policy = Exchange(quorum=2)
  for alive in ([1, 0, 0], [0, 0, 0]):
    decision = close_time(0.0, [0.1, 0.1, INF], alive, Estimates(), policy)
    assert decision.close_at == INF
  assert close_time(0.0, [0.1], [1], Estimates(), policy).close_at == INF
  assert close_time(0.0, [], [], Estimates(), policy).close_at == INF


def test_many_rounds_at_once_equal_one_after_the_other():
  rng = np.random.default_rng(3)
  shape = (4, 5)
  opened = rng.uniform(0, 1, shape)
  reports = opened[..., None] + rng.exponential(0.1, (*shape, 6))
  reports[rng.random(reports.shape) < 0.3] = INF
  alive = rng.random(reports.shape) < 0.8
  known = Estimates(
    rng.uniform(0, 0.3, shape), rng.uniform(0, 0.1, shape), np.float64(0.2)
  )
  policy = Exchange(quorum=3)
  batch = close_time(opened, reports, alive, known, policy)
  assert batch.close_at.shape == shape
  assert np.isinf(batch.close_at).any()
  assert np.isfinite(batch.close_at).any()
  for index in np.ndindex(shape):
    one = close_time(
      opened[index],
      reports[index],
      alive[index],
      Estimates(known.step_s[index], known.sync_s[index], 0.2),
      policy,
    )
    for got, expected in zip(select(batch, index), one, strict=True):
      np.testing.assert_array_equal(got, expected)


def test_deciding_modifies_nothing():
  reports, alive = np.array([3.0, INF, 1.0]), np.array([True, True, False])
  copies = reports.copy(), alive.copy()
  decision = close_time(
    0.0, reports, alive, Estimates(0.1, 0.1, 0.1), Exchange()
  )
  may_merge(9.0, 0.0, decision, alive, alive, 1.0, 1)
  np.testing.assert_array_equal(reports, copies[0])
  np.testing.assert_array_equal(alive, copies[1])


# Explaining


def test_every_state_has_its_sentence():
  known = Estimates(step_s=0.1, sync_s=0.02, round_s=0.1)
  two = Exchange(quorum=2)

  def say(reports, alive, policy=two, ids=(4, 7, 9)):
    return explain(close_time(0.0, reports, alive, known, policy), ids)

  assert say([0.01, INF, INF], [1, 1, 1]) == (
    "open: 1 of 2 reports needed, 3 learners are live; no report from learner "
    "7, 9"
  )
  assert say([INF, INF, INF], [1, 0, 0]) == (
    "open: 0 of 2 reports needed, and only 1 learners are live; no report from "
    "learner 4"
  )
  # 0.8 x (0.2 - 0.03) = 0.136, at most one round of 0.1
  assert say([0.01, INF, INF], [1, 1, 0], Exchange()) == (
    "quorum of 1 after 0.010 s; closes at 0.110 s after 0.100 s of grace with "
    "1 of 2 live learners there; no report from learner 7"
  )
  assert say([0.01, 0.05, INF], [1, 1, 0]) == (
    "quorum of 2 after 0.050 s; closes at 0.050 s, all 2 live learners there"
  )
  assert "learner 1, 2" in say([0.01, INF, INF], [1, 1, 1], ids=())


def test_a_batch_is_explained_one_by_one():
  batch = close_time(
    [0.0, 1.0], [[0.1], [INF]], [[True], [True]], Estimates(), Exchange()
  )
  with pytest.raises(ValueError, match="select"):
    explain(batch)
  assert explain(select(batch, 1)).startswith("open")


# Transfers


def closed_at(when, quorum=1):
  """A decision whose round closes at `when`."""
  policy = dataclasses.replace(Exchange(), quorum=quorum)
  return close_time(0.0, [when] * 2, [1, 1], Estimates(), policy)


@pytest.mark.parametrize(
  ("now", "expected", "received", "quorum", "merges"),
  [
    (0.9, [1, 1, 0], [1, 1, 0], 1, False),  # not closed yet
    (1.0, [1, 1, 0], [1, 1, 0], 1, True),  # all that were expected
    (1.0, [1, 1, 0], [1, 0, 0], 1, False),  # one still under way
    (1.9, [1, 1, 0], [1, 0, 0], 1, False),
    (2.0, [1, 1, 0], [1, 0, 0], 1, True),  # budget ended: left out
    (2.0, [1, 1, 0], [1, 0, 0], 2, False),  # ... unless K needs it
    (9.0, [1, 1, 0], [0, 0, 0], 1, False),
    (9.0, [1, 1, 0], [1, 1, 0], 2, True),
    (1.0, [0, 0, 0], [0, 0, 0], 1, False),  # nobody has a copy
    (1.0, [0, 1, 0], [1, 1, 0], 2, True),  # died after it had sent
  ],
)
def test_may_merge(now, expected, received, quorum, merges):
  found = may_merge(now, 0.0, closed_at(1.0), expected, received, 2.0, quorum)
  assert bool(found) is merges


def test_nothing_merges_below_quorum_whatever_has_arrived():
  decision = close_time(
    0.0, [0.1, INF], [1, 1], Estimates(), Exchange(quorum=2)
  )
  assert not may_merge(99.0, 0.0, decision, [1, 1], [1, 1], 1.0, 2)


def test_may_merge_over_a_batch():
  decision = close_time(
    [0.0, 0.0],
    [[1.0, 1.0], [3.0, 3.0]],
    [[1, 1], [1, 1]],
    Estimates(),
    Exchange(),
  )
  found = may_merge(2.0, 0.0, decision, [1, 1], [[1, 1], [1, 1]], 9.0, 1)
  assert found.tolist() == [True, False]
