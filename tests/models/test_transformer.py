"""The model: shapes, causality, and its parts against plain oracles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled.errors import ConfigError
from decoupled.models.config import Transformer
from decoupled.models.task import LanguageModel
from decoupled.models.transformer import attend, rotate

TINY = Transformer(
  vocab=32, layers=2, width=16, heads=4, kv_heads=2, mlp_width=24
)


def tokens(batch: int = 2, length: int = 9, vocab: int = 32) -> jax.Array:
  key = jax.random.key(1)
  return jax.random.randint(key, (batch, length), 0, vocab, jnp.int32)


def model(**changes) -> LanguageModel:
  remat = changes.pop("remat", False)
  return LanguageModel(dataclasses.replace(TINY, **changes), remat=remat)


def random_params(task: LanguageModel) -> dict:
  """Drawn by NumPy: nothing to compile."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda spec: jnp.asarray(rng.normal(0, 0.3, spec.shape), spec.dtype),
    task.param_specs(),
  )


@functools.partial(jax.jit, static_argnums=0)
def logits_of(task, params, seen, key=None):
  return task.logits(params, seen, key)


def stacked(params: dict) -> dict:
  """The parameters of an unrolled model in the form of a scanned one."""
  layers = params["layers"]
  whole = jax.tree.map(
    lambda *leaves: jnp.stack(leaves), *[layers[name] for name in layers]
  )
  return {**params, "layers": whole}


@pytest.mark.parametrize("scan", [False, True])
def test_a_later_token_changes_no_earlier_logits(scan):
  task = model(scan=scan)
  params, seen = random_params(task), tokens()
  changed = seen.at[:, 5].set((seen[:, 5] + 1) % 32)
  before, after = (logits_of(task, params, x) for x in (seen, changed))
  np.testing.assert_array_equal(before[:, :5], after[:, :5])
  assert not np.allclose(before[:, 5:], after[:, 5:])


def test_grouped_query_attention_equals_attention_with_repeated_heads():
  rng = np.random.default_rng(0)
  q, k, v = (
    rng.normal(size=(2, 7, heads, 8)).astype(np.float32) for heads in (6, 2, 2)
  )
  wide_k, wide_v = np.repeat(k, 3, axis=2), np.repeat(v, 3, axis=2)
  scores = np.einsum("btnh,bsnh->bnts", q, wide_k) / np.sqrt(8)
  scores = np.where(np.tril(np.ones((7, 7), bool)), scores, -np.inf)
  share = np.exp(scores - scores.max(-1, keepdims=True))
  share /= share.sum(-1, keepdims=True)
  oracle = np.einsum("bnts,bsnh->btnh", share, wide_v)
  np.testing.assert_allclose(jax.jit(attend)(q, k, v), oracle, atol=1e-5)


def test_rotated_products_depend_on_the_distance_only():
  q, k = (jax.random.normal(jax.random.key(i), (8,)) for i in (2, 3))
  everywhere = jnp.ones((1, 10, 1, 1))
  turned_q = rotate(everywhere * q, 100.0)[0, :, 0]
  turned_k = rotate(everywhere * k, 100.0)[0, :, 0]
  products = np.asarray(turned_q @ turned_k.T)
  for distance in (-4, 0, 1, 3):
    along = np.diagonal(products, distance)
    np.testing.assert_allclose(along, along[0], rtol=1e-4, atol=1e-5)
  assert not np.allclose(products[0, 0], products[0, 3])


def test_position_zero_is_not_rotated():
  x = jax.random.normal(jax.random.key(0), (1, 3, 2, 8))
  np.testing.assert_array_equal(rotate(x, 1e4)[:, 0], x[:, 0])


def test_scanned_layers_start_with_the_same_parameters():
  params, params_L = (
    jax.jit(model(scan=scan).init)(0) for scan in (False, True)
  )
  for a, b in zip(
    jax.tree.leaves(stacked(params)), jax.tree.leaves(params_L), strict=True
  ):
    np.testing.assert_array_equal(a, b)


def test_scanned_layers_are_the_same_function_dropout_included():
  plain, scanned = (model(scan=scan, dropout=0.3) for scan in (False, True))
  params = random_params(plain)
  for key in (None, jax.random.key(7)):
    np.testing.assert_allclose(
      logits_of(plain, params, tokens(), key),
      logits_of(scanned, stacked(params), tokens(), key),
      atol=1e-5,
    )


def test_remat_gives_the_same_gradients():
  plain, again = (model(scan=True, remat=remat) for remat in (False, True))
  params = random_params(plain)

  def gradient(task):
    return jax.jit(jax.grad(lambda p: task.loss(p, tokens(), None)[0]))(params)

  for a, b in zip(
    *(jax.tree.leaves(gradient(task)) for task in (plain, again)), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scan", [False, True])
def test_remat_marks_every_block(scan):
  def programs(remat):
    task = model(scan=scan, remat=remat)
    params = random_params(task)
    return str(jax.make_jaxpr(lambda p: task.loss(p, tokens(), None))(params))

  blocks = 1 if scan else TINY.layers
  assert programs(remat=True).count("prevent_cse") == blocks
  assert programs(remat=False).count("prevent_cse") == 0


def test_bfloat16_compute_is_close_and_keeps_float32_outside():
  exact, rough = model(), model(compute_dtype="bfloat16")
  specs = jax.tree.leaves(rough.param_specs())
  assert {spec.dtype for spec in specs} == {jnp.dtype("float32")}
  params = random_params(exact)
  a, b = (logits_of(task, params, tokens()) for task in (exact, rough))
  assert b.dtype == jnp.float32
  assert b.shape == (2, 9, 32)
  assert not np.array_equal(a, b)
  spread = float(jnp.std(a))
  np.testing.assert_allclose(a, b, atol=0.1 * spread)


def test_dropout_needs_a_key_and_differs_between_keys():
  task = model(dropout=0.5)
  params = random_params(task)
  quiet = logits_of(task, params, tokens())
  draws = [logits_of(task, params, tokens(), jax.random.key(i)) for i in (0, 1)]
  assert not np.allclose(quiet, draws[0])
  assert not np.allclose(*draws)


def test_tied_embeddings_have_no_head_and_read_the_embedding_twice():
  task = model(tie_embeddings=True)
  params = random_params(task)
  assert "head" not in params
  untied = {**params, "head": {"kernel": params["embed"]["embedding"].T}}
  np.testing.assert_allclose(
    logits_of(task, params, tokens()),
    logits_of(model(), untied, tokens()),
    atol=1e-5,
  )


@pytest.mark.parametrize(
  ("changes", "both_sides"),
  [
    ({"width": 30}, ("width = 30", "heads = 4")),
    ({"kv_heads": 3}, ("heads = 4", "kv_heads = 3")),
    ({"width": 12}, ("width = 12", "size 3")),
    ({"layers": 0}, ("layers = 0", "at least 1")),
    ({"dropout": 1.0}, ("dropout = 1.0", "[0, 1)")),
    ({"rope_base": 0.5}, ("rope_base = 0.5", "above 1")),
    ({"compute_dtype": "float8"}, ("'float8'", "bfloat16")),
  ],
)
def test_impossible_shapes_are_refused_naming_both_sides(changes, both_sides):
  with pytest.raises(ConfigError) as error:
    dataclasses.replace(TINY, **changes)
  for side in both_sides:
    assert side in str(error.value)
