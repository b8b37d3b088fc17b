"""The outer step: Nesterov SGD on a global fragment, in float32.

With D the merged pseudo-gradient (global minus local) of a fragment Theta and
b its momentum buffer, which starts at zero:

  b     <- D + mu b
  Theta <- Theta - eta s (D + mu b)

s is the rate scale (see `presence`); it acts on the step and never on the
buffer. One Optax state per fragment over its trainable units. Float statistics
(batch norm) take the weighted mean of the learners, Theta - D, without
momentum.

Steps run eagerly on the CPU, one operation after the other, and therefore
equal the same operations in NumPy bit for bit; a jitted step would not (it
fuses multiplications and additions).
"""

from collections.abc import Sequence
from typing import cast

import jax
import numpy as np
import optax

from decoupled.algorithm.policy import Outer
from decoupled.types import Arrays, Role

TRAINABLE = (Role.WEIGHT, Role.EMBEDDING)


def transform(
  outer: Outer, rate_scale: float = 1.0
) -> optax.GradientTransformation:
  """The Optax transformation of the outer step; one for every fragment."""
  return optax.sgd(
    outer.learning_rate * rate_scale, momentum=outer.momentum, nesterov=True
  )


def init(outer: Outer, arrays: Arrays, roles: Sequence[Role]) -> optax.OptState:
  """A fragment's state before its first outer step.

  Args:
    outer: the outer rule.
    arrays: the fragment's arrays.
    roles: per array its role; only trainable ones have state.
  """
  return state_from_arrays(
    outer,
    tuple(np.zeros(a.shape, np.float32) for a in _trainable(arrays, roles)),
  )


def step(
  outer: Outer,
  arrays: Arrays,
  delta: Arrays,
  state: optax.OptState,
  roles: Sequence[Role],
  rate_scale: float = 1.0,
) -> tuple[Arrays, optax.OptState]:
  """One outer step of one fragment.

  Args:
    outer: the outer rule.
    arrays: the global fragment; not modified.
    delta: the merged pseudo-gradient, shapes as in `arrays`; not modified.
    state: the fragment's state, from `init` or the last step.
    roles: per array its role.
    rate_scale: factor on the learning rate of this step.

  Returns:
    The new arrays (float32, read-only where they come from Optax) and state.
  """
  trained = _trainable(arrays, roles)
  with jax.default_device("cpu"):
    updates, new_state = transform(outer, rate_scale).update(
      _trainable(delta, roles), state, trained
    )
    stepped = iter(cast("Arrays", optax.apply_updates(trained, updates)))
    # Nothing may still be reading the inputs when this returns.
    for leaf in jax.tree.leaves(new_state):
      leaf.block_until_ready()
  return tuple(
    np.asarray(next(stepped), np.float32)
    if role in TRAINABLE
    else np.subtract(np.asarray(array, np.float32), change)
    for array, change, role in zip(arrays, delta, roles, strict=True)
  ), new_state


def presence(merged: int, fullest: int, exponent: float) -> float:
  """Rate scale: (learners merged / learners at the run's fullest)^exponent.

  Fewer learners make a noisier direction; with exponent 1/2 the step shrinks
  as the noise grows. 1 where nobody was merged before.
  """
  if fullest <= 0:
    return 1.0
  return float(min(1.0, merged / fullest) ** exponent)


def state_arrays(state: optax.OptState) -> Arrays:
  """A state as plain NumPy arrays, for checkpoints."""
  return tuple(np.array(leaf) for leaf in jax.tree.leaves(state))


def state_from_arrays(outer: Outer, saved: Arrays) -> optax.OptState:
  """Inverse of `state_arrays`; `saved` is copied."""
  with jax.default_device("cpu"):
    # The state of SGD is one buffer per trainable array, shaped like it.
    template = transform(outer).init(saved)
    leaves = [jax.numpy.array(array) for array in saved]
  return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _trainable(arrays: Arrays, roles: Sequence[Role]) -> Arrays:
  return tuple(
    np.asarray(array, np.float32)
    for array, role in zip(arrays, roles, strict=True)
    if role in TRAINABLE
  )
