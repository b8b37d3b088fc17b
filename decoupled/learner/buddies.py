"""Copies of a host's shards in the memory of hosts: what a dead one leaves.

Every few steps a host keeps a copy of what only its devices hold (parameters,
optimizer state, key, position, counters), and so does its buddy, the next rank.
After a death the newest step of which every owner's copy is alive is the one to
go on from (`newest`). Where the state is the same on every host, a survivor's
own is enough (`newest_replicated`).

A failed collective can leave hosts one step apart. So the last two copies of an
owner are kept, never only one.
"""

import dataclasses
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from decoupled.errors import Refused

Index: TypeAlias = tuple[tuple[int, int], ...]  # per axis (start, stop)

KEPT = 2  # copies of one owner: its newest step and the one before


@dataclasses.dataclass(frozen=True)
class Shard:
  """A part of one leaf.

  Attributes:
    leaf: its number among the leaves of the tree.
    index: which part of it.
    data: its values, row-major.
    crc32: of them.
  """

  leaf: int
  index: Index
  data: np.ndarray
  crc32: int


@dataclasses.dataclass(frozen=True)
class HostCopy:
  """What one host's devices held after one step.

  Attributes:
    owner: its rank.
    epoch: in which epoch the step was finished.
    step: inner steps of the learner.
    counters: position, tokens and whatever else is to go on from here.
    shards: of all leaves.
  """

  owner: int
  epoch: int
  step: int
  counters: Mapping[str, int]
  shards: tuple[Shard, ...]

  @property
  def nbytes(self) -> int:
    return sum(shard.data.nbytes for shard in self.shards)

  def check(self) -> None:
    """Raises Refused('checksum') naming the leaf that is damaged."""
    for shard in self.shards:
      found = _crc(shard.data)
      if found != shard.crc32:
        raise Refused(
          "checksum",
          f"leaf {shard.leaf} of host {self.owner}'s copy of step {self.step} "
          f"has checksum {found:08x}, not {shard.crc32:08x}: it is dropped",
        )


@dataclasses.dataclass(frozen=True)
class Recovery:
  """Where a learner goes on.

  Attributes:
    step: from which step.
    sources: per owner the rank whose memory its copy comes from.
  """

  step: int
  sources: tuple[int, ...]


def buddy(rank: int, hosts: int) -> int:
  """Who keeps a rank's copies besides itself; itself, where it is alone."""
  return (rank + 1) % hosts


def newest(
  held: Mapping[int, Mapping[int, Collection[int]]], hosts: int
) -> Recovery | None:
  """The newest step of which every owner's copy is alive.

  Args:
    held: per living rank, and per owner, the steps of the copies it holds.
    hosts: owners there are.

  Returns:
    It, with the owner's own memory where that lives, else the lowest rank;
    None if there is no such step.
  """
  steps: list[set[int]] = []
  for owner in range(hosts):
    mine = [set(copies.get(owner, ())) for copies in held.values()]
    steps.append(set().union(*mine))
  complete = set.intersection(*steps) if steps else set()
  if not complete:
    return None
  step = max(complete)
  sources = [
    owner
    if step in held.get(owner, {}).get(owner, ())
    else min(rank for rank in held if step in held[rank].get(owner, ()))
    for owner in range(hosts)
  ]
  return Recovery(step, tuple(sources))


def newest_replicated(
  held: Mapping[int, Collection[int]], hosts: int
) -> Recovery | None:
  """The same where every host holds the whole state.

  The newest step that all survivors hold, so that none of them needs to be sent
  anything; where they share none, the newest there is.

  Args:
    held: per living rank the steps of its own copies.
    hosts: ranks there will be.
  """
  having = {rank: set(steps) for rank, steps in held.items() if steps}
  if not having:
    return None
  shared = set.intersection(*having.values())
  step = max(shared or set().union(*having.values()))
  giver = min(rank for rank, steps in having.items() if step in steps)
  return Recovery(
    step,
    tuple(
      rank if step in having.get(rank, ()) else giver for rank in range(hosts)
    ),
  )


class Memory:
  """The copies that one host keeps, of itself and of others; for any thread."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._copies: dict[int, list[HostCopy]] = {}

  def keep(self, copy: HostCopy) -> None:
    """Takes a copy in, and lets go of the oldest of that owner.

    Raises:
      Refused: `checksum`; `old`: of an epoch or a step that is over.
    """
    copy.check()
    with self._lock:
      mine = self._copies.setdefault(copy.owner, [])
      newest_epoch = max((each.epoch for each in mine), default=copy.epoch)
      if copy.epoch < newest_epoch:
        raise Refused(
          "old",
          f"host {copy.owner} sends step {copy.step} of epoch {copy.epoch}, "
          f"epoch {newest_epoch} is known",
        )
      # A new epoch may have gone back: what was after its step never happened.
      mine[:] = [each for each in mine if each.step < copy.step]
      mine.append(copy)
      del mine[:-KEPT]

  def get(self, owner: int, step: int) -> HostCopy | None:
    with self._lock:
      return next(
        (c for c in self._copies.get(owner, ()) if c.step == step), None
      )

  def held(self) -> dict[int, tuple[int, ...]]:
    """Per owner the steps of its copies."""
    with self._lock:
      return {
        owner: tuple(copy.step for copy in copies)
        for owner, copies in self._copies.items()
      }

  def drop_after(self, step: int) -> None:
    """Forgets what the agreed step has undone."""
    with self._lock:
      for copies in self._copies.values():
        copies[:] = [copy for copy in copies if copy.step <= step]

  @property
  def nbytes(self) -> int:
    with self._lock:
      return sum(c.nbytes for mine in self._copies.values() for c in mine)


def copy_to_host(
  tree: Any, owner: int, epoch: int, step: int, counters: Mapping[str, int]
) -> HostCopy:
  """This host's shards, each once; waits for them, so not for the loop.

  The tree must outlive that: a step that donates it has to get another one.
  """
  leaves: list[jax.Array] = jax.tree.leaves(tree)
  with jax.transfer_guard_device_to_host("allow"):
    for leaf in leaves:
      leaf.copy_to_host_async()
    shards = tuple(
      shard for i, leaf in enumerate(leaves) for shard in _shards(i, leaf)
    )
  return HostCopy(owner, epoch, step, dict(counters), shards)


def place(specs: Any, copies: Iterable[HostCopy]) -> Any:
  """A tree on this host's devices, from the copies of as many owners as needed.

  Args:
    specs: a tree of `ShapeDtypeStruct`s with the shardings of this epoch.
    copies: of one step.

  Raises:
    Refused: `checksum`; `incomplete`, naming the part that no copy holds.
  """
  parts: dict[tuple[int, Index], np.ndarray] = {}
  for copy in copies:
    copy.check()
    parts.update({(s.leaf, s.index): s.data for s in copy.shards})
  leaves, structure = jax.tree.flatten(specs)
  return jax.tree.unflatten(
    structure,
    [
      jax.make_array_from_callback(
        spec.shape, spec.sharding, _lookup(parts, number, spec)
      )
      for number, spec in enumerate(leaves)
    ],
  )


def _lookup(
  parts: Mapping[tuple[int, Index], np.ndarray], number: int, spec: Any
) -> Callable[[Any], np.ndarray]:
  def part(slices: Any) -> np.ndarray:
    index = _index(slices, spec.shape)
    found = parts.get((number, index))
    if found is None:
      raise Refused(
        "incomplete",
        f"no copy holds {index} of leaf {number} ({spec.dtype}{spec.shape}): "
        "the mesh differs from that of the copies, or a host's is missing",
      )
    if found.dtype != spec.dtype:
      raise Refused(
        "dtype", f"leaf {number} is {found.dtype} in the copy, not {spec.dtype}"
      )
    return found

  return part


def _shards(number: int, leaf: jax.Array) -> Iterable[Shard]:
  seen: set[Index] = set()
  for shard in leaf.addressable_shards:
    index = _index(shard.index, leaf.shape)
    if index in seen:
      continue
    seen.add(index)
    # np.array: on CPU the shard may be the device's own memory, to be donated
    data = np.array(shard.data, order="C")
    yield Shard(number, index, data, _crc(data))


def _index(slices: Any, shape: tuple[int, ...]) -> Index:
  return tuple(
    (part.start or 0, size if part.stop is None else part.stop)
    for part, size in zip(slices, shape, strict=True)
  )


def _crc(data: np.ndarray) -> int:
  return zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
