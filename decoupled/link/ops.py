"""Device operations of a boundary: take a fragment out, put one back.

Everything works unit by unit on whole leaves, so that the number of compiled
programs is the number of distinct (shape, sharding) pairs, not of fragments.
Extraction copies: the training step may donate its inputs afterwards.

Leaves may span the hosts of a learner. The programs are then those of all
hosts, which run them at the same boundaries; to the host come only shards that
lie on it, and nothing here waits for another host.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from decoupled.algorithm import adoption
from decoupled.link import parts
from decoupled.types import Arrays, Manifest, Slice, Unit

DeviceArrays: TypeAlias = tuple[jax.Array, ...]
Tree: TypeAlias = Any


def _copied(leaf: jax.Array) -> jax.Array:
  copy: jax.Array = jnp.copy(leaf)
  return copy


def _taken(leaf_LxS: jax.Array, layer: jax.Array) -> jax.Array:
  taken: jax.Array = jax.lax.dynamic_index_in_dim(
    leaf_LxS, layer, keepdims=False
  )
  return taken


_copy, _layer = jax.jit(_copied), jax.jit(_taken)


def _mix(
  rule: str,
  blend: float,
  local: jax.Array,
  merged: jax.Array,
  reference: jax.Array,
) -> jax.Array:
  """One unit after adoption, in float32, then in the leaf's own dtype."""
  wide = local.astype(jnp.float32)
  mixed: jax.Array
  if rule == "carry":
    mixed = adoption.carry(wide, merged, reference.astype(jnp.float32))
  elif rule == "blend":
    mixed = adoption.blend(wide, merged, reference, blend)
  else:
    mixed = merged
  return mixed.astype(local.dtype)


_put = jax.jit(_mix, static_argnums=(0, 1))


def _mix_layer(
  rule: str,
  blend: float,
  leaf_LxS: jax.Array,
  merged: jax.Array,
  reference: jax.Array,
  layer: jax.Array,
) -> jax.Array:
  local = jax.lax.dynamic_index_in_dim(leaf_LxS, layer, keepdims=False)
  mixed = _mix(rule, blend, local, merged, reference)
  updated: jax.Array = jax.lax.dynamic_update_index_in_dim(
    leaf_LxS, mixed, layer, 0
  )
  return updated


# The stacked leaf is donated: one layer changes, the others stay in place.
_put_layer = jax.jit(_mix_layer, static_argnums=(0, 1), donate_argnums=(2,))


class Kept(Protocol):
  """Where compiled programs are kept; see `learner.executables`."""

  def load(self, name: str) -> Any | None: ...
  def save(self, name: str, compiled: Any) -> None: ...


class Kernels:
  """The same operations of a learner of several hosts, compiled ahead.

  JAX forgets what it has compiled with the devices of an epoch. So each program
  is an object that can be kept, and be loaded again without compiling.

  Args:
    kept: where.
  """

  def __init__(self, kept: Kept):
    self._kept = kept
    self._made: dict[Any, Any] = {}

  def copy(self, leaf: jax.Array) -> jax.Array:
    return self._call("copy", _copied, (), leaf.sharding, leaf)

  def layer(self, leaf_LxS: jax.Array, layer: jax.Array) -> jax.Array:
    out = _without_axis_0(leaf_LxS.sharding)
    return self._call("layer", _taken, (), out, leaf_LxS, layer)

  def put(
    self,
    rule: str,
    blend: float,
    local: jax.Array,
    merged: jax.Array,
    reference: jax.Array,
  ) -> jax.Array:
    statics = (rule, blend)
    return self._call(
      "put", _mix, statics, local.sharding, local, merged, reference
    )

  def put_layer(
    self,
    rule: str,
    blend: float,
    leaf_LxS: jax.Array,
    merged: jax.Array,
    reference: jax.Array,
    layer: jax.Array,
  ) -> jax.Array:
    statics, out = (rule, blend), leaf_LxS.sharding
    arrays = (leaf_LxS, merged, reference, layer)
    return self._call("put_layer", _mix_layer, statics, out, *arrays)

  def _call(
    self,
    name: str,
    function: Callable[..., jax.Array],
    statics: tuple[Any, ...],
    out: jax.sharding.Sharding,
    *arrays: jax.Array,
  ) -> jax.Array:
    key = (name, statics, tuple((a.shape, a.dtype, _spec(a)) for a in arrays))
    made = self._made.get(key)
    if made is None:
      made = self._make(key, function, statics, out, arrays)
      self._made[key] = made
    result: jax.Array = made(*arrays)
    return result

  def _make(
    self,
    key: Any,
    function: Callable[..., jax.Array],
    statics: tuple[Any, ...],
    out: jax.sharding.Sharding,
    arrays: Sequence[jax.Array],
  ) -> Any:
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    name = f"{key[0]}-{digest}"
    found = self._kept.load(name)
    if found is not None:
      return found
    # the stacked leaf is donated, as without hosts
    jitted = jax.jit(
      functools.partial(function, *statics),
      donate_argnums=(0,) if key[0] == "put_layer" else (),
      out_shardings=out,
    )
    specs = [
      jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
      for a in arrays
    ]
    compiled = jitted.lower(*specs).compile()
    self._kept.save(name, compiled)
    return compiled


def _spec(array: jax.Array) -> Any:
  sharding = array.sharding
  if isinstance(sharding, jax.sharding.NamedSharding):
    return sharding.spec
  return None


def _without_axis_0(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
  """Of one layer of a stacked leaf."""
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return sharding
  spec = jax.sharding.PartitionSpec(*tuple(sharding.spec)[1:])
  return jax.sharding.NamedSharding(sharding.mesh, spec)


def begin_host_copies(arrays: Iterable[jax.Array]) -> None:
  """Sets copies to the host going; waits for none.

  They are asked for, so that a transfer guard of the loop's, which is there for
  those that nobody asked for, has nothing to say (newer JAX applies it).
  """
  with jax.transfer_guard_device_to_host("allow"):
    for array in arrays:
      array.copy_to_host_async()


def place(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
  """Moves a whole host array to the devices.

  Where they are of several hosts, each places its own shards: `device_put`
  would have the hosts compare what they put.
  """
  if sharding.is_fully_addressable:
    placed: jax.Array = jax.device_put(array, sharding)
    return placed
  with jax.transfer_guard_host_to_device("allow"):  # this is the asking
    return jax.make_array_from_callback(
      array.shape, sharding, lambda index: array[index]
    )


class FragmentOps:
  """Extraction and adoption on one learner's parameter tree.

  Args:
    manifest: which unit belongs to which fragment.
    leaf_index: position of each tensor among the tree's leaves, by name.
    leaves: the tree's leaves, for shapes, dtypes and shardings only.
    kernels: compiled ahead; None compiles at first use.

  Attributes:
    spans: whether leaves lie on several hosts.
  """

  def __init__(
    self,
    manifest: Manifest,
    leaf_index: dict[str, int],
    leaves: Sequence[jax.Array],
    kernels: Kernels | None = None,
  ):
    # with and without, the operations are the same
    self._copy = _copy if kernels is None else kernels.copy
    self._layer = _layer if kernels is None else kernels.layer
    self._put = _put if kernels is None else kernels.put
    self._put_layer = _put_layer if kernels is None else kernels.put_layer
    self._manifest = manifest
    self._leaf_index = leaf_index
    self._sharding = [leaf.sharding for leaf in leaves]
    self.spans = not all(leaf.is_fully_addressable for leaf in leaves)
    self._host = jax.process_index() if self.spans else 0
    self._layers: dict[int, jax.Array] = {}

  def extract(self, fragment: int, leaves: list[jax.Array]) -> DeviceArrays:
    """Copies of the fragment's units; their host copies are under way."""
    taken = tuple(
      self._copy(leaves[i])
      if unit.layer is None
      else self._layer(leaves[i], self._layer_index(unit.layer))
      for unit, i in self._units(fragment)
    )
    if self.spans:
      begin_host_copies(
        shard.data
        for unit, array in enumerate(taken)
        for _, shard in parts.shards_of(array, self._owned(unit, array))
      )
    else:
      begin_host_copies(taken)
    return taken

  def adopt(
    self,
    fragment: int,
    leaves: list[jax.Array],
    rule: str,
    blend: float,
    merged: DeviceArrays,
    reference: DeviceArrays,
  ) -> None:
    """Replaces the fragment's units in `leaves`.

    Args:
      fragment: which.
      leaves: the tree's leaves, changed in place; stacked ones are donated.
      rule: overwrite, carry or blend.
      blend: share of the local value kept by `blend`.
      merged: the new global units, float32, on the leaves' devices.
      reference: what `carry` subtracts from the local units; else `merged`.
    """
    units = self._units(fragment)
    for (unit, i), new, old in zip(units, merged, reference, strict=True):
      if unit.layer is None:
        leaves[i] = self._put(rule, blend, leaves[i], new, old)
      else:
        layer = self._layer_index(unit.layer)
        leaves[i] = self._put_layer(rule, blend, leaves[i], new, old, layer)

  def stage(self, fragment: int, arrays: Arrays) -> DeviceArrays:
    """Moves host units next to their leaves; called off the loop's thread."""
    return tuple(
      place(array, self._sharding_of(unit, i))
      for (unit, i), array in zip(self._units(fragment), arrays, strict=True)
    )

  def warm(
    self, leaves: Sequence[jax.Array], rules: Sequence[str], blend: float = 0.5
  ) -> None:
    """Compiles every extraction and adoption there will ever be."""
    for fragment in range(len(self._manifest.fragments)):
      scratch = [self._copy(leaf) for leaf in leaves]
      units = self.extract(fragment, scratch)
      zeros = self.stage(
        fragment, tuple(np.zeros(u.shape, np.float32) for u in units)
      )
      for rule in rules:
        # the reference is either a staged base or an extracted copy
        self.adopt(fragment, scratch, rule, blend, zeros, zeros)
        if rule == "carry":
          self.adopt(fragment, scratch, rule, blend, zeros, units)
      jax.block_until_ready(scratch)

  def host(self, units: DeviceArrays) -> Arrays:
    """Waits for extracted units on the host; float32 on the wire.

    Of units that lie on several hosts what `slices` says, in its order.
    """
    if self.spans:
      return tuple(
        data
        for unit, array in enumerate(units)
        for data in parts.data_of(array, self._owned(unit, array))
      )
    return tuple(np.asarray(u).astype(np.float32, copy=False) for u in units)

  def here(self, units: DeviceArrays) -> Arrays:
    """What lies on this host of extracted units; whole where that is all."""
    if all(u.is_fully_replicated for u in units):
      return tuple(np.asarray(u, np.float32) for u in units)
    return self.host(units)

  def slices(self, units: DeviceArrays) -> tuple[Slice, ...]:
    """The part of extracted units that this host sends; () is the whole."""
    if not self.spans:
      return ()
    return tuple(
      box
      for unit, array in enumerate(units)
      for box in self._owned(unit, array)
    )

  def _owned(self, unit: int, array: jax.Array) -> tuple[Slice, ...]:
    return parts.owned(parts.holders_of(array), unit, self._host)

  def _units(self, fragment: int) -> list[tuple[Unit, int]]:
    return [
      (unit, self._leaf_index[unit.tensor])
      for unit in self._manifest.fragments[fragment]
    ]

  def _layer_index(self, layer: int) -> jax.Array:
    """A layer number on the device, put there once (no transfer per step)."""
    if layer not in self._layers:
      if self.spans:
        mesh = next(
          s.mesh
          for s in self._sharding
          if isinstance(s, jax.sharding.NamedSharding)
        )
        everywhere = jax.sharding.NamedSharding(
          mesh, jax.sharding.PartitionSpec()
        )
        self._layers[layer] = place(np.array(layer, np.int32), everywhere)
      else:
        self._layers[layer] = jax.device_put(np.int32(layer))
    return self._layers[layer]

  def _sharding_of(self, unit: Unit, leaf: int) -> jax.sharding.Sharding:
    sharding = self._sharding[leaf]
    return sharding if unit.layer is None else _without_axis_0(sharding)
