"""Which boxes of a unit each host of a learner sends.

Every element is sent by exactly one host that has it. What several hosts have
is divided among them; what is too small to be divided goes to them in turn.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from decoupled.types import Slice

Box = tuple[tuple[int, ...], tuple[int, ...]]


def owned(
  holders: Mapping[Box, Sequence[int]], unit: int, host: int
) -> tuple[Slice, ...]:
  """The boxes that one host sends.

  Args:
    holders: per box of the unit the ranks of the hosts that have it.
    unit: its number in the fragment.
    host: rank.
  """
  mine: list[Slice] = []
  for turn, (start, stop) in enumerate(sorted(holders)):
    ranks = sorted(set(holders[start, stop]))
    sizes = [b - a for a, b in zip(start, stop, strict=True)]
    axis = max(range(len(sizes)), key=sizes.__getitem__, default=None)
    if axis is None or sizes[axis] < len(ranks):
      if ranks[(unit + turn) % len(ranks)] == host:
        mine.append(Slice(unit, start, stop))
      continue
    shares = range(len(ranks) + 1)
    cuts = [start[axis] + sizes[axis] * i // len(ranks) for i in shares]
    for rank, (low, high) in zip(ranks, itertools.pairwise(cuts), strict=True):
      if rank == host:
        mine.append(
          Slice(unit, _with(start, axis, low), _with(stop, axis, high))
        )
  return tuple(mine)


def holders_of(array: jax.Array) -> dict[Box, list[int]]:
  """Per box of an array the ranks of the processes that have it."""
  found: dict[Box, list[int]] = {}
  where: Mapping[Any, Any] = array.sharding.devices_indices_map(array.shape)
  for device, index in where.items():
    found.setdefault(_box(index, array.shape), []).append(device.process_index)
  return found


def shards_of(
  array: jax.Array, slices: Sequence[Slice]
) -> list[tuple[Slice, jax.Shard]]:
  """For each slice a shard on this host that has all of it."""
  shards = {_box(s.index, array.shape): s for s in array.addressable_shards}
  return [
    (
      wanted,
      next(
        shard
        for (start, stop), shard in shards.items()
        if all(a <= b for a, b in zip(start, wanted.start, strict=True))
        and all(a >= b for a, b in zip(stop, wanted.stop, strict=True))
      ),
    )
    for wanted in slices
  ]


def data_of(array: jax.Array, slices: Sequence[Slice]) -> list[np.ndarray]:
  """The slices in float32 on the host; each keeps nothing else alive."""
  found = []
  for wanted, shard in shards_of(array, slices):
    start, _ = _box(shard.index, array.shape)
    index = tuple(
      slice(a - at, b - at)
      for a, b, at in zip(wanted.start, wanted.stop, start, strict=True)
    )
    found.append(np.array(np.asarray(shard.data)[index], np.float32))
  return found


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
  ends = [part.indices(size) for part, size in zip(index, shape, strict=True)]
  return tuple(a for a, _, _ in ends), tuple(b for _, b, _ in ends)


def _with(where: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
  return (*where[:axis], value, *where[axis + 1 :])
