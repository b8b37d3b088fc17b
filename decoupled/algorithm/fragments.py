"""Which tensors travel together: units and their distribution to fragments.

A *unit* is a whole tensor, or one layer of a tensor that stacks scanned
layers: without the slicing one stacked tensor would outweigh all fragments.
Every function here is deterministic in the order of the specs it is given.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from decoupled.algorithm.policy import FRAGMENTATIONS, one_of
from decoupled.errors import ConfigError
from decoupled.types import Arrays, Role, TensorSpec, Unit

Fragments = tuple[tuple[Unit, ...], ...]


def units(specs: Sequence[TensorSpec]) -> tuple[Unit, ...]:
  """Lists what is synchronised: order of the specs, then layer.

  Args:
    specs: the model's tensors; those of role LOCAL are never sent.

  Raises:
    ConfigError: a name occurs twice, or a stacked tensor has no layer axis.
  """
  _check(specs)
  found: list[Unit] = []
  for spec in specs:
    if spec.role is Role.LOCAL:
      continue
    if spec.stacked:
      found.extend(Unit(spec.name, layer) for layer in range(spec.shape[0]))
    else:
      found.append(Unit(spec.name))
  return tuple(found)


def fragment(
  specs: Sequence[TensorSpec], num_fragments: int, scheme: str
) -> Fragments:
  """Distributes the units over fragments; none is left out, none is empty.

  * `balanced`: longest processing time first. Units sorted by size, largest
    first (ties: name, then layer), each into the bin that is smallest so far
    (tie: lowest index). The largest bin is at most 4/3 of the optimum.
  * `tensor`: unit i to fragment i mod P.
  * `layer`: units grouped by layer, the group of units without a layer first,
    group g to fragment g mod P. The layer is the index in a stacked tensor,
    else the first path component that is a number (`layers/3/attention/q`).

  Args:
    specs: the model's tensors.
    num_fragments: P.
    scheme: balanced, tensor or layer.

  Returns:
    Per fragment its units, in the order of the specs, then by layer.

  Raises:
    ConfigError: P exceeds the number of units (for `layer`: of groups).
  """
  one_of("Exchange.fragmentation", scheme, FRAGMENTATIONS)
  everything = units(specs)
  assign = {"balanced": _balanced, "tensor": _strided, "layer": _by_layer}
  place: Callable[..., dict[Unit, int]] = assign[scheme]
  home = place(everything, specs, num_fragments)
  bins: list[list[Unit]] = [[] for _ in range(num_fragments)]
  for unit in everything:
    bins[home[unit]].append(unit)
  return tuple(tuple(members) for members in bins)


def split(
  tensors: Mapping[str, np.ndarray], fragments: Fragments
) -> tuple[Arrays, ...]:
  """Cuts whole tensors (by name) into the arrays of each fragment (views)."""
  return tuple(
    tuple(
      tensors[unit.tensor]
      if unit.layer is None
      else tensors[unit.tensor][unit.layer]
      for unit in members
    )
    for members in fragments
  )


def join(
  parts: Sequence[Arrays], fragments: Fragments
) -> dict[str, np.ndarray]:
  """Inverse of `split`: whole tensors by name, stacked layers restacked."""
  whole: dict[str, np.ndarray] = {}
  layers: dict[str, dict[int, np.ndarray]] = {}
  for arrays, members in zip(parts, fragments, strict=True):
    for array, unit in zip(arrays, members, strict=True):
      if unit.layer is None:
        whole[unit.tensor] = array
      else:
        layers.setdefault(unit.tensor, {})[unit.layer] = array
  for name, by_layer in layers.items():
    whole[name] = np.stack([by_layer[layer] for layer in sorted(by_layer)])
  return whole


def _check(specs: Sequence[TensorSpec]) -> None:
  seen: set[str] = set()
  for spec in specs:
    if spec.name in seen:
      raise ConfigError(
        f"two tensors are called {spec.name!r}: give each its own path"
      )
    seen.add(spec.name)
    if spec.stacked and not spec.shape:
      raise ConfigError(
        f"tensor {spec.name!r} is marked as stacked layers but has shape (): "
        "its first axis must enumerate the layers"
      )


def _require(num_fragments: int, available: int, noun: str) -> None:
  if num_fragments < 1:
    raise ConfigError(f"Exchange.P = {num_fragments} must be at least 1")
  if num_fragments > available:
    raise ConfigError(
      f"Exchange.P = {num_fragments} fragments, but the model has only "
      f"{available} {noun}: choose P <= {available}"
    )


def _balanced(
  everything: Sequence[Unit], specs: Sequence[TensorSpec], num_fragments: int
) -> dict[Unit, int]:
  _require(num_fragments, len(everything), "units to distribute")
  sizes = {
    spec.name: math.prod(spec.shape[1:] if spec.stacked else spec.shape)
    for spec in specs
  }

  def largest_first(unit: Unit) -> tuple[int, str, int]:
    layer = -1 if unit.layer is None else unit.layer
    return -sizes[unit.tensor], unit.tensor, layer

  loads = [0] * num_fragments
  counts = [0] * num_fragments
  home: dict[Unit, int] = {}
  for unit in sorted(everything, key=largest_first):
    # Units of size zero must not pile up in one bin while others stay empty.
    smallest = min(
      range(num_fragments), key=lambda p: (loads[p], counts[p] > 0, p)
    )
    home[unit] = smallest
    loads[smallest] += sizes[unit.tensor]
    counts[smallest] += 1
  return home


def _strided(
  everything: Sequence[Unit], specs: Sequence[TensorSpec], num_fragments: int
) -> dict[Unit, int]:
  del specs
  _require(num_fragments, len(everything), "units to distribute")
  return {unit: i % num_fragments for i, unit in enumerate(everything)}


def _by_layer(
  everything: Sequence[Unit], specs: Sequence[TensorSpec], num_fragments: int
) -> dict[Unit, int]:
  del specs
  layers = {unit: _layer_of(unit) for unit in everything}
  groups = sorted(set(layers.values()))
  _require(num_fragments, len(groups), "layer groups")
  return {
    unit: groups.index(layer) % num_fragments for unit, layer in layers.items()
  }


def _layer_of(unit: Unit) -> int:
  """Layer index of a unit; -1 where it belongs to none."""
  if unit.layer is not None:
    return unit.layer
  numbers = [part for part in unit.tensor.split("/") if part.isdecimal()]
  return int(numbers[0]) if numbers else -1
