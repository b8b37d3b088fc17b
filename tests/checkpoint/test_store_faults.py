"""Disks that fill up, permissions that go, stores that are moved."""

import contextlib
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from decoupled.checkpoint import commit, learner_store, syncer_store
from decoupled.errors import DecoupledError
from tests.checkpoint.test_syncer_store import snapshot

_NOBODY = 65534


@contextlib.contextmanager
def full_disk(room: int) -> Iterator[None]:
  """No file grows beyond `room` bytes: real errors of real writes."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def not_permitted(folder: Path) -> Iterator[None]:
  """Nobody may write in a folder, not even who runs the tests as root."""
  mode = folder.stat().st_mode
  folder.chmod(0o500)
  root = os.geteuid() == 0
  if root:
    os.seteuid(_NOBODY)
  try:
    yield
  finally:
    if root:
      os.seteuid(0)
    folder.chmod(mode)


def wide(rounds: int):
  """A snapshot whose arrays do not compress away."""
  small = snapshot(rounds)
  noise = np.random.default_rng(rounds).standard_normal(1 << 18)
  outer = ((noise.astype(np.float32),), *small.outer[1:])
  return type(small)(**{**vars(small), "outer": outer})


def test_a_disk_that_fills_up_keeps_what_there_is(tmp_path):
  store = tmp_path / "store"
  first = syncer_store.save_global(store, 1, wide(1))
  with full_disk(1 << 16), pytest.raises(DecoupledError) as error:
    syncer_store.save_global(store, 2, wide(2))
  assert "\n" not in str(error.value)
  assert "free space" in str(error.value)
  # nothing half written stays, where it would only take more room
  assert [str(p) for p in (store / "global").iterdir()] == [first]
  found = syncer_store.restore_newest(store)
  assert (found.value.rounds, found.skipped) == (1, ())
  syncer_store.save_global(store, 3, wide(3))
  assert syncer_store.restore_newest(store).value.rounds == 3


def test_no_room_for_the_marker_is_no_snapshot(tmp_path):
  group = tmp_path / "group"

  def write(folder):
    for i in range(40):
      (folder / f"{i}").write_text("x")

  first = commit.save(group, 1, write)
  with full_disk(1000), pytest.raises(DecoupledError, match="cannot save"):
    commit.save(group, 2, write)
  assert commit.restore(group, lambda folder: None).path == first


def test_a_learner_without_room_trains_on_what_it_had(tmp_path):
  tree = {"m": jnp.asarray(np.random.default_rng(0).standard_normal(1 << 18))}
  learner_store.save_learner(tmp_path / "store", 0, 1, tree, {"n": 1})
  with full_disk(1 << 16), pytest.raises(DecoupledError):
    learner_store.save_learner(tmp_path / "store", 0, 2, tree, {"n": 2})
  abstract = {"m": jnp.zeros_like(tree["m"])}
  found = learner_store.restore_learner(tmp_path / "store", 0, abstract)
  assert (found.meta, found.skipped) == ({"n": 1}, ())


@pytest.mark.parametrize("when", ["before", "during", "at the end"])
def test_permission_that_is_lost_costs_one_snapshot(tmp_path, when, caplog):
  tmp_path.chmod(0o755)
  group = tmp_path / "group"
  lost = contextlib.ExitStack()

  def write(folder):
    (folder / "a").write_text("a")
    if when == "during":
      lost.enter_context(not_permitted(Path(folder)))
    (folder / "b").write_text("b")

  def may_commit():
    if when == "at the end":
      (newest,) = (
        f for f in commit.folders(group) if f.name[:12] == "0" * 11 + "2"
      )
      lost.enter_context(not_permitted(Path(newest)))

  first = commit.save(group, 1, lambda folder: (folder / "a").write_text("1"))
  with lost:
    if when == "before":
      lost.enter_context(not_permitted(group))
    with pytest.raises(DecoupledError) as error:
      commit.save(group, 2, write, may_commit=may_commit)
  assert "ermission denied" in str(error.value)
  assert "\n" not in str(error.value)

  def read(folder):
    return (folder / "a").read_text()

  found = commit.restore(group, read)
  assert found.path == first
  # permission is back: the next one is saved, what was left is cleared away
  third = commit.save(group, 3, lambda folder: (folder / "a").write_text("3"))
  assert commit.restore(group, read).path == third
  assert sorted(str(p) for p in group.iterdir()) == [first, third]


def test_a_store_that_was_copied_elsewhere_is_as_good(tmp_path):
  here, there = tmp_path / "here", tmp_path / "far" / "there"
  tree = {"m": jnp.arange(64.0)}
  syncer_store.save_global(here, 0, snapshot(0))
  syncer_store.save_global(here, 7, snapshot(7))
  learner_store.save_learner(here, 1, 9, tree, {"n": 9})
  shutil.copytree(here, there, copy_function=shutil.copyfile)
  shutil.rmtree(here)
  found = syncer_store.restore_newest(there)
  assert (found.value.rounds, found.skipped) == (7, ())
  for ours, theirs in zip(
    snapshot(7).fragments, found.value.fragments, strict=True
  ):
    assert [a.tobytes() for a in ours] == [a.tobytes() for a in theirs]
  assert syncer_store.restore_version0(there).value.is_version0
  learner = learner_store.restore_learner(there, 1, tree)
  assert learner.meta == {"n": 9}
  np.testing.assert_array_equal(learner.tree["m"], tree["m"])
  # and it goes on from there
  syncer_store.save_global(there, 8, snapshot(8))
  assert syncer_store.restore_newest(there).value.rounds == 8


def test_a_flipped_bit_in_a_learners_array_is_named(tmp_path):
  tree = {"m": jnp.asarray(np.random.default_rng(0).standard_normal(4096))}
  learner_store.save_learner(tmp_path, 0, 1, tree, {"n": 1})
  newest = Path(learner_store.save_learner(tmp_path, 0, 2, tree, {"n": 2}))
  largest = max(
    (p for p in newest.rglob("*") if p.is_file()),
    key=lambda p: p.stat().st_size,
  )
  whole = bytearray(largest.read_bytes())
  whole[len(whole) // 2] ^= 4
  largest.write_bytes(whole)
  found = learner_store.restore_learner(tmp_path, 0, tree)
  assert found.meta == {"n": 1}
  assert str(largest.relative_to(newest)) in found.skipped[0]


def test_another_format_is_refused_with_both_numbers(tmp_path):
  made = Path(syncer_store.save_global(tmp_path / "other", 1, snapshot(1)))
  text = (made / syncer_store.STATE).read_text()

  def write(folder):
    shutil.copytree(made / "arrays", folder / "arrays")
    changed = text.replace('"format": 1', '"format": 99')
    (folder / syncer_store.STATE).write_text(changed)

  # good in itself: a later version wrote it
  commit.save(tmp_path / "global", 1, write)
  with pytest.raises(DecoupledError, match=r"format 99.* reads 1"):
    syncer_store.restore_newest(tmp_path)
