"""A learner's state comes back bit for bit, on any mesh."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from decoupled.checkpoint import learner_store
from decoupled.errors import DecoupledError

META = {"schedule_step": 40, "step": 12, "tokens": 99, "position": [3, 8]}


def _mesh(devices: int) -> Mesh:
  return Mesh(np.array(jax.devices()[:devices]), ("fsdp",))


def _tree(mesh: Mesh):
  params = {
    "w": jnp.arange(64 * 8, dtype=jnp.float32).reshape(64, 8) / 7,
    "half": jnp.arange(16, dtype=jnp.bfloat16),
  }
  state = optax.adamw(1e-3).init(params)
  tree = {
    "params": params,
    "opt": state,
    "key": jax.random.key_data(jax.random.key(3)),
  }
  return jax.tree.map(lambda x: jax.device_put(x, _sharding(mesh, x)), tree)


def _sharding(mesh: Mesh, leaf) -> NamedSharding:
  return NamedSharding(mesh, P("fsdp") if leaf.ndim and leaf.size > 8 else P())


def _abstract(tree, mesh: Mesh):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=_sharding(mesh, x)
    ),
    tree,
  )


def _equal(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
  ("before", "devices"), [(8, 1), (8, 2), (8, 4), (1, 1), (1, 4)]
)
def test_saved_on_some_devices_restored_on_others(tmp_path, before, devices):
  assert len(jax.devices()) >= 8
  tree = _tree(_mesh(before))
  learner_store.save_learner(tmp_path, 1, 40, tree, META)
  mesh = _mesh(devices)
  with jax.set_mesh(mesh):
    found = learner_store.restore_learner(tmp_path, 1, _abstract(tree, mesh))
  _equal(tree, found.tree)
  assert found.meta == META
  assert (found.step, found.skipped) == (40, ())
  for leaf in jax.tree.leaves(found.tree):
    assert leaf.sharding == _sharding(mesh, leaf)


def test_what_is_saved_survives_donation(tmp_path):
  """The tree may be donated as soon as the save has returned."""
  mesh = _mesh(8)
  tree = _tree(mesh)
  kept = jax.tree.map(np.array, tree)
  learner_store.save_learner(tmp_path, 0, 1, tree, META)
  bump = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
  jax.block_until_ready(bump(tree))
  found = learner_store.restore_learner(tmp_path, 0, _abstract(kept, mesh))
  _equal(kept, found.tree)


def test_learners_share_a_store_without_sharing_a_path(tmp_path):
  mesh = _mesh(1)
  tree = _tree(mesh)
  for learner in (0, 1):
    learner_store.save_learner(tmp_path, learner, 7, tree, {"id": learner})
  for learner in (0, 1):
    found = learner_store.restore_learner(
      tmp_path, learner, _abstract(tree, mesh)
    )
    assert found.meta == {"id": learner}
  assert (
    learner_store.restore_learner(tmp_path, 2, _abstract(tree, mesh)) is None
  )


def test_a_torn_save_gives_the_previous_one(tmp_path):
  mesh = _mesh(2)
  tree = _tree(mesh)
  learner_store.save_learner(tmp_path, 0, 1, tree, {"n": 1})
  newest = Path(learner_store.save_learner(tmp_path, 0, 2, tree, {"n": 2}))
  files = [p for p in newest.rglob("*") if p.is_file()]
  largest = max(files, key=lambda p: p.stat().st_size)
  os.truncate(largest, largest.stat().st_size // 2)
  found = learner_store.restore_learner(tmp_path, 0, _abstract(tree, mesh))
  assert found.meta == {"n": 1}
  assert str(newest) in found.skipped[0]


def test_another_model_is_refused_not_squeezed_in(tmp_path):
  mesh = _mesh(1)
  tree = {"w": jnp.zeros((4, 4))}
  learner_store.save_learner(tmp_path, 0, 1, tree, META)
  other = _abstract({"w": jnp.zeros((4, 5))}, mesh)
  with pytest.raises(DecoupledError, match="no snapshot under"):
    learner_store.restore_learner(tmp_path, 0, other)


def test_no_room_to_warm_up_in_is_said_and_costs_nothing(
  tmp_path, monkeypatch, caplog
):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
  learner_store.warm_up(np.zeros(1))
  assert "not warmed up" in caplog.text
  (tmp_path / "there").mkdir()
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "there"))
  learner_store.warm_up(np.zeros(1))
  assert not list((tmp_path / "there").iterdir())
