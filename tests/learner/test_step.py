"""The inner step: one program, the same numbers on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled.data.pipeline import batch_spec
from decoupled.errors import ConfigError
from decoupled.learner import mesh as meshes
from decoupled.learner import step as steps
from decoupled.learner.optimizer import make_optimizer
from decoupled.learner.settings import Mesh, Optimizer, Schedule
from decoupled.models.config import Transformer
from decoupled.models.task import LanguageModel

SHAPE = {
  "vocab": 256,
  "layers": 2,
  "width": 16,
  "heads": 2,
  "kv_heads": 1,
  "mlp_width": 16,
  "scan": True,
}
SEQUENCES, CONTEXT = 8, 12
OPTIMIZER = Optimizer(learning_rate=1e-2)


class Counting(LanguageModel):
  """Notes each trace of its loss."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    object.__setattr__(self, "traced", [])

  def loss(self, params, batch, key):
    self.traced.append(batch.shape)
    return super().loss(params, batch, key)


class Program:
  """Everything a learner compiles, on one mesh."""

  def __init__(self, data, fsdp, microbatches, dropout):
    self.mesh = meshes.make_mesh(Mesh(data, fsdp))
    self.task = Counting(
      Transformer(dropout=dropout, **SHAPE),
      activations=meshes.batch_sharding(self.mesh),
    )
    self.optimizer = make_optimizer(OPTIMIZER, self.task.tensor_specs())
    self.specs = steps.state_specs(self.task, self.optimizer, self.mesh)
    self.jitted = steps.make_train_step(
      self.task,
      self.optimizer,
      OPTIMIZER,
      Schedule(warmup_steps=2, decay_steps=500),
      self.mesh,
      microbatches,
    )
    self.step = steps.compile_train_step(
      self.jitted, self.specs, batch_spec(CONTEXT, SEQUENCES), self.mesh
    )
    self.init = steps.make_init(self.task, self.optimizer, self.mesh)

  def start(self, seed=0):
    """The initial state, without compiling `init` on this mesh too."""
    state = jax.tree.map(np.asarray, program(1, 1).init(np.uint32(seed)))
    shardings = jax.tree.map(lambda spec: spec.sharding, self.specs)
    return jax.device_put(state, shardings)

  def run(self, state, batch, step=0, learner=0):
    placed = steps.put_batch(batch, self.mesh)
    return self.step(
      state, placed, np.int32(step), np.int32(step), np.int32(learner)
    )


@functools.cache
def program(data, fsdp, microbatches=1, dropout=0.0) -> Program:
  """Compiled once; tests share it."""
  return Program(data, fsdp, microbatches, dropout)


def batch(seed=0, sequences=SEQUENCES, context=CONTEXT) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (sequences, context + 1), np.int32)


def assert_close(left, right, atol):
  for a, b in zip(*map(jax.tree.leaves, (left, right)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=atol)


def described(tree):
  return [
    (leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(tree)
  ]


@pytest.mark.parametrize("axes", [(1, 1), (2, 2)])
def test_the_state_keeps_shape_dtype_and_sharding(axes):
  built = program(*axes)
  state = built.init(np.uint32(0))
  before = described(state)
  after, _ = built.run(state, batch())
  assert before == described(built.specs) == described(after)


def test_the_given_state_is_donated():
  built = program(1, 1)
  state = built.init(np.uint32(0))
  built.run(state, batch())
  leaves = jax.tree.leaves((state.params, state.opt_state))
  assert all(leaf.is_deleted() for leaf in leaves)


def test_compiling_and_many_batches_take_one_trace():
  built = program(1, 1)
  state = built.init(np.uint32(0))
  for i in range(5):
    placed = steps.put_batch(batch(i), built.mesh)
    scalars = (np.int32(i), np.int32(i), np.int32(0))
    state, _ = built.jitted(state, placed, *scalars)
  assert built.task.traced == [(SEQUENCES, CONTEXT + 1)]


@pytest.mark.parametrize(
  "bad",
  [
    batch(sequences=SEQUENCES + 1),
    batch(context=CONTEXT + 1),
    batch().astype(np.float32),
  ],
)
def test_the_compiled_step_refuses_another_batch(bad):
  built = program(1, 1)
  state = built.init(np.uint32(0))
  with pytest.raises(TypeError):
    built.run(state, bad)


def test_a_sharded_step_equals_one_device():
  alone, sharded = program(1, 1), program(2, 2)
  states = [built.init(np.uint32(3)) for built in (alone, sharded)]
  assert_close(states[0].params, states[1].params, atol=0)
  kernels = jax.tree.leaves(states[1].params)
  assert any(not leaf.sharding.is_fully_replicated for leaf in kernels)
  for i in range(3):
    (states[0], m), (states[1], n) = (
      built.run(state, batch(i), step=i)
      for built, state in zip((alone, sharded), states, strict=True)
    )
    assert_close(m, n, atol=1e-5)
  # Adam divides tiny gradients by tiny moments: rounding shows there
  assert_close(states[0].params, states[1].params, atol=2e-3)


def test_accumulated_gradients_equal_one_big_batch():
  whole = program(1, 1)
  pieces = program(2, 1, microbatches=2)
  results = []
  for built in (whole, pieces):
    state, metrics = built.run(built.start(), batch())
    # the first moment is the clipped gradient times 1 - b1
    results.append((metrics, state.opt_state[1].mu))
  assert results[0][0]["tokens"] == SEQUENCES * CONTEXT
  assert_close(*results, atol=1e-5)


def test_microbatches_must_divide_the_batch():
  with pytest.raises(ConfigError, match="microbatches = 3"):
    program(1, 1, microbatches=3)


def test_the_schedule_step_sets_the_rate():
  built = program(1, 1)
  found = [
    float(
      built.run(built.init(np.uint32(0)), batch(), step=s)[1]["learning_rate"]
    )
    for s in (0, 1, 600)
  ]
  np.testing.assert_allclose(found, [0.005, 0.01, 0.001], rtol=1e-5)


def test_metrics_are_the_loss_before_the_update_and_the_unclipped_norm():
  built = program(1, 1)
  params = built.start().params
  (loss, _), grads = jax.jit(jax.value_and_grad(built.task.loss, has_aux=True))(
    params, batch(), None
  )
  _, metrics = built.run(built.init(np.uint32(0)), batch())
  norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads)))
  np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
  np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)


def test_dropout_depends_on_seed_learner_and_step_and_on_nothing_else():
  built = program(1, 1, dropout=0.5)

  def loss(seed=0, step=0, learner=0):
    state = built.start()
    other = jax.device_put(jnp.uint32(seed), state.seed.sharding)
    state = state._replace(seed=other)
    return float(built.run(state, batch(), step, learner)[1]["loss"])

  draws = [loss(), loss(seed=1), loss(step=1), loss(learner=1)]
  assert len(set(draws)) == 4
  assert loss() == draws[0]


def test_the_loss_falls_on_text_that_can_be_learnt():
  built = program(1, 1)
  text = np.frombuffer(
    b"the quick brown fox jumps over the dog. " * 4, np.uint8
  )
  state = built.init(np.uint32(0))
  losses = []
  rng = np.random.default_rng(0)
  for i in range(60):
    starts = rng.integers(0, len(text) - CONTEXT - 1, SEQUENCES)
    rows = text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
    state, metrics = built.run(state, rows, step=i)
    losses.append(float(metrics["loss"]))
  assert losses[0] > 5
  assert np.mean(losses[-5:]) < 0.5 * losses[0]
