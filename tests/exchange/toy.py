"""A tiny regression that a learner trains in microseconds, exactly."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 6
LAYERS = 22  # with `embed` and `out` 24 units: up to 24 fragments
ROWS = LAYERS + 2
TARGET = np.linspace(-1, 1, WIDTH * ROWS, dtype=np.float32).reshape(ROWS, WIDTH)
STACKED = ("layers",)


def init(seed: int = 0) -> dict[str, Any]:
  rng = np.random.default_rng(seed)
  return {
    "embed": jnp.asarray(rng.normal(size=WIDTH), jnp.float32),
    "layers": jnp.asarray(rng.normal(size=(LAYERS, WIDTH)), jnp.float32),
    "out": jnp.asarray(rng.normal(size=WIDTH), jnp.float32),
    "steps": jnp.zeros((), jnp.int32),
  }


def loss(params: dict[str, Any], target: jax.Array) -> jax.Array:
  stack = jnp.concatenate(
    [params["embed"][None], params["layers"], params["out"][None]]
  )
  return jnp.mean((stack - target) ** 2)


@jax.jit
def update(
  params: dict[str, Any], target: jax.Array, rate: jax.Array
) -> tuple[dict[str, Any], jax.Array]:
  value, grads = jax.value_and_grad(loss, allow_int=True)(params, target)
  new = {k: params[k] - rate * grads[k] for k in ("embed", "layers", "out")}
  return {**new, "steps": params["steps"] + 1}, value


class Toy:
  """Gradient descent towards a learner's own noisy view of the target."""

  def __init__(
    self,
    seed: int,
    *,
    noise: float = 0.1,
    rate: float = 2.0,
    tokens: int = 100,
    init_seed: int = 0,
  ):
    self.params = init(init_seed)
    self._rng = np.random.default_rng(seed)
    self._noise = noise
    self._rate = rate
    self._tokens = tokens
    self.schedule_steps: list[int] = []

  def step(self, step: int, schedule_step: int) -> tuple[int, float]:
    self.schedule_steps.append(schedule_step)
    noise = self._noise * self._rng.normal(size=TARGET.shape)
    target = jnp.asarray(TARGET + noise, jnp.float32)
    self.params, value = update(self.params, target, jnp.float32(self._rate))
    return self._tokens, float(value)


class Counter:
  """Adds `amount` to every parameter a step: values tell what is in them."""

  def __init__(self, tokens: int = 100, amount: int = 1):
    self._amount = amount
    self.params = jax.tree.map(jnp.zeros_like, init())
    self._tokens = tokens
    self.schedule_steps: list[int] = []

  def step(self, step: int, schedule_step: int) -> tuple[int, float]:
    self.schedule_steps.append(schedule_step)
    self.params = jax.tree.map(lambda x: x + self._amount, self.params)
    return self._tokens, 1.0


def roles(name: str) -> str | None:
  return "embedding" if name == "embed" else None


def global_params(job: Any) -> dict[str, np.ndarray]:
  """The syncer's fragments, unit by unit."""
  model = job.rounds.model
  return {
    f"{unit.tensor}.{unit.layer}": array
    for units, fragment in zip(
      model.manifest.fragments, model.fragments, strict=True
    )
    for unit, array in zip(units, fragment.arrays, strict=True)
  }


def learner_params(params: dict[str, Any], job: Any) -> dict[str, np.ndarray]:
  """A learner's copy of the same units."""
  return {
    f"{unit.tensor}.{unit.layer}": np.asarray(
      params[unit.tensor]
      if unit.layer is None
      else params[unit.tensor][unit.layer]
    )
    for units in job.rounds.model.manifest.fragments
    for unit in units
  }


def global_loss(job: Any) -> float:
  units = global_params(job)
  rows = [units["embed.None"]]
  rows += [units[f"layers.{i}"] for i in range(LAYERS)]
  rows.append(units["out.None"])
  return float(np.mean((np.stack(rows) - TARGET) ** 2))
