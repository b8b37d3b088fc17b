"""Devices of a learner as a mesh, and where parameters and batches lie on it.

Two axes: `data` repeats the parameters, `fsdp` shards them; a batch is split
over both.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from decoupled.errors import ConfigError
from decoupled.learner import settings
from decoupled.types import TensorSpec

Shardings: TypeAlias = Any  # a tree of NamedSharding

AXES = ("data", "fsdp")


def make_mesh(
  config: settings.Mesh, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
  """Arranges devices; `Mesh.data = 0` takes all that `fsdp` divides.

  Args:
    config: sizes of the axes.
    devices: what there is; None = all devices of this learner's JAX job.

  Raises:
    ConfigError: too few devices.
  """
  devices = jax.devices() if devices is None else devices
  data = config.data or max(1, len(devices) // config.fsdp)
  wanted = data * config.fsdp
  if wanted > len(devices):
    raise ConfigError(
      f"Mesh.data = {data} x Mesh.fsdp = {config.fsdp} wants {wanted} devices, "
      f"this learner has {len(devices)}: choose a smaller mesh, or give it "
      "more devices"
    )
  grid = np.asarray(devices[:wanted], dtype=object).reshape(data, config.fsdp)
  return jax.sharding.Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
  """The same value on every device."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Axis 0 split over all devices."""
  return NamedSharding(mesh, PartitionSpec(AXES))


def check_batch(
  sequences: int, microbatches: int, mesh: jax.sharding.Mesh
) -> None:
  """Raises ConfigError unless every device gets rows in every microbatch."""
  if sequences % (microbatches * mesh.size):
    raise ConfigError(
      f"Batch.sequences = {sequences} is not a multiple of "
      f"Local.microbatches = {microbatches} x {mesh.size} devices of the mesh"
    )


def check_hosts(mesh: jax.sharding.Mesh, hosts: int) -> None:
  """Raises ConfigError unless every host has the same part of the mesh."""
  devices = jax.device_count()
  if hosts > 1 and mesh.size != devices:
    raise ConfigError(
      f"the mesh takes {mesh.size} devices, the {hosts} hosts of this learner "
      f"have {devices}: a learner of several hosts uses all of them "
      "(Mesh.data = 0)"
    )


def param_sharding(spec: TensorSpec, mesh: jax.sharding.Mesh) -> NamedSharding:
  """Shards the largest axis that `fsdp` divides (ties: the first).

  The layer axis of a stacked tensor stays whole: scans and fragments cut
  there. A tensor without such an axis is replicated.
  """
  fsdp = mesh.shape["fsdp"]
  first = 1 if spec.stacked else 0
  fits = [
    axis
    for axis in range(first, len(spec.shape))
    if spec.shape[axis] % fsdp == 0 and spec.shape[axis] > 0
  ]
  if fsdp == 1 or not fits:
    return replicated(mesh)
  axis = max(fits, key=lambda i: (spec.shape[i], -i))
  return NamedSharding(mesh, PartitionSpec(*(None,) * axis, "fsdp"))


def param_shardings(
  params: Any, specs: Sequence[TensorSpec], mesh: jax.sharding.Mesh
) -> Shardings:
  """A tree like `params` with the sharding of each leaf.

  Args:
    params: the parameters or their specs.
    specs: their description in the order of the leaves.
    mesh: where they live.
  """
  shardings = [param_sharding(spec, mesh) for spec in specs]
  return jax.tree.unflatten(jax.tree.structure(params), shardings)
