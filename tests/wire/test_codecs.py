"""float32 in full, bfloat16 as deltas whose rounding never adds up."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from decoupled.wire import codecs

# Relative to the delta: half a unit in the last of bfloat16's 8 bits, and
# the float32 rounding of the sum, relative to the values themselves.
BFLOAT16 = 2.0**-8
FLOAT32 = 2.0**-22

values = hnp.arrays(
  np.float32,
  hnp.array_shapes(min_dims=0, max_dims=3, max_side=5),
  elements=st.floats(-1e3, 1e3, width=32),
)


@given(values)
def test_float32_is_the_arrays_themselves(array):
  payload = codecs.encode("float32", (array,), base=(array,))
  assert payload[0] is array
  assert codecs.decode("float32", payload, None)[0] is array
  assert not codecs.is_delta(payload)


@given(values)
def test_without_a_base_bfloat16_sends_float32_in_full(array):
  payload = codecs.encode("bfloat16", (array,), None)
  assert payload[0].dtype == np.float32
  assert not codecs.is_delta(payload)
  np.testing.assert_array_equal(
    codecs.decode("bfloat16", payload, None)[0], array
  )


@given(values, st.integers(0, 2**31))
def test_one_delta_is_off_by_its_own_rounding_only(array, seed):
  rng = np.random.default_rng(seed)
  base = array + rng.normal(0, 0.1, array.shape).astype(np.float32)
  base = np.asarray(base, np.float32)
  payload = codecs.encode("bfloat16", (array,), (base,))
  assert payload[0].dtype == np.uint16
  assert payload[0].shape == array.shape
  assert codecs.is_delta(payload)
  decoded = codecs.decode("bfloat16", payload, (base,))[0]
  assert decoded.dtype == np.float32
  allowed = BFLOAT16 * np.abs(array - base) + FLOAT32 * (
    np.abs(array) + np.abs(base)
  )
  assert (np.abs(decoded - array) <= allowed + 1e-30).all()


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.integers(50, 200))
def test_a_long_chain_of_deltas_does_not_drift(seed, length):
  """After any number of versions the error is that of the last delta."""
  rng = np.random.default_rng(seed)
  truth = rng.standard_normal(64).astype(np.float32)
  syncer = learner = (truth.copy(),)
  for _ in range(length):
    truth = truth + rng.normal(0, 0.01, 64).astype(np.float32)
    payload = codecs.encode("bfloat16", (truth,), syncer)
    last = np.abs(truth - syncer[0])
    syncer = codecs.decode("bfloat16", payload, syncer)
    learner = codecs.decode("bfloat16", payload, learner)
    np.testing.assert_array_equal(syncer[0], learner[0])
    allowed = BFLOAT16 * last + 2 * FLOAT32 * np.abs(truth)
    assert (np.abs(syncer[0] - truth) <= allowed).all()


def test_deltas_against_the_true_base_would_drift():
  """The reason for the rule: the check above can fail."""
  rng = np.random.default_rng(0)
  truth = rng.standard_normal(512).astype(np.float32)
  learner = truth.copy()
  for _ in range(200):
    step = rng.normal(0, 0.01, 512).astype(np.float32)
    learner = learner + step.astype(ml_dtypes.bfloat16).astype(np.float32)
    truth = truth + step
  worst = np.abs(learner - truth).max()
  assert worst > BFLOAT16 * 0.05


def test_bits_are_those_of_bfloat16_rounded_to_nearest_even():
  array = np.array([1.0, -2.0, 1 + 2**-8, 1 + 3 * 2**-8], np.float32)
  payload = codecs.encode("bfloat16", (array,), (np.zeros(4, np.float32),))
  assert [hex(x) for x in payload[0]] == ["0x3f80", "0xc000", "0x3f80",
                                          "0x3f82"]  # fmt: skip


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_visible(bad):
  array = np.array([1.0, bad], np.float32)
  base = (np.zeros(2, np.float32),)
  payload = codecs.encode("bfloat16", (array,), base)
  decoded = codecs.decode("bfloat16", payload, base)[0]
  assert np.isfinite(decoded).tolist() == [True, False]


def test_a_delta_needs_its_base_in_its_shape():
  delta = (np.zeros(3, np.uint16),)
  with pytest.raises(ValueError, match="needs its base"):
    codecs.decode("bfloat16", delta, None)
  with pytest.raises(ValueError, match="shape"):
    codecs.decode("bfloat16", delta, (np.zeros(4, np.float32),))


def test_an_unknown_codec_is_named():
  with pytest.raises(ValueError, match="int4"):
    codecs.encode("int4", (), None)
