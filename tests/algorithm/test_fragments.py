"""Fragments partition the model, deterministically and evenly."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled.algorithm.fragments import fragment, join, split, units
from decoupled.errors import ConfigError
from decoupled.types import Role, TensorSpec, Unit

SCHEMES = ("balanced", "tensor", "layer")


def spec(name, *shape, role=Role.WEIGHT, stacked=False):
  return TensorSpec(name, shape, "float32", role, stacked)


@st.composite
def models(draw):
  """Lists of specs with some scanned, some layered and some local tensors."""
  count = draw(st.integers(1, 6))
  specs = []
  for i in range(count):
    kind = draw(st.sampled_from(("plain", "layered", "stacked", "local")))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    name = {
      "plain": f"t{i}",
      "layered": f"layers/{draw(st.integers(0, 3))}/t{i}",
      "stacked": f"scan/t{i}",
      "local": f"cache/t{i}",
    }[kind]
    role = Role.LOCAL if kind == "local" else Role.WEIGHT
    specs.append(spec(name, *shape, role=role, stacked=kind == "stacked"))
  return tuple(specs)


def cut(specs, num_fragments, scheme):
  """The fragments, or None where P is too large for this model."""
  try:
    return fragment(specs, num_fragments, scheme)
  except ConfigError:
    return None


def size_of(specs, unit):
  shape = next(s.shape for s in specs if s.name == unit.tensor)
  return math.prod(shape if unit.layer is None else shape[1:])


def test_units_follow_the_specs_then_the_layers_without_local_ones():
  specs = (
    spec("z", 3),
    spec("scan/w", 2, 5, stacked=True),
    spec("cache", 9, role=Role.LOCAL),
    spec("a", 1),
  )
  assert units(specs) == (
    Unit("z"),
    Unit("scan/w", 0),
    Unit("scan/w", 1),
    Unit("a"),
  )


@given(models(), st.integers(1, 5), st.sampled_from(SCHEMES))
@settings(max_examples=100, deadline=None)
def test_fragments_partition_the_units_in_their_order(specs, parts, scheme):
  fragments = cut(specs, parts, scheme)
  if fragments is None:
    return
  order = units(specs)
  assert len(fragments) == parts
  assert all(fragments), "a fragment is empty"
  assert sorted(itertools.chain(*fragments)) == sorted(order)
  for members in fragments:
    assert list(members) == sorted(members, key=order.index)
  assert fragments == fragment(list(specs), parts, scheme)


@given(models(), st.integers(1, 5), st.sampled_from(SCHEMES))
@settings(max_examples=60, deadline=None)
def test_split_then_join_is_the_identity(specs, parts, scheme):
  fragments = cut(specs, parts, scheme)
  if fragments is None:
    return
  rng = np.random.default_rng(0)
  sent = {
    s.name: rng.normal(size=s.shape).astype(np.float32)
    for s in specs
    if s.role is not Role.LOCAL
  }
  back = join(split(sent, fragments), fragments)
  assert back.keys() == sent.keys()
  for name, tensor in sent.items():
    np.testing.assert_array_equal(back[name], tensor)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_largest_balanced_fragment_is_within_four_thirds(sizes, parts):
  specs = [spec(f"t{i}", size) for i, size in enumerate(sizes)]
  fragments = cut(specs, parts, "balanced")
  if fragments is None:
    return
  largest = max(sum(size_of(specs, u) for u in f) for f in fragments)
  optimum = min(
    max(
      sum(s for s, home in zip(sizes, homes, strict=True) if home == p)
      for p in range(parts)
    )
    for homes in itertools.product(range(parts), repeat=len(sizes))
  )
  assert largest <= (4 / 3 - 1 / (3 * parts)) * optimum + 1e-9


def test_balanced_by_hand():
  # Sorted: b 5, c 4, a 3, d 3, e 3.  Bins: {b}=5 {c}=4 -> a to c (7) ->
  # d to b (8) -> e to {c, a} (10).
  specs = [spec("a", 3), spec("b", 5), spec("c", 4), spec("d", 3), spec("e", 3)]
  assert fragment(specs, 2, "balanced") == (
    (Unit("b"), Unit("d")),
    (Unit("a"), Unit("c"), Unit("e")),
  )


def test_balanced_ties_go_by_name_then_layer_whatever_the_order_of_specs():
  tied = [spec("y", 2), spec("x", 2, 2, stacked=True), spec("w", 2)]
  # Sorted: w, x:0, x:1, y.
  expected = {
    frozenset({Unit("w"), Unit("x", 1)}),
    frozenset({Unit("x", 0), Unit("y")}),
  }
  for order in itertools.permutations(tied):
    found = fragment(order, 2, "balanced")
    assert {frozenset(members) for members in found} == expected
    assert Unit("w") in found[0]


def test_scanned_tensors_are_spread_like_unscanned_ones():
  specs = [spec("scan/w", 8, 10, stacked=True), spec("embed", 40)]
  fragments = fragment(specs, 3, "balanced")
  assert sorted(
    sum(size_of(specs, unit) for unit in members) for members in fragments
  ) == [40, 40, 40]


def test_empty_tensors_do_not_leave_a_fragment_empty():
  specs = [spec("a", 4), spec("b", 0), spec("c", 0)]
  assert [len(members) for members in fragment(specs, 3, "balanced")] == [1] * 3


def test_tensor_scheme_deals_units_round_robin():
  specs = [spec("a", 9), spec("s", 3, 1, stacked=True), spec("b", 1)]
  assert fragment(specs, 2, "tensor") == (
    (Unit("a"), Unit("s", 1), Unit("b")),
    (Unit("s", 0), Unit("s", 2)),
  )


def test_layer_scheme_strides_groups_and_reads_layers_from_paths():
  specs = [
    spec("embed", 4),
    spec("layers/0/experts/7/w", 1),
    spec("layers/1/w", 1),
    spec("layers/10/w", 1),
    spec("layers/2/w", 1),
    spec("scan/w", 2, 3, stacked=True),
    spec("norm", 4),
  ]
  # Groups: none, 0, 1, 2, 10 -> fragments 0, 1, 0, 1, 0.
  assert fragment(specs, 2, "layer") == (
    (
      Unit("embed"),
      Unit("layers/1/w"),
      Unit("layers/10/w"),
      Unit("scan/w", 1),
      Unit("norm"),
    ),
    (Unit("layers/0/experts/7/w"), Unit("layers/2/w"), Unit("scan/w", 0)),
  )


@pytest.mark.parametrize(
  ("scheme", "available"), [("balanced", 4), ("tensor", 4), ("layer", 3)]
)
def test_more_fragments_than_units_names_both_numbers(scheme, available):
  specs = [spec("a", 1), spec("b", 1), spec("s", 2, 1, stacked=True)]
  assert len(fragment(specs, available, scheme)) == available
  with pytest.raises(ConfigError) as error:
    fragment(specs, available + 1, scheme)
  assert f"P = {available + 1} " in str(error.value)
  assert f"only {available} " in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "specs",
  [
    [spec("a", 1), spec("a", 2)],
    [spec("a", stacked=True)],
  ],
)
def test_impossible_specs_are_refused_by_name(specs):
  with pytest.raises(ConfigError, match="'a'"):
    units(specs)


def test_unknown_scheme_lists_the_known_ones():
  with pytest.raises(ConfigError, match=r"'size'.*balanced, tensor, layer"):
    fragment([spec("a", 1)], 1, "size")
