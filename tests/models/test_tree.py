"""Any pytree as named tensors."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled.errors import ConfigError
from decoupled.link import tree
from decoupled.types import Role, TensorSpec


class Norm(NamedTuple):
  scale: object
  mean: object


def mixed() -> dict:
  return {
    "blocks": [jnp.ones((2, 3)), jnp.zeros((4,), jnp.bfloat16)],
    "norm": Norm(jnp.ones(3), jnp.zeros(3)),
    "count": jnp.int32(3),
    "flag": np.bool_(True),
    "key": jax.random.key(0),
  }


def by_name(specs) -> dict[str, TensorSpec]:
  return {spec.name: spec for spec in specs}


def test_names_follow_paths_and_the_order_of_the_leaves():
  params = mixed()
  specs = tree.tensor_specs(params)
  assert [s.name for s in specs] == [
    "blocks/0",
    "blocks/1",
    "count",
    "flag",
    "key",
    "norm/scale",
    "norm/mean",
  ]
  for spec, leaf in zip(specs, tree.flatten(params), strict=True):
    assert spec.shape == leaf.shape
    assert spec.dtype == str(leaf.dtype)


def test_floats_are_weights_and_everything_else_is_local():
  roles = {s.name: s.role for s in tree.tensor_specs(mixed())}
  local = {name for name, role in roles.items() if role is Role.LOCAL}
  assert local == {"count", "flag", "key"}
  assert {roles[n] for n in roles.keys() - local} == {Role.WEIGHT}


def test_roles_from_a_callable_default_where_it_says_none():
  found = by_name(
    tree.tensor_specs(
      mixed(), lambda name: "statistic" if name.endswith("mean") else None
    )
  )
  assert found["norm/mean"].role is Role.STATISTIC
  assert found["norm/scale"].role is Role.WEIGHT
  assert found["count"].role is Role.LOCAL


def test_roles_from_a_tree_or_a_prefix_of_it():
  params = {
    "embed": jnp.ones((4, 2)),
    "rest": {"a": jnp.ones(2), "b": jnp.ones(2)},
  }
  whole = {"embed": Role.EMBEDDING, "rest": {"a": "weight", "b": "local"}}
  assert [s.role for s in tree.tensor_specs(params, whole)] == [
    Role.EMBEDDING,
    Role.WEIGHT,
    Role.LOCAL,
  ]
  prefix = {"embed": "embedding", "rest": "statistic"}
  assert [s.role for s in tree.tensor_specs(params, prefix)] == [
    Role.EMBEDDING,
    Role.STATISTIC,
    Role.STATISTIC,
  ]


def test_flatten_and_unflatten_are_inverse():
  params = mixed()
  again = tree.unflatten(params, tree.flatten(params))
  assert jax.tree.structure(again) == jax.tree.structure(params)
  assert all(
    a is b for a, b in zip(*map(jax.tree.leaves, (params, again)), strict=True)
  )


def test_abstract_leaves_are_enough():
  shapes = jax.eval_shape(lambda: {"w": jnp.ones((2, 2))})
  assert tree.tensor_specs(shapes) == (TensorSpec("w", (2, 2), "float32"),)


def test_a_bare_array_and_a_python_float_are_trees_too():
  assert tree.tensor_specs({"x": 1.5})[0].role is Role.WEIGHT
  assert len(tree.tensor_specs(jnp.ones(3))) == 1


def test_stacked_by_name_and_by_predicate():
  params = {"layers": {"w": jnp.ones((3, 2))}, "norm": jnp.ones(2)}
  by_names = tree.tensor_specs(params, stacked=["layers/w"])
  by_rule = tree.tensor_specs(params, stacked=lambda n: n.startswith("layers"))
  assert by_names == by_rule
  assert [s.stacked for s in by_names] == [True, False]


@pytest.mark.parametrize(
  ("params", "options", "says"),
  [
    ({"a": 1.0}, {"roles": {"a": "weights"}}, "'weights'"),
    ({"a": 1.0}, {"roles": lambda name: "frozen"}, "'frozen'"),
    ({"a": 1}, {"roles": {"a": "weight"}}, "int"),
    ({"a": 1.0}, {"roles": {"b": "weight"}}, "roles does not fit"),
    ({"a": 1.0}, {"stacked": ["b"]}, "'b'"),
    ({"a": 1.0}, {"stacked": ["a"]}, "scalar"),
    ({"a": {"b": 1.0}, "a/b": 2.0}, {}, "'a/b'"),
  ],
)
def test_mistakes_are_named(params, options, says):
  with pytest.raises(ConfigError, match=says) as error:
    tree.tensor_specs(params, **options)
  assert "\n" not in str(error.value)
