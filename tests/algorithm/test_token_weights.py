"""Weights: the quantity of data times the mean batch."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled.algorithm.weights import check_counters, token_weights

counts = st.integers(1, 10**12)


def test_weights_by_hand():
  weights = token_weights([600, 600, 0, 7], [3, 6, 4, 0])
  assert weights.dtype == np.float64
  assert weights.tolist() == [120_000.0, 60_000.0, 0.0, 0.0]


def test_no_step_no_weight_and_no_warning():
  with np.errstate(all="raise"):
    assert token_weights(0, 0) == 0.0


@given(
  st.lists(st.tuples(counts, st.integers(1, 10**6)), min_size=2, max_size=6),
  st.integers(2, 1000),
)
@settings(max_examples=80, deadline=None)
def test_shares_do_not_depend_on_the_unit_of_tokens(pairs, scale):
  tokens, steps = (
    np.array(column, np.float64) for column in zip(*pairs, strict=True)
  )
  one = token_weights(tokens, steps)
  other = token_weights(tokens * scale, steps)
  np.testing.assert_allclose(one / one.sum(), other / other.sum(), rtol=1e-12)


@given(counts, st.integers(1, 10**6))
@settings(max_examples=80, deadline=None)
def test_larger_batches_count_more_than_more_steps(tokens, steps):
  assert token_weights(tokens, steps) >= token_weights(tokens, steps + 1)
  # Twice the steps of the same batch: twice the weight.
  np.testing.assert_allclose(
    token_weights(2 * tokens, 2 * steps), 2 * token_weights(tokens, steps)
  )


@pytest.mark.parametrize(
  ("tokens", "steps", "word"),
  [
    (-1, 3, "tokens = -1 is negative"),
    (5, -3, "steps = -3 is negative"),
    (math.nan, 3, "tokens = nan is not finite"),
    (5, math.inf, "steps = inf is not finite"),
    (2**53 + 2, 3, r"above 2\*\*53"),
    (5, 2**60, r"above 2\*\*53"),
    (5, 0, "without a step"),
  ],
)
def test_poisoned_counters_are_named(tokens, steps, word):
  assert re.search(word, check_counters(tokens, steps))


@pytest.mark.parametrize(
  ("tokens", "steps"), [(0, 0), (0, 3), (1, 1), (2**53, 2**53)]
)
def test_sound_counters_pass(tokens, steps):
  assert check_counters(tokens, steps) == ""
