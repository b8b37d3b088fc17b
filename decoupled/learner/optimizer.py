"""AdamW without a learning rate of its own, and the rate as a function.

The rate is a function of a scalar that the learner carries (design 4.10), not
of a counter inside Optax: a fragment that is adopted moves the scalar, and a
fresh optimizer state must never restart the schedule.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from decoupled.learner.settings import Optimizer, Schedule
from decoupled.types import Role, TensorSpec


def learning_rate(
  optimizer: Optimizer, schedule: Schedule, schedule_step: jax.Array | int
) -> jax.Array:
  """The rate of the inner step that starts at `schedule_step`.

  With peak r, warm-up w, decay d and floor f, for step s from 0:

    s < w:       r (s + 1) / w
    w <= s < d:  r (f + (1 - f) (1 + cos(pi (s - w) / (d - w))) / 2)
    s >= d:      r f

  Args:
    optimizer: holds the peak.
    schedule: holds w, d and f.
    schedule_step: int32 scalar; traceable.

  Returns:
    float32 scalar.
  """
  step = jnp.asarray(schedule_step, jnp.float32)
  warm = (step + 1) / max(schedule.warmup_steps, 1)
  length = schedule.decay_steps - schedule.warmup_steps
  done = jnp.clip((step - schedule.warmup_steps) / length, 0, 1)
  cosine = (1 + jnp.cos(jnp.pi * done)) / 2
  decayed = schedule.floor + (1 - schedule.floor) * cosine
  share = jnp.where(step < schedule.warmup_steps, warm, decayed)
  rate: jax.Array = jnp.float32(optimizer.learning_rate) * share
  return rate


def make_optimizer(
  config: Optimizer, specs: Sequence[TensorSpec]
) -> optax.GradientTransformation:
  """Clipping, Adam's direction and decoupled decay (Loshchilov, Hutter 2019).

  The updates are to be scaled by minus the learning rate. Adam's own counter
  stays: it corrects the bias of the moments, and lives and dies with them.

  Args:
    config: coefficients.
    specs: description of the parameters, in the order of their leaves.
  """

  def decays(params: optax.Params) -> optax.Params:
    return jax.tree.unflatten(
      jax.tree.structure(params), [_is_matrix(spec) for spec in specs]
    )

  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
    optax.add_decayed_weights(config.weight_decay, mask=decays),
  )


def _is_matrix(spec: TensorSpec) -> bool:
  """Weights of a matrix product; not norms, biases or embeddings."""
  dims = len(spec.shape) - (1 if spec.stacked else 0)
  return spec.role is Role.WEIGHT and dims >= 2
