"""The task: a pure tree, its names and roles, and the loss."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled.algorithm import fragments
from decoupled.link import tree
from decoupled.models.config import Transformer
from decoupled.models.task import LanguageModel
from decoupled.types import Role

SMALL = Transformer(layers=2, width=16, heads=2, kv_heads=1, mlp_width=16)


def test_specs_describe_what_init_makes():
  task = LanguageModel(SMALL)
  params = jax.jit(task.init)(3)
  assert jax.tree.structure(params) == jax.tree.structure(task.param_specs())
  for leaf, spec, described in zip(
    tree.flatten(params),
    tree.flatten(task.param_specs()),
    task.tensor_specs(),
    strict=True,
  ):
    assert leaf.shape == spec.shape == described.shape
    assert str(leaf.dtype) == str(spec.dtype) == described.dtype
  assert [s.name for s in task.tensor_specs()] == list(tree.names(params))


@pytest.mark.parametrize(
  "config",
  [
    Transformer(),
    Transformer(scan=True, layers=2, kv_heads=4),
    Transformer(tie_embeddings=True, vocab=300, mlp_width=96),
  ],
)
def test_the_count_of_parameters_needs_no_model(config):
  specs = LanguageModel(config).tensor_specs()
  assert config.parameters == sum(math.prod(s.shape) for s in specs)


def test_parameters_are_plain_nested_dictionaries():
  def check(node):
    if isinstance(node, dict):
      assert all(isinstance(key, str) for key in node)
      for child in node.values():
        check(child)
    else:
      assert isinstance(node, jax.ShapeDtypeStruct)

  check(LanguageModel(SMALL).param_specs())


def test_the_same_seed_gives_the_same_parameters_and_another_does_not():
  init = jax.jit(LanguageModel(SMALL).init)
  first, again, other = (init(seed) for seed in (5, 5, 6))
  for a, b in zip(*map(jax.tree.leaves, (first, again)), strict=True):
    np.testing.assert_array_equal(a, b)
  assert not np.array_equal(first["head"]["kernel"], other["head"]["kernel"])


def test_embedding_and_head_are_embeddings_and_the_rest_weights():
  roles = {s.name: s.role for s in LanguageModel(SMALL).tensor_specs()}
  embeddings = {n for n, role in roles.items() if role is Role.EMBEDDING}
  assert embeddings == {"embed/embedding", "head/kernel"}
  assert set(roles.values()) == {Role.EMBEDDING, Role.WEIGHT}


def test_only_scanned_layers_are_stacked():
  scanned = LanguageModel(
    Transformer(layers=3, width=16, heads=2, kv_heads=1, scan=True)
  )
  for spec in scanned.tensor_specs():
    assert spec.stacked == spec.name.startswith("layers/")
    assert not spec.stacked or spec.shape[0] == 3
  assert not any(s.stacked for s in LanguageModel(SMALL).tensor_specs())


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("scheme", ["balanced", "tensor"])
def test_the_default_model_has_units_for_24_fragments(scan, scheme):
  task = LanguageModel(Transformer(scan=scan))
  assert 100_000 <= task.num_params() <= 200_000
  parts = fragments.fragment(task.tensor_specs(), 24, scheme)
  assert len(parts) == 24
  assert all(parts)


def test_layer_names_sort_as_the_layers_do():
  config = Transformer(layers=12, width=8, heads=1, kv_heads=1, mlp_width=8)
  found = [
    s.name.split("/")[1]
    for s in LanguageModel(config).tensor_specs()
    if s.name.endswith("attention_norm/scale")
  ]
  assert found == [f"{i:02d}" for i in range(12)]


def test_loss_is_the_mean_negative_log_likelihood():
  task = LanguageModel(SMALL)
  params = jax.jit(task.init)(0)
  batch = jax.random.randint(jax.random.key(0), (3, 6), 0, 256, jnp.int32)
  loss, metrics = jax.jit(lambda p, b: task.loss(p, b, None))(params, batch)
  logits = jax.jit(task.logits)(params, batch[:, :-1])
  logits = np.asarray(logits, np.float64)
  chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  picked = [
    chances[b, t, int(batch[b, t + 1])] for b in range(3) for t in range(5)
  ]
  np.testing.assert_allclose(loss, -np.mean(np.log(picked)), rtol=1e-5)
  assert metrics["tokens"] == 15
  assert abs(float(loss) - math.log(256)) < 0.2


def test_flops_count_matrices_and_attention_by_hand():
  config = Transformer(
    vocab=10, layers=2, width=8, heads=2, kv_heads=1, mlp_width=12
  )
  attention = 8 * 8 + 2 * 8 * 4 + 8 * 8  # query, key and value, out
  layer = attention + 3 * 8 * 12 + 2 * 8  # MLP, norms
  matrices = 2 * layer + 8 + 8 * 10  # last norm, head
  expected = 6 * matrices + 12 * 2 * 8 * 16
  assert LanguageModel(config).flops_per_token(16) == expected
