"""What a dead host leaves, and the step that all can go on from."""

import dataclasses
import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from decoupled.errors import Refused
from decoupled.learner import buddies, mesh, settings
from decoupled.learner.buddies import HostCopy, Memory, Recovery, Shard


def refused(reason: str) -> Any:
  return pytest.RaisesExc(Refused, check=lambda error: error.reason == reason)


def a_copy(owner: int, step: int, epoch: int = 1) -> HostCopy:
  data = np.full(3, step, np.float32)
  shard = Shard(0, ((0, 3),), data, buddies._crc(data))
  return HostCopy(owner, epoch, step, {"tokens": step}, (shard,))


def test_any_single_death_leaves_the_newest_complete_step() -> None:
  hosts = 3
  memories = [Memory() for _ in range(hosts)]
  for step, owner in itertools.product((10, 20), range(hosts)):
    for keeper in (owner, buddies.buddy(owner, hosts)):
      memories[keeper].keep(a_copy(owner, step))
  # the copies of step 30 of host 2 have not reached anybody
  for owner in (0, 1):
    memories[owner].keep(a_copy(owner, 30))
  for dead in range(hosts):
    held = {r: memories[r].held() for r in range(hosts) if r != dead}
    found = buddies.newest(held, hosts)
    assert found is not None
    assert found.step == 20
    expected = [0, 1, 2]
    expected[dead] = buddies.buddy(dead, hosts)
    assert found.sources == tuple(expected)
  # two neighbours at once: one's copies are gone
  assert buddies.newest({2: memories[2].held()}, hosts) is None


@hypothesis.given(
  st.dictionaries(
    st.integers(0, 3),
    st.dictionaries(st.integers(0, 3), st.sets(st.integers(0, 5))),
  )
)
def test_a_recovery_is_complete_alive_and_the_newest(
  held: dict[int, dict[int, set[int]]],
) -> None:
  found = buddies.newest(held, 4)
  complete = [
    step
    for step in range(6)
    if all(
      any(step in copies.get(owner, ()) for copies in held.values())
      for owner in range(4)
    )
  ]
  assert (found.step if found else None) == max(complete, default=None)
  if found is not None:
    for owner, rank in enumerate(found.sources):
      assert found.step in held[rank][owner]


def test_replicated_state_goes_on_from_the_step_that_survivors_share() -> None:
  newest = buddies.newest_replicated
  assert newest({0: (7, 8), 2: (6, 7)}, 3) == Recovery(7, (0, 0, 2))
  assert newest({0: (9,), 1: (7,)}, 2) == Recovery(9, (0, 0))
  assert newest({1: (5,), 0: ()}, 2) == Recovery(5, (1, 1))
  assert newest({}, 2) is None


def test_a_memory_keeps_two_steps_and_nothing_of_a_lost_timeline() -> None:
  memory = Memory()
  for step in (1, 2, 3):
    memory.keep(a_copy(0, step))
  assert memory.held() == {0: (2, 3)}
  memory.keep(a_copy(0, 3, epoch=2))  # the learner went back to 2, and on
  with refused("old"):
    memory.keep(a_copy(0, 4, epoch=1))
  kept = memory.get(0, 3)
  assert kept is not None
  assert kept.epoch == 2
  memory.drop_after(2)
  assert memory.held() == {0: (2,)}
  assert memory.nbytes == 12


def test_a_damaged_copy_is_never_kept() -> None:
  copy = a_copy(0, 1)
  broken = dataclasses.replace(copy.shards[0], crc32=copy.shards[0].crc32 ^ 1)
  with refused("checksum"):
    Memory().keep(dataclasses.replace(copy, shards=(broken,)))


def test_a_tree_comes_back_bit_for_bit_even_if_its_buffers_are_donated() -> (
  None
):
  devices = mesh.make_mesh(settings.Mesh(data=2, fsdp=4))
  cut = NamedSharding(devices, PartitionSpec(None, "fsdp"))
  tree = {
    "w": jax.device_put(np.random.default_rng(0).normal(size=(4, 8)), cut),
    "half": jax.device_put(
      jnp.arange(8, dtype=jnp.bfloat16).reshape(1, 8), cut
    ),
    "count": jax.device_put(np.int32(7), mesh.replicated(devices)),
  }
  before = jax.tree.map(np.array, tree)
  specs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
  )
  copy = buddies.copy_to_host(tree, 0, 1, 5, {"tokens": 9})
  # replicas are copied once
  assert copy.nbytes == sum(x.nbytes for x in jax.tree.leaves(before))
  scrap = jax.jit(lambda t: jax.tree.map(lambda x: x * 0, t), donate_argnums=0)(
    tree
  )
  jax.block_until_ready(scrap)
  back = buddies.place(specs, [copy])
  jax.tree.map(
    np.testing.assert_array_equal, jax.tree.map(np.array, back), before
  )
  missing = dataclasses.replace(copy, shards=copy.shards[1:])
  with refused("incomplete"):
    buddies.place(specs, [missing])
