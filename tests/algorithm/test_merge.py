"""Merging: bit-exact against NumPy, and the properties RDA is chosen for."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled.algorithm import merge as merge_lib
from decoupled.algorithm.merge import merge, norm, pseudo_gradient
from decoupled.types import Role

ROLES = (Role.WEIGHT, Role.EMBEDDING, Role.STATISTIC, Role.WEIGHT)
SHAPES = ((4, 3), (5,), (2, 2), ())
QUICK = settings(max_examples=50, deadline=None)


def contributions(seed, learners, shapes=SHAPES, scale=1.0):
  rng = np.random.default_rng(seed)
  return [
    tuple(np.asarray(scale * rng.normal(size=s), np.float32) for s in shapes)
    for _ in range(learners)
  ]


def digest(arrays):
  return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


def shares_of(weights):
  relative = np.asarray(weights, np.float64) / np.max(weights)
  return relative / sum(relative.tolist())


def average_oracle(column, shares):
  """Straight from the formula; sums in learner order, in float64."""
  total = np.zeros(column[0].shape)
  for share, array in zip(shares, column, strict=True):
    total = total + share * array.astype(np.float64)
  return total.astype(np.float32)


def rda_oracle(columns, shares):
  """One RDA group; columns[i][m]."""
  norms = [
    np.sqrt(sum(np.sum(c[m].astype(np.float64) ** 2) for c in columns))
    for m in range(len(shares))
  ]
  length = sum(a * n for a, n in zip(shares, norms, strict=True))
  toward = []
  for column in columns:
    total = np.zeros(column[0].shape)
    for a, n, array in zip(shares, norms, column, strict=True):
      total = total + (a / n) * array.astype(np.float64)
    toward.append(total)
  agreement = np.sqrt(sum(np.sum(t**2) for t in toward))
  return [(length / agreement * t).astype(np.float32) for t in toward]


# Oracles


@pytest.mark.parametrize("learners", [2, 3, 5])
@pytest.mark.parametrize("rule", ["rda", "average"])
@pytest.mark.parametrize("granularity", ["tensor", "fragment"])
def test_bit_exact_against_numpy(learners, rule, granularity):
  deltas = contributions(learners, learners)
  weights = [1.0 + 3.7 * m for m in range(learners)]
  shares = shares_of(weights)
  columns = [[d[i] for d in deltas] for i in range(len(ROLES))]
  expected = [average_oracle(column, shares) for column in columns]
  if rule == "rda" and granularity == "tensor":
    for i in (0, 3):
      (expected[i],) = rda_oracle([columns[i]], shares)
  elif rule == "rda":
    expected[0], expected[3] = rda_oracle([columns[0], columns[3]], shares)
  found = merge(deltas, weights, ROLES, rule, granularity)
  for got, want in zip(found, expected, strict=True):
    assert got.dtype == np.float32
    assert got.shape == want.shape
    np.testing.assert_array_equal(got, want)


def test_a_replay_has_the_same_bits_and_inputs_stay_as_they_were():
  deltas = contributions(0, 4)
  before = [digest(delta) for delta in deltas]
  first = merge(deltas, [1, 2, 3, 4], ROLES)
  second = merge(
    [tuple(a.copy() for a in d) for d in deltas], [1, 2, 3, 4], ROLES
  )
  assert digest(first) == digest(second)
  assert [digest(delta) for delta in deltas] == before
  for array in deltas[0]:
    array.flags.writeable = False
  merge(deltas, [1, 2, 3, 4], ROLES)


def test_large_tensors_are_merged_in_pieces_without_a_seam(monkeypatch):
  deltas = contributions(1, 3, shapes=((7, 11), (13,)))
  roles = (Role.WEIGHT, Role.EMBEDDING)
  whole = merge(deltas, [1, 2, 3], roles)
  monkeypatch.setattr(merge_lib, "_CHUNK", 4)
  pieces = merge(deltas, [1, 2, 3], roles)
  np.testing.assert_array_equal(whole[1], pieces[1])
  np.testing.assert_allclose(whole[0], pieces[0], rtol=1e-6)


def test_arrays_in_any_memory_order():
  deltas = contributions(2, 3)
  flipped = [tuple(np.asfortranarray(a) for a in d) for d in deltas]
  assert digest(merge(deltas, [1, 2, 3], ROLES)) == digest(
    merge(flipped, [1, 2, 3], ROLES)
  )


# Who takes part


def test_a_single_contributor_gives_back_exactly_its_delta():
  (delta,) = contributions(3, 1)
  other = contributions(4, 1)[0]
  for rule in ("rda", "average"):
    for found in (
      merge([delta], [0.3], ROLES, rule),
      merge([other, delta], [0.0, 7.0], ROLES, rule),
    ):
      assert digest(found) == digest(delta)
      assert not any(
        np.shares_memory(a, b) for a, b in zip(found, delta, strict=True)
      )


def test_weight_zero_is_as_good_as_absent():
  deltas = contributions(5, 3)
  with_it = merge(deltas, [2, 0, 3], ROLES)
  without = merge([deltas[0], deltas[2]], [2, 3], ROLES)
  assert digest(with_it) == digest(without)


@pytest.mark.parametrize(
  "weights", [[0.0, 0.0], [1.0, -1.0], [1.0, np.nan], [np.inf, 1.0], [1.0]]
)
def test_impossible_weights_are_refused(weights):
  with pytest.raises(ValueError, match="weights"):
    merge(contributions(6, 2), weights, ROLES)


def test_huge_weights_do_not_overflow():
  deltas = contributions(7, 2)
  found = merge(deltas, [1e308, 1e308], ROLES)
  assert digest(found) == digest(merge(deltas, [1.0, 1.0], ROLES))


@given(st.integers(0, 1000), st.integers(2, 4), st.integers(-30, 30))
@QUICK
def test_a_common_factor_of_the_weights_changes_nothing(seed, learners, power):
  deltas = contributions(seed, learners)
  weights = np.arange(1.0, learners + 1)
  first = merge(deltas, weights, ROLES)
  assert digest(first) == digest(merge(deltas, weights * 2.0**power, ROLES))
  for got, want in zip(merge(deltas, weights * 3, ROLES), first, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  ("deltas", "roles", "options"),
  [
    (contributions(0, 2), ROLES[:2], {}),
    (contributions(0, 2), (Role.LOCAL,) * 4, {}),
    (contributions(0, 2), ROLES, {"rule": "median"}),
    (contributions(0, 2), ROLES, {"granularity": "layer"}),
    (
      [(np.zeros(3, np.float32),), (np.zeros(1, np.float32),)],
      ROLES[:1],
      {},
    ),
  ],
)
def test_what_does_not_fit_is_refused(deltas, roles, options):
  with pytest.raises(ValueError, match=r"\w"):
    merge(deltas, [1, 1], roles, **options)


# RDA


@given(st.integers(0, 1000), st.integers(2, 6))
@QUICK
def test_identical_deltas_merge_to_that_delta(seed, learners):
  (delta,) = contributions(seed, 1)
  for granularity in ("tensor", "fragment"):
    found = merge(
      [delta] * learners, range(1, learners + 1), ROLES, "rda", granularity
    )
    for got, want in zip(found, delta, strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("learners", [2, 4, 9])
def test_orthogonal_deltas_keep_their_length_under_rda_only(learners):
  radius = 3.0
  deltas = [
    (radius * np.eye(learners, dtype=np.float32)[m],) for m in range(learners)
  ]
  even = [1.0] * learners
  rda = merge(deltas, even, [Role.WEIGHT], "rda")
  average = merge(deltas, even, [Role.WEIGHT], "average")
  embedding = merge(deltas, even, [Role.EMBEDDING], "rda")
  assert norm(rda) == pytest.approx(radius, rel=1e-6)
  assert norm(average) == pytest.approx(radius / learners**0.5, rel=1e-6)
  np.testing.assert_array_equal(embedding[0], average[0])


@given(st.integers(0, 1000), st.sampled_from((1e-20, 1e-3, 7.0, 1e20)))
@QUICK
def test_scaling_all_deltas_scales_the_result(seed, factor):
  deltas = contributions(seed, 3)
  scaled = [tuple(np.float32(factor) * a for a in d) for d in deltas]
  for rule, granularity in itertools.product(
    ("rda", "average"), ("tensor", "fragment")
  ):
    one = merge(deltas, [1, 2, 3], ROLES, rule, granularity)
    other = merge(scaled, [1, 2, 3], ROLES, rule, granularity)
    for got, base in zip(other, one, strict=True):
      np.testing.assert_allclose(
        got, factor * base.astype(np.float64), rtol=1e-5, atol=1e-6 * factor
      )


@given(st.integers(0, 1000), st.integers(2, 5))
@QUICK
def test_length_is_the_mean_length(seed, learners):
  deltas = contributions(seed, learners, shapes=((6,),))
  shares = shares_of(range(1, learners + 1))
  found = merge(deltas, range(1, learners + 1), [Role.WEIGHT])
  mean = sum(a * norm(d) for a, d in zip(shares, deltas, strict=True))
  assert norm(found) == pytest.approx(mean, rel=1e-5)


def test_zeros_and_opposites_merge_to_zero_without_warnings():
  zero = (np.zeros((2, 2), np.float32),)
  some = contributions(8, 1, shapes=((2, 2),))[0]
  minus = (-some[0],)
  thrice = (np.float32(-3.1) * some[0],)
  with np.errstate(all="raise"):
    for deltas in ([zero, zero], [some, minus], [some, thrice]):
      found = merge(deltas, [1, 1], [Role.WEIGHT])
      np.testing.assert_array_equal(found[0], zero[0])


def test_a_zero_delta_shortens_but_does_not_turn():
  zero = (np.zeros(3, np.float32),)
  some = (np.array([3.0, 0.0, 4.0], np.float32),)
  found = merge([zero, some], [1, 3], [Role.WEIGHT])
  np.testing.assert_allclose(found[0], 0.75 * some[0], rtol=1e-6)


def test_an_empty_tensor_merges_to_an_empty_one():
  empty = (np.zeros((0, 3), np.float32),)
  assert merge([empty, empty], [1, 1], [Role.WEIGHT])[0].shape == (0, 3)


def test_granularity_decides_whose_norm_counts():
  # Learner 0 moved only the first tensor, learner 1 only the second.
  first = (np.array([2.0], np.float32), np.array([0.0], np.float32))
  second = (np.array([0.0], np.float32), np.array([2.0], np.float32))
  roles = [Role.WEIGHT] * 2
  tensor = merge([first, second], [1, 1], roles, "rda", "tensor")
  whole = merge([first, second], [1, 1], roles, "rda", "fragment")
  # Per tensor: mean length 1 each. Over both: length 2 along (1, 1)/sqrt(2).
  np.testing.assert_allclose(np.concatenate(tensor), [1.0, 1.0], rtol=1e-6)
  np.testing.assert_allclose(np.concatenate(whole), [2**0.5] * 2, rtol=1e-6)


@given(st.integers(0, 1000), st.integers(1, 3))
@QUICK
def test_split_into_any_fragments_merges_like_the_whole(seed, cut):
  deltas = contributions(seed, 3)
  whole = merge(deltas, [1, 2, 3], ROLES)
  left = merge([d[:cut] for d in deltas], [1, 2, 3], ROLES[:cut])
  right = merge([d[cut:] for d in deltas], [1, 2, 3], ROLES[cut:])
  assert digest(whole) == digest(left + right)


# The sign


def test_pseudo_gradient_is_global_minus_local_in_float32():
  base = (np.array([5.0, 1.0], np.float32),)
  local = (np.array([3.0, 1.5], np.float32),)
  before = digest(base), digest(local)
  (delta,) = pseudo_gradient(base, local)
  assert delta.dtype == np.float32
  assert delta.tolist() == [2.0, -0.5]
  assert (digest(base), digest(local)) == before
  (wide,) = pseudo_gradient((np.array([1.0]),), (np.array([0.5]),))
  assert wide.dtype == np.float32


def test_pseudo_gradient_never_broadcasts():
  with pytest.raises(ValueError, match="shape"):
    pseudo_gradient((np.zeros((2, 2)),), (np.zeros(2),))
  with pytest.raises(ValueError, match="1 base arrays"):
    pseudo_gradient((np.zeros(2),), ())
