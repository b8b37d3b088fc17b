"""The global snapshot comes back as it was saved."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from decoupled.checkpoint import syncer_store
from decoupled.checkpoint.syncer_store import GlobalSnapshot, LearnerPlace
from decoupled.types import Manifest, Role, TensorSpec, Unit, Version


def snapshot(rounds: int, seed: int = 0) -> GlobalSnapshot:
  rng = np.random.default_rng(seed)
  manifest = Manifest(
    tensors=(
      TensorSpec("embed/table", (7, 4), "float32", Role.EMBEDDING),
      TensorSpec("layers/w", (2, 4, 4), "float32", stacked=True),
      TensorSpec("norm/scale", (), "bfloat16"),
      TensorSpec("stats/mean", (4,), "float32", Role.STATISTIC),
    ),
    fragments=(
      (Unit("embed/table"), Unit("norm/scale")),
      (Unit("layers/w", 1), Unit("stats/mean")),
      (Unit("layers/w", 0),),
    ),
    owners=("", "", ""),
  )

  def fragment(units):
    return tuple(
      rng.standard_normal(manifest.shape(unit)).astype(np.float32)
      for unit in units
    )

  return GlobalSnapshot(
    run_id="run-1",
    term=3,
    rounds=rounds,
    common_step=rounds * 2,
    fullest=3,
    versions=(Version(3, 4), Version(3, 5), Version(2, 3)),
    manifest=manifest,
    contract=(("Exchange.H", "24"), ("Outer.momentum", "0.8")),
    fragments=tuple(fragment(units) for units in manifest.fragments),
    outer=(*(fragment(units) for units in manifest.fragments[:2]), ()),
    learners={
      0: LearnerPlace(4, 1000, (17, 32)),
      2: LearnerPlace(6, 900, (3, 0)),
    },
  )


def _same(one, other):
  for a, b in zip(one, other, strict=True):
    for x, y in zip(a, b, strict=True):
      assert isinstance(y, np.ndarray)
      assert x.dtype == y.dtype
      assert x.shape == y.shape
      assert x.tobytes() == y.tobytes()


def test_roundtrip(tmp_path):
  saved = snapshot(5)
  path = syncer_store.save_global(tmp_path, 5, saved)
  found = syncer_store.restore_newest(tmp_path)
  assert (found.path, found.number) == (path, 5)
  _same(saved.fragments, found.value.fragments)
  _same(saved.outer, found.value.outer)
  for field in dataclasses.fields(GlobalSnapshot):
    if field.name not in ("fragments", "outer"):
      assert getattr(found.value, field.name) == getattr(saved, field.name)


def test_version0_is_kept_beside_the_newest(tmp_path):
  for rounds in (0, 5, 6, 7):
    state = snapshot(rounds, seed=rounds)
    syncer_store.save_global(tmp_path, rounds, state, keep=2)
  first = syncer_store.restore_version0(tmp_path)
  assert first.value.is_version0
  _same(snapshot(0, seed=0).fragments, first.value.fragments)
  assert syncer_store.restore_newest(tmp_path).value.rounds == 7
  assert len(list((tmp_path / "global").iterdir())) == 3


def test_nothing_saved(tmp_path):
  assert syncer_store.restore_newest(tmp_path) is None
  assert syncer_store.restore_version0(tmp_path) is None


@pytest.mark.parametrize("part", ["state.json", "arrays"])
def test_damage_anywhere_falls_back(tmp_path, part):
  """Any one file of the newest snapshot, damaged, gives the previous one."""
  syncer_store.save_global(tmp_path, 1, snapshot(1))
  newest = Path(syncer_store.save_global(tmp_path, 2, snapshot(2)))
  root = newest / part
  files = [root] if root.is_file() else sorted(root.rglob("*"))
  for file in [f for f in files if f.is_file()]:
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if whole else b"x")
    found = syncer_store.restore_newest(tmp_path)
    assert found.value.rounds == 1, file
    assert str(file.relative_to(newest)) in found.skipped[0]
    file.write_bytes(whole)
  assert syncer_store.restore_newest(tmp_path).value.rounds == 2


def test_whole_tensors_are_put_together_again(tmp_path):
  state = snapshot(1)
  tensors = state.tensors()
  assert list(tensors) == [spec.name for spec in state.manifest.tensors]
  np.testing.assert_array_equal(
    tensors["layers/w"],
    np.stack([state.fragments[2][0], state.fragments[1][0]]),
  )
  assert tensors["norm/scale"].dtype.name == "bfloat16"
  assert tensors["norm/scale"].shape == ()
