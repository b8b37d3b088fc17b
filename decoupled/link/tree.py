"""Any pytree as the wire knows it: named tensors in the order of its leaves."""

import collections
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from decoupled.errors import ConfigError
from decoupled.types import Role, TensorSpec

Tree: TypeAlias = Any
Roles: TypeAlias = Any  # None, callable (name -> role or None), or a tree


def names(tree: Tree) -> tuple[str, ...]:
  """The path of each leaf, joined by `/`, in the order of `flatten`."""
  paths, _ = jax.tree.flatten_with_path(tree)
  return tuple(_name(path) for path, _ in paths)


def flatten(tree: Tree) -> list[Any]:
  """The leaves of a tree, in the order of `tensor_specs`."""
  return jax.tree.leaves(tree)


def unflatten(like: Tree, leaves: Sequence[Any]) -> Tree:
  """A tree of the structure of `like` from leaves in the order of `flatten`."""
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def tensor_specs(
  params: Tree,
  roles: Roles = None,
  stacked: Collection[str] | Callable[[str], bool] = (),
) -> tuple[TensorSpec, ...]:
  """Describes every leaf of a pytree of arrays (or of their specs).

  Floats are weights unless `roles` says otherwise; integers, booleans and
  random keys are always local, since no mean of them means anything.

  Args:
    params: pytree whose leaves have a shape and a dtype.
    roles: None; or a callable from a leaf's name to its role (None: the
      default); or a tree like `params`, or a prefix of it, of roles. A role
      is a `Role` or its word.
    stacked: names of the leaves whose axis 0 enumerates scanned layers, or a
      predicate on names.

  Returns:
    One spec a leaf, in the order of `flatten`.

  Raises:
    ConfigError: unknown role, roles of another structure, a role other than
      local for a leaf that is no float, a stacked name that does not exist,
      or two leaves of one name.
  """
  leaves = dict_of_leaves(params)
  role_of = _role_lookup(params, roles, tuple(leaves))
  if not callable(stacked):
    missing = sorted(set(stacked) - set(leaves))
    if missing:
      raise ConfigError(
        f"stacked names {missing[0]!r}, but the tree has only "
        + ", ".join(leaves)
      )
  is_stacked = stacked if callable(stacked) else set(stacked).__contains__
  return tuple(
    _spec(name, leaf, role_of(name), is_stacked(name))
    for name, leaf in leaves.items()
  )


def dict_of_leaves(tree: Tree) -> dict[str, Any]:
  """Name -> leaf, in the order of `flatten`.

  Raises:
    ConfigError: two leaves have the same name.
  """
  paths = names(tree)
  twice = [n for n, count in collections.Counter(paths).items() if count > 1]
  if twice:
    raise ConfigError(
      f"two leaves of the tree are both named {twice[0]!r}: rename one (keys "
      "must not contain '/')"
    )
  return dict(zip(paths, flatten(tree), strict=True))


def _name(path: tuple[Any, ...]) -> str:
  return "/".join(_key(entry) for entry in path)


def _key(entry: Any) -> str:
  """A dictionary key, sequence index or attribute as plain text."""
  for attribute in ("key", "idx", "name"):
    if hasattr(entry, attribute):
      return str(getattr(entry, attribute))
  return str(entry)


def _role_lookup(
  params: Tree, roles: Roles, leaf_names: tuple[str, ...]
) -> Callable[[str], Role | None]:
  if roles is None:
    return lambda name: None
  if callable(roles):
    return lambda name: _role(name, roles(name))
  try:
    spread = jax.tree.map(
      lambda role, part: [role] * len(jax.tree.leaves(part)), roles, params
    )
  except ValueError as error:
    reason = str(error).splitlines()[0]
    raise ConfigError(
      f"the tree of roles does not fit the tree of parameters: {reason}"
    ) from error
  flat = list(jax.tree.leaves(spread))
  table = {
    name: _role(name, role) for name, role in zip(leaf_names, flat, strict=True)
  }
  return table.__getitem__


def _role(name: str, role: Any) -> Role | None:
  if role is None:
    return None
  try:
    return Role(role)
  except ValueError as error:
    raise ConfigError(
      f"{name} has the role {role!r}, which is not one of " + ", ".join(Role)
    ) from error


def _spec(name: str, leaf: Any, role: Role | None, stacked: bool) -> TensorSpec:
  if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
    leaf = np.asarray(leaf)
  shape = tuple(int(size) for size in leaf.shape)
  # covers bfloat16, which NumPy alone does not count among its floats
  is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
  if role is None:
    role = Role.WEIGHT if is_float else Role.LOCAL
  if role is not Role.LOCAL and not is_float:
    raise ConfigError(
      f"{name} has the role {role.value!r} but the dtype {leaf.dtype}: only "
      "floats are merged, make it 'local'"
    )
  if stacked and not shape:
    raise ConfigError(f"{name} is a scalar and cannot stack scanned layers")
  return TensorSpec(name, shape, str(leaf.dtype), role, stacked)
