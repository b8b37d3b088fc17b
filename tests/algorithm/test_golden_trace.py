"""Two visits of one fragment with every number worked out by hand.

H = P = 2, tau = 2, K = 1, gamma = 1/2, a grace window of at most one round;
eta = 1/2, mu = 1/2, RDA; two learners, A and B; adoption by `carry`.
The fragment holds a weight (2 numbers), an embedding and a statistic.
"""

import numpy as np
import pytest

from decoupled.algorithm import outer as outer_lib
from decoupled.algorithm.adoption import adopt, adoption_rule, counters_after
from decoupled.algorithm.fragments import fragment
from decoupled.algorithm.grace import Estimates
from decoupled.algorithm.merge import merge, pseudo_gradient
from decoupled.algorithm.policy import Exchange, Outer
from decoupled.algorithm.quorum import close_time, explain, may_merge
from decoupled.algorithm.schedule import common_step, fragment_of, max_open
from decoupled.algorithm.weights import token_weights
from decoupled.types import Role, TensorSpec, Unit, Version

POLICY = Exchange(H=2, P=2, tau=2, quorum=1, gamma=0.5, adoption="carry")
OUTER = Outer(learning_rate=0.5, momentum=0.5)
ROLES = (Role.WEIGHT, Role.EMBEDDING, Role.STATISTIC)
SPECS = (
  TensorSpec("w", (2,), "float32"),
  TensorSpec("embed", (1,), "float32", Role.EMBEDDING),
  TensorSpec("mean", (1,), "float32", Role.STATISTIC),
  TensorSpec("other", (4,), "float32"),
)
# step 0.10 s, pull + merge + outer step + broadcast 0.04 s, a round 0.10 s
KNOWN = Estimates(step_s=0.10, sync_s=0.04, round_s=0.10)
BUDGET_S = POLICY.tau * KNOWN.step_s


def three(w, embed, mean):
  return tuple(np.array(v, np.float32) for v in (w, [embed], [mean]))


def close_to(arrays, w, embed, mean):
  for got, want in zip(arrays, three(w, embed, mean), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_two_visits():
  # Sizes 2, 1, 1 and 4 into two bins: {other} = 4 and {w, embed, mean} = 4.
  fragments = fragment(SPECS, POLICY.P, "balanced")
  ours = fragments.index((Unit("w"), Unit("embed"), Unit("mean")))
  assert ours == 1
  # Rounds 2 and 4 visit it; two rounds fit into the overlap.
  assert [fragment_of(r, POLICY.P) for r in (1, 2, 3, 4)] == [0, 1, 0, 1]
  assert max_open(POLICY.tau, POLICY.P, POLICY.H) == 2
  assert common_step(2, POLICY.H, POLICY.P) == 2
  theta = three([100, 100], 50, 10)
  state = outer_lib.init(OUTER, theta, ROLES)

  # ---- Round 2 opens at 10.00. A reports at 10.02, B at 10.08.
  # Grace: 1/2 x (2 x 0.10 - (0.02 + 0.04)) = 0.07, so 10.09 at the latest;
  # all live learners have reported at 10.08.
  decision = close_time(10.0, [10.02, 10.08], [True, True], KNOWN, POLICY)
  assert decision.quorum_at == 10.02
  assert decision.grace_s == pytest.approx(0.07)
  assert decision.close_at == 10.08
  assert explain(decision) == (
    "quorum of 1 after 0.020 s; closes at 0.080 s, all 2 live learners there"
  )
  both = [True, True]
  assert not may_merge(10.05, 10.0, decision, both, both, BUDGET_S, 1)
  # B's data is still under way at 10.10 and has until 10.20.
  assert not may_merge(10.10, 10.0, decision, both, [True, False], BUDGET_S, 1)
  assert may_merge(10.12, 10.0, decision, both, both, BUDGET_S, 1)

  # A: 6 tokens in 12 steps, weight 36/12 = 3.  B: 8 in 16, weight 64/16 = 4.
  weights = token_weights([6, 8], [12, 16])
  assert weights.tolist() == [3.0, 4.0]
  a = pseudo_gradient(theta, three([93, 100], 43, 3))
  b = pseudo_gradient(theta, three([100, 86], 36, 10))
  # a: (7, 0), 7, 7.   b: (0, 14), 14, 0.
  #   weight: length 3/7 x 7 + 4/7 x 14 = 11; direction (3/7, 4/7), which is
  #     5/7 x (0.6, 0.8); so D = 11 x (0.6, 0.8) = (6.6, 8.8)
  #   embedding: 3/7 x 7 + 4/7 x 14 = 11
  #   statistic: 3/7 x 7 + 4/7 x 0 = 3
  delta = merge([a, b], weights, ROLES, OUTER.merge, OUTER.granularity)
  close_to(delta, [6.6, 8.8], 11, 3)
  # b = D; step = 1/2 x (D + 1/2 D) = 3/4 D = (4.95, 6.6) and 8.25
  theta, state = outer_lib.step(OUTER, theta, delta, state, ROLES)
  close_to(theta, [95.05, 93.4], 41.75, 7)

  # ---- Adoption by A, which took two more steps (of half a token) meanwhile.
  rule = adoption_rule("carry", Version(1, 0), Version(1, 0), restored=False)
  extracted = three([93, 100], 43, 3)
  now = three([92, 101], 43.5, 3)
  adopted = [
    adopt(rule, *leaves, alpha=0.5)
    for leaves in zip(now, theta, extracted, strict=True)
  ]
  close_to(adopted, [94.05, 94.4], 42.25, 7)
  assert counters_after(rule, 14, 7, (12, 6)) == (2, 1)

  # ---- Round 4 opens at 10.20. A reports at 10.22, B has frozen.
  # The round closes at the end of the grace window: 10.22 + 0.07.
  decision = close_time(10.2, [10.22, np.inf], [True, True], KNOWN, POLICY)
  assert decision.close_at == pytest.approx(10.29)
  assert explain(decision, ["A", "B"]).endswith("no report from learner B")
  only_a = [True, False]
  assert may_merge(10.3, 10.2, decision, only_a, only_a, BUDGET_S, 1)

  # A alone: D = its delta = (2, -4), 1, 2, exactly.
  before = theta
  local = tuple(t - d for t, d in zip(theta, three([2, -4], 1, 2), strict=True))
  alone = pseudo_gradient(theta, local)
  delta = merge([alone], token_weights([9], [2]), ROLES)
  assert all(np.array_equal(x, y) for x, y in zip(delta, alone, strict=True))
  # weight: b = D + b/2 = (2, -4) + (3.3, 4.4) = (5.3, 0.4)
  #   step = 1/2 x (D + b/2) = 1/2 x (4.65, -3.8) = (2.325, -1.9)
  # embedding: b = 1 + 5.5 = 6.5; step = 1/2 x (1 + 3.25) = 2.125
  # statistic: 7 - 2 = 5, no momentum
  theta, state = outer_lib.step(OUTER, theta, delta, state, ROLES)
  close_to(theta, [92.725, 95.3], 39.625, 5)
  close_to(before, [95.05, 93.4], 41.75, 7)
  saved = outer_lib.state_arrays(state)
  np.testing.assert_allclose(saved[0], [5.3, 0.4], rtol=1e-5)
  np.testing.assert_allclose(saved[1], [6.5], rtol=1e-5)
