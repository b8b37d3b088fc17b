"""The schedule of the learning rate, and the settings it comes from."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decoupled.errors import ConfigError
from decoupled.learner.optimizer import learning_rate, make_optimizer
from decoupled.learner.settings import Local, Mesh, Optimizer, Schedule
from decoupled.types import Role, TensorSpec

RATES = Optimizer(learning_rate=0.01)
COURSE = Schedule(warmup_steps=10, decay_steps=110, floor=0.2)


def rates(schedule: Schedule, steps) -> np.ndarray:
  return np.asarray(
    jax.vmap(lambda s: learning_rate(RATES, schedule, s))(jnp.asarray(steps))
  )


def test_closed_form_at_seven_points():
  by_hand = {
    0: 0.001,  # first tenth of the warm-up
    4: 0.005,
    9: 0.01,  # the peak
    10: 0.01,
    60: 0.01 * 0.6,  # half way between peak and floor
    35: 0.01 * (0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2),
    110: 0.002,  # the floor
  }
  np.testing.assert_allclose(
    rates(COURSE, list(by_hand)), list(by_hand.values()), rtol=1e-5
  )


@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_never_rises_after_the_warm_up_and_ends_on_the_floor(warmup):
  schedule = dataclasses.replace(COURSE, warmup_steps=warmup)
  course = rates(schedule, range(400))
  assert course.argmax() <= warmup
  assert (np.diff(course[warmup:]) <= 0).all()
  np.testing.assert_allclose(course[110:], 0.002, rtol=1e-5)
  assert (course > 0).all()


def specs() -> tuple[TensorSpec, ...]:
  return (
    TensorSpec("embed", (4, 2), "float32", Role.EMBEDDING),
    TensorSpec("matrix", (2, 2), "float32"),
    TensorSpec("norm", (2,), "float32"),
    TensorSpec("stacked_matrix", (3, 2, 2), "float32", stacked=True),
    TensorSpec("stacked_norm", (3, 2), "float32", stacked=True),
  )


def ones() -> dict[str, jax.Array]:
  return {spec.name: jnp.ones(spec.shape) for spec in specs()}


def test_only_matrices_decay():
  optimizer = make_optimizer(Optimizer(weight_decay=0.5), specs())
  nothing = jax.tree.map(jnp.zeros_like, ones())
  updates, _ = optimizer.update(nothing, optimizer.init(ones()), ones())
  decay = {name: float(u.max()) for name, u in updates.items()}
  assert decay == {
    "embed": 0.0,
    "matrix": 0.5,
    "norm": 0.0,
    "stacked_matrix": 0.5,
    "stacked_norm": 0.0,
  }


def test_directions_equal_optax_adamw_scaled_by_the_rate():
  config = Optimizer(weight_decay=0.0, clip_norm=1e9)
  ours = make_optimizer(config, specs())
  theirs = optax.adamw(0.1, config.b1, config.b2, config.eps, weight_decay=0.0)
  grads = jax.tree.map(lambda x: x * 0.3, ones())
  u, _ = ours.update(grads, ours.init(ones()), ones())
  v, _ = theirs.update(grads, theirs.init(ones()), ones())
  for a, b in zip(*map(jax.tree.leaves, (u, v)), strict=True):
    np.testing.assert_allclose(-0.1 * a, b, rtol=1e-6)


def test_clipping_makes_the_step_blind_to_the_scale_of_large_gradients():
  optimizer = make_optimizer(Optimizer(clip_norm=0.1), specs())
  state = optimizer.init(ones())
  moments = [
    optimizer.update(jax.tree.map(lambda x, c=c: c * x, ones()), state, ones())
    for c in (10.0, 1000.0)
  ]
  for a, b in zip(*(jax.tree.leaves(m[1]) for m in moments), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
  ("component", "changes", "says"),
  [
    (Optimizer, {"learning_rate": 0.0}, "Optimizer.learning_rate = 0.0"),
    (Optimizer, {"b2": 1.0}, "Optimizer.b2 = 1.0"),
    (Optimizer, {"weight_decay": -0.1}, "Optimizer.weight_decay = -0.1"),
    (Optimizer, {"clip_norm": math.nan}, "Optimizer.clip_norm = nan"),
    (Schedule, {"floor": 0.0}, "Schedule.floor = 0.0"),
    (Schedule, {"decay_steps": 50}, "Schedule.warmup_steps = 50"),
    (Schedule, {"warmup_steps": -1}, "Schedule.warmup_steps = -1"),
    (Mesh, {"data": -1}, "Mesh.data = -1"),
    (Mesh, {"fsdp": 0}, "Mesh.fsdp = 0"),
    (Local, {"microbatches": 0}, "Local.microbatches = 0"),
    (Local, {"pad_s": -1.0}, "Local.pad_s = -1.0"),
    (Local, {"xla_threads": -1}, "Local.xla_threads = -1"),
  ],
)
def test_impossible_settings_are_refused_by_name(component, changes, says):
  with pytest.raises(ConfigError) as error:
    component(**changes)
  assert says in str(error.value)
