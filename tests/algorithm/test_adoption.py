"""Adoption: the three rules on NumPy and JAX arrays, and the counters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled.algorithm.adoption import (
  adopt,
  adoption_rule,
  blend,
  carry,
  counters_after,
  overwrite,
)
from decoupled.types import NO_VERSION, Version

LOCAL = np.array([5.0, 8.0], np.float32)
MERGED = np.array([1.0, 2.0], np.float32)
REFERENCE = np.array([4.0, 8.5], np.float32)
EXPECTED = {
  "overwrite": [1.0, 2.0],
  "carry": [2.0, 1.5],
  "blend": [2.0, 3.5],  # a quarter of the local value
}


@pytest.mark.parametrize("rule", EXPECTED)
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_rules_by_hand(rule, kind):
  arrays = [kind(a) for a in (LOCAL, MERGED, REFERENCE)]
  before = [a.tobytes() for a in arrays]
  found = adopt(rule, *arrays, alpha=0.25)
  assert found.dtype == np.float32
  assert found.tolist() == EXPECTED[rule]
  assert [a.tobytes() for a in arrays] == before


def test_rules_by_name_are_the_functions():
  arrays = (LOCAL, MERGED, REFERENCE)
  assert overwrite(*arrays).tolist() == EXPECTED["overwrite"]
  assert carry(*arrays).tolist() == EXPECTED["carry"]
  assert blend(*arrays, 0.25).tolist() == EXPECTED["blend"]
  with pytest.raises(ValueError, match="'replace'"):
    adopt("replace", *arrays, alpha=0.0)


@pytest.mark.parametrize("rule", EXPECTED)
def test_rules_work_under_jit_and_keep_the_dtype_of_the_model(rule):
  local = jnp.asarray(LOCAL, jnp.bfloat16)
  found = jax.jit(lambda *a: adopt(rule, *a, alpha=0.25))(
    local, MERGED, REFERENCE
  )
  assert found.dtype == jnp.bfloat16
  assert found.tolist() == EXPECTED[rule]


def test_overwriting_is_a_copy_and_not_an_alias():
  found = overwrite(LOCAL, MERGED, REFERENCE)
  assert not np.shares_memory(found, MERGED)


def test_carry_without_progress_is_overwrite():
  found = carry(LOCAL, MERGED, LOCAL)
  assert found.tolist() == MERGED.tolist()


@pytest.mark.parametrize(
  ("rule", "included", "left"),
  [
    ("overwrite", (5, 50), (0, 0)),
    ("overwrite", None, (0, 0)),
    ("blend", (5, 50), (0, 0)),
    ("carry", (5, 50), (2, 20)),  # what came after the included copy
    ("carry", (7, 70), (0, 0)),
    ("carry", None, (7, 70)),  # nothing of it was merged
  ],
)
def test_counters_keep_what_no_merge_has_counted(rule, included, left):
  assert counters_after(rule, 7, 70, included) == left


@pytest.mark.parametrize("rule", EXPECTED)
def test_a_lost_timeline_is_never_carried_on(rule):
  held = Version(1, 7)
  assert adoption_rule(rule, held, held, restored=False) == rule
  assert adoption_rule(rule, held, held, restored=True) == "overwrite"
  for base in (Version(1, 3), Version(2, 7), NO_VERSION, None):
    assert adoption_rule(rule, held, base, restored=False) == "overwrite"
