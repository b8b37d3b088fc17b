"""The inner step: gradients over microbatches, AdamW, one compiled program.

It is compiled from specs alone (`compile_train_step`), so that a restarted
process can compile before it joins, and it never recompiles: state goes in and
comes out with the same shapes, dtypes and shardings, and its buffers are
donated. A compiled step that is fed anything else raises.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from decoupled.errors import ConfigError
from decoupled.learner import mesh as meshes
from decoupled.learner.optimizer import learning_rate
from decoupled.learner.settings import Optimizer, Schedule
from decoupled.link.collective import span
from decoupled.models.task import Task

Batch: TypeAlias = Any  # tree of arrays with sequences on axis 0
Metrics: TypeAlias = dict[str, jax.Array]


class TrainState(NamedTuple):
  """What an inner step transforms.

  Attributes:
    params: the model.
    opt_state: moments of the inner optimizer.
    seed: uint32 scalar, the run's seed; dropout keys derive from it.
  """

  params: Any
  opt_state: optax.OptState
  seed: jax.Array


TrainStep: TypeAlias = Callable[..., tuple[TrainState, Metrics]]


def dropout_key(seed: Any, learner: Any, step: Any) -> jax.Array:
  """fold_in(seed, learner, step): a replacement draws the same masks."""
  key = jax.random.fold_in(jax.random.key(seed), learner)
  return jax.random.fold_in(key, step)


def make_init(
  task: Task,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
) -> Callable[[Any], TrainState]:
  """Returns init(seed: uint32) -> state, created where it will live."""
  shardings = jax.tree.map(
    lambda spec: spec.sharding, state_specs(task, optimizer, mesh)
  )

  def init(seed: Any) -> TrainState:
    return _init(task, optimizer, seed)

  jitted: Callable[[Any], TrainState] = jax.jit(init, out_shardings=shardings)
  return jitted


def state_specs(
  task: Task,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
) -> TrainState:
  """The state as `ShapeDtypeStruct`s with shardings; nothing is computed.

  Moments lie where their parameters do, scalars everywhere.
  """
  specs: TrainState = jax.eval_shape(
    lambda seed: _init(task, optimizer, seed),
    jax.ShapeDtypeStruct((), jnp.uint32),
  )
  params = meshes.param_shardings(specs.params, task.tensor_specs(), mesh)
  everywhere = meshes.replicated(mesh)
  moments = optax.tree_map_params(
    optimizer,
    lambda _, sharding: sharding,
    specs.opt_state,
    params,
    transform_non_params=lambda _: everywhere,
  )
  return TrainState(
    params=jax.tree.map(_placed, specs.params, params),
    opt_state=jax.tree.map(_placed, specs.opt_state, moments),
    seed=_placed(specs.seed, everywhere),
  )


def make_train_step(
  task: Task,
  optimizer: optax.GradientTransformation,
  config: Optimizer,
  schedule: Schedule,
  mesh: jax.sharding.Mesh,
  microbatches: int = 1,
  agrees: bool = False,
) -> Any:
  """Returns the jitted inner step; the state it is given is donated.

  step(state, batch, schedule_step, step, learner) -> (state, metrics), with
  int32 scalars: `schedule_step` sets the rate, `step` and `learner` the
  dropout key. Metrics are float32 scalars `loss` (mean over tokens, before
  the update), `grad_norm` (before clipping), `learning_rate`, and the int32
  scalar `tokens`.

  Args:
    task: loss and parameters.
    optimizer: from `make_optimizer`.
    config: holds the peak rate.
    schedule: the rate's course.
    mesh: where state and batch live.
    microbatches: pieces of equal size whose gradients are averaged, which
      equals the gradient of the whole batch.
    agrees: of a learner of several hosts, whose step carries the lanes on
      which they agree: a last argument int32[devices, lanes], split over the
      devices; metrics then have its minimum `low` and maximum `high`.
  """
  specs = state_specs(task, optimizer, mesh)
  shardings = jax.tree.map(lambda spec: spec.sharding, specs)
  rows, everywhere = meshes.batch_sharding(mesh), meshes.replicated(mesh)

  def train_step(
    state: TrainState, batch: Batch, schedule_step: Any, step: Any, learner: Any
  ) -> tuple[TrainState, Metrics]:
    key = dropout_key(state.seed, learner, step)
    loss, grads, tokens = _gradients(
      task, state.params, batch, key, microbatches, rows
    )
    rate = learning_rate(config, schedule, schedule_step)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = jax.tree.map(
      lambda p, u: (p - rate * u).astype(p.dtype), state.params, updates
    )
    metrics = {
      "loss": loss,
      "grad_norm": optax.tree.norm(grads),
      "learning_rate": rate,
      "tokens": tokens,
    }
    return TrainState(params, opt_state, state.seed), metrics

  inputs = (shardings, rows, everywhere, everywhere, everywhere)
  if agrees:

    def agreeing_step(
      state: TrainState,
      batch: Batch,
      schedule_step: Any,
      step: Any,
      learner: Any,
      lanes_DxL: jax.Array,
    ) -> tuple[TrainState, Metrics]:
      state, metrics = train_step(state, batch, schedule_step, step, learner)
      low, high = span(lanes_DxL)
      return state, {**metrics, "low": low, "high": high}

    return jax.jit(
      agreeing_step,
      donate_argnums=(0,),
      in_shardings=(*inputs, rows),
      out_shardings=(shardings, everywhere),
    )
  return jax.jit(
    train_step,
    donate_argnums=(0,),
    in_shardings=inputs,
    out_shardings=(shardings, everywhere),
  )


def compile_train_step(
  train_step: Any,
  state: TrainState,
  batch: Batch,
  mesh: jax.sharding.Mesh,
  *lanes: jax.ShapeDtypeStruct,
) -> TrainStep:
  """Compiles ahead of time, from specs.

  Args:
    train_step: from `make_train_step`.
    state: from `state_specs`.
    batch: specs of a global batch, from the data pipeline itself.
    mesh: where the batch lives.
    lanes: of a step that agrees: their spec.

  Returns:
    The executable; feeding it other shapes, dtypes or shardings raises.
  """
  rows = meshes.batch_sharding(mesh)
  scalar = jax.ShapeDtypeStruct((), jnp.int32)
  placed = jax.tree.map(lambda spec: _placed(spec, rows), batch)
  compiled: TrainStep = train_step.lower(
    state, placed, scalar, scalar, scalar, *lanes
  ).compile()
  return compiled


def put_batch(batch: Batch, mesh: jax.sharding.Mesh) -> Batch:
  """Moves this host's rows of a batch to its devices."""
  rows = meshes.batch_sharding(mesh)
  return jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(rows, x), batch
  )


def _init(
  task: Task, optimizer: optax.GradientTransformation, seed: Any
) -> TrainState:
  params = task.init(seed)
  return TrainState(params, optimizer.init(params), jnp.uint32(seed))


def _placed(spec: Any, sharding: jax.sharding.Sharding) -> Any:
  return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)


def _gradients(
  task: Task,
  params: Any,
  batch: Batch,
  key: jax.Array,
  microbatches: int,
  rows: jax.sharding.NamedSharding,
) -> tuple[jax.Array, Any, jax.Array]:
  """(mean loss, its gradient, tokens), accumulated over microbatches."""
  value_and_grad = jax.value_and_grad(task.loss, has_aux=True)
  if microbatches == 1:
    (loss, metrics), grads = value_and_grad(params, batch, key)
    return loss, grads, metrics["tokens"]

  def one(total: Any, piece: tuple[Batch, jax.Array]) -> tuple[Any, jax.Array]:
    part, part_key = piece
    part = jax.tree.map(
      lambda x: jax.lax.with_sharding_constraint(x, rows), part
    )
    (loss, metrics), grads = value_and_grad(params, part, part_key)
    return jax.tree.map(jnp.add, total, (loss, grads)), metrics["tokens"]

  zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
  pieces = jax.tree.map(lambda x: _cut(x, microbatches), batch)
  keys = jax.random.split(key, microbatches)
  total, tokens = jax.lax.scan(one, zero, (pieces, keys))
  loss, grads = jax.tree.map(lambda x: x / microbatches, total)
  return loss, grads, jnp.sum(tokens, dtype=jnp.int32)


def _cut(x: jax.Array, microbatches: int) -> jax.Array:
  """Rows i, i + n, i + 2n, ... become microbatch i of n.

  Strided, so that every device finds its own rows in each microbatch.
  """
  if x.shape[0] % microbatches:
    raise ConfigError(
      f"a batch of {x.shape[0]} sequences cannot be cut into "
      f"Local.microbatches = {microbatches} equal pieces"
    )
  folded = x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:])
  return jnp.swapaxes(folded, 0, 1)
