"""The outer step: eager Optax, compared bit for bit with NumPy (never jitted,
where fused multiply-adds may round differently)."""

import hashlib

import jax
import numpy as np
import optax
import pytest

from decoupled.algorithm import outer as outer_lib
from decoupled.algorithm.merge import merge, pseudo_gradient
from decoupled.algorithm.policy import Outer
from decoupled.types import Role

ROLES = (Role.WEIGHT, Role.STATISTIC, Role.EMBEDDING)
SHAPES = ((3, 4), (5,), ())


def arrays(seed, shapes=SHAPES):
  rng = np.random.default_rng(seed)
  return tuple(np.asarray(rng.normal(size=s), np.float32) for s in shapes)


def aligned(array):
  """A copy on a 64-byte boundary, where JAX may share memory with NumPy."""
  raw = np.empty(array.nbytes + 64, np.uint8)
  start = -raw.ctypes.data % 64
  copy = raw[start : start + array.nbytes].view(array.dtype)
  copy = copy.reshape(array.shape)
  copy[...] = array
  return copy


def digest(values):
  return hashlib.sha256(b"".join(v.tobytes() for v in values)).hexdigest()


def oracle(outer, theta, delta, buffers, roles, scale=1.0):
  """b <- D + mu b; Theta <- Theta - eta s (D + mu b), all in float32."""
  mu = np.float32(outer.momentum)
  rate = np.float32(-outer.learning_rate * scale)
  new, kept = [], []
  buffers = iter(buffers)
  for value, change, role in zip(theta, delta, roles, strict=True):
    if role is Role.STATISTIC:
      new.append(value - change)
      continue
    b = change + mu * next(buffers)
    kept.append(b)
    new.append(value + rate * (change + mu * b))
  return tuple(new), tuple(kept)


@pytest.mark.parametrize(
  "outer",
  [
    Outer(),
    Outer(learning_rate=0.7, momentum=0.9),
    Outer(learning_rate=1.0, momentum=0.0),
  ],
)
def test_bit_exact_against_numpy_over_many_steps(outer):
  theta = expected = arrays(0)
  state = outer_lib.init(outer, theta, ROLES)
  buffers = [np.zeros_like(theta[0]), np.zeros_like(theta[2])]
  for i in range(1, 9):
    delta = arrays(i)
    scale = 1.0 if i % 3 else 0.5**0.5
    theta, state = outer_lib.step(outer, theta, delta, state, ROLES, scale)
    expected, buffers = oracle(outer, expected, delta, buffers, ROLES, scale)
    assert digest(theta) == digest(expected)
    assert digest(outer_lib.state_arrays(state)) == digest(buffers)
  assert all(isinstance(a, np.ndarray) for a in theta)
  assert {a.dtype for a in theta} == {np.dtype(np.float32)}


def test_fragment_by_fragment_equals_the_whole_tree_at_once():
  outer = Outer(learning_rate=0.7, momentum=0.9)
  shapes = ((3, 2), (4,), (2, 2), (1,))
  roles = (Role.WEIGHT, Role.EMBEDDING, Role.WEIGHT, Role.WEIGHT)
  theta = arrays(0, shapes)
  whole = jax.tree.map(jax.numpy.asarray, theta)
  sgd = optax.sgd(0.7, momentum=0.9, nesterov=True)
  whole_state = sgd.init(whole)
  cuts = (slice(0, 1), slice(1, 4))
  parts = [theta[cut] for cut in cuts]
  states = [
    outer_lib.init(outer, p, roles[c]) for p, c in zip(parts, cuts, strict=True)
  ]
  for i in range(1, 4):
    delta = arrays(i, shapes)
    updates, whole_state = sgd.update(delta, whole_state)
    whole = optax.apply_updates(whole, updates)
    for p, cut in enumerate(cuts):
      parts[p], states[p] = outer_lib.step(
        outer, parts[p], delta[cut], states[p], roles[cut]
      )
  assert digest(parts[0] + parts[1]) == digest([np.asarray(w) for w in whole])


def test_inputs_stay_as_they_were():
  outer = Outer()
  theta, delta = arrays(0), arrays(1)
  state = outer_lib.init(outer, theta, ROLES)
  _, state = outer_lib.step(outer, theta, delta, state, ROLES)
  before = [digest(theta), digest(delta), digest(outer_lib.state_arrays(state))]
  outer_lib.step(outer, theta, delta, state, ROLES)
  assert before == [
    digest(theta),
    digest(delta),
    digest(outer_lib.state_arrays(state)),
  ]


def test_later_writes_to_the_inputs_do_not_reach_the_results():
  outer = Outer()
  theta, delta = (tuple(map(aligned, arrays(seed))) for seed in (0, 1))
  state = outer_lib.init(outer, theta, ROLES)
  new, state = outer_lib.step(outer, theta, delta, state, ROLES)
  before = digest(new), digest(outer_lib.state_arrays(state))
  for array in (*theta, *delta):
    array[...] = 99.0
  assert before == (digest(new), digest(outer_lib.state_arrays(state)))


def test_statistics_take_the_weighted_mean_without_momentum():
  base = (np.array([10.0], np.float32),)
  roles = (Role.STATISTIC,)
  state = outer_lib.init(Outer(), base, roles)
  assert outer_lib.state_arrays(state) == ()
  for _ in range(3):  # every time the same: nothing builds up
    deltas = [
      pseudo_gradient(base, (np.array([v], np.float32),)) for v in (4.0, 8.0)
    ]
    new, state = outer_lib.step(
      Outer(), base, merge(deltas, [1, 3], roles), state, roles
    )
    np.testing.assert_allclose(new[0], [7.0], rtol=1e-6)


def test_the_rate_scale_acts_on_the_step_and_not_on_the_buffer():
  outer = Outer(learning_rate=0.5, momentum=0.5)
  theta, delta = arrays(0), arrays(1)
  state = outer_lib.init(outer, theta, ROLES)
  full, full_state = outer_lib.step(outer, theta, delta, state, ROLES)
  half, half_state = outer_lib.step(outer, theta, delta, state, ROLES, 0.5)
  np.testing.assert_allclose(half[0] - theta[0], (full[0] - theta[0]) / 2, 1e-4)
  assert digest(outer_lib.state_arrays(full_state)) == digest(
    outer_lib.state_arrays(half_state)
  )


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_a_state_survives_as_plain_arrays(momentum):
  outer = Outer(momentum=momentum)
  theta = arrays(0)
  state = outer_lib.init(outer, theta, ROLES)
  theta, state = outer_lib.step(outer, theta, arrays(1), state, ROLES)
  saved = outer_lib.state_arrays(state)
  assert [a.shape for a in saved] == [(3, 4), ()]
  assert all(type(a) is np.ndarray for a in saved)
  saved = tuple(map(aligned, saved))
  restored = outer_lib.state_from_arrays(outer, saved)
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  for array in saved:  # the restored state owns its memory
    array[...] = 0.0
  going_on = outer_lib.step(outer, theta, arrays(2), state, ROLES)
  resumed = outer_lib.step(outer, theta, arrays(2), restored, ROLES)
  assert digest(going_on[0]) == digest(resumed[0])
  assert digest(outer_lib.state_arrays(going_on[1])) == digest(
    outer_lib.state_arrays(resumed[1])
  )


@pytest.mark.parametrize(
  ("merged", "fullest", "exponent", "expected"),
  [
    (4, 4, 0.5, 1.0),
    (1, 4, 0.5, 0.5),
    (1, 4, 1.0, 0.25),
    (1, 4, 0.0, 1.0),
    (5, 4, 0.5, 1.0),
    (0, 4, 0.5, 0.0),
    (0, 0, 0.5, 1.0),
  ],
)
def test_presence(merged, fullest, exponent, expected):
  assert outer_lib.presence(merged, fullest, exponent) == expected


# Learning on a bowl: loss(theta) = |theta - goal|^2 / 2


GOAL = np.array([3.0, -2.0, 1.0, 0.5], np.float32)


def loss(theta):
  return float(np.sum((theta[0] - GOAL) ** 2)) / 2


def inner(theta, noise, steps=5, rate=0.1):
  (value,) = theta
  for _ in range(steps):
    value = value - np.float32(rate) * (value - GOAL - noise)
  return (value,)


@pytest.mark.parametrize("rule", ["rda", "average"])
@pytest.mark.parametrize("learners", [1, 4])
def test_one_outer_step_lowers_the_loss(rule, learners):
  rng = np.random.default_rng(learners)
  theta = (np.zeros(4, np.float32),)
  roles = (Role.WEIGHT,)
  deltas = [
    pseudo_gradient(
      theta, inner(theta, rng.normal(size=4).astype(np.float32) * 0.3)
    )
    for _ in range(learners)
  ]
  state = outer_lib.init(Outer(), theta, roles)
  new, _ = outer_lib.step(
    Outer(), theta, merge(deltas, [1] * learners, roles, rule), state, roles
  )
  assert loss(new) < 0.8 * loss(theta)


def test_a_single_learner_learns():
  theta = (np.zeros(4, np.float32),)
  roles = (Role.WEIGHT,)
  outer = Outer()
  state = outer_lib.init(outer, theta, roles)
  for _ in range(60):
    delta = merge([pseudo_gradient(theta, inner(theta, 0.0))], [1.0], roles)
    theta, state = outer_lib.step(outer, theta, delta, state, roles)
  assert loss(theta) < 1e-6 * loss((np.zeros(4),))


def test_rate_one_without_momentum_is_local_training():
  outer = Outer(learning_rate=1.0, momentum=0.0, merge="average")
  roles = (Role.WEIGHT,)
  theta = plain = (np.zeros(4, np.float32),)
  state = outer_lib.init(outer, theta, roles)
  for _ in range(20):
    delta = merge(
      [pseudo_gradient(theta, inner(theta, 0.0))], [5.0], roles, outer.merge
    )
    theta, state = outer_lib.step(outer, theta, delta, state, roles)
    plain = inner(plain, 0.0)
    np.testing.assert_allclose(theta[0], plain[0], rtol=1e-6)
