"""The collective by which the hosts of a learner agree: minimum and maximum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def span(lanes_DxL: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(minimum, maximum) over the devices; part of the inner step."""
  return jnp.min(lanes_DxL, axis=0), jnp.max(lanes_DxL, axis=0)


class Collective:
  """The same by itself, where no step is taken; compiled when it is made.

  Args:
    devices: sharding that splits axis 0 over all devices of the learner.
    lanes: how many a host has.
    compiled: the program, if there is one already.

  Attributes:
    spec: of the lanes of all hosts.
    program: what is compiled.
  """

  def __init__(
    self,
    devices: jax.sharding.NamedSharding,
    lanes: int,
    compiled: Any = None,
  ):
    mesh = devices.mesh
    self.spec = jax.ShapeDtypeStruct(
      (mesh.size, lanes), jnp.int32, sharding=devices
    )
    self._devices = devices
    self._local = len(mesh.local_devices)
    if compiled is not None:
      self.program = compiled
      return
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    jitted = jax.jit(
      span, in_shardings=(devices,), out_shardings=(everywhere, everywhere)
    )
    self.program = jitted.lower(self.spec).compile()

  def put(self, lanes: np.ndarray) -> jax.Array:
    """int32[devices, lanes], this host's lanes on each of its devices."""
    rows = np.broadcast_to(lanes, (self._local, len(lanes)))
    # asked for: the loop's transfer guard is for what nobody asks for
    with jax.transfer_guard_host_to_device("allow"):
      placed: jax.Array = jax.make_array_from_process_local_data(
        self._devices, np.ascontiguousarray(rows)
      )
    return placed

  def __call__(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Waits until every host has come here; returns (minimum, maximum)."""
    low, high = self.program(self.put(lanes))
    return jax.device_get(low), jax.device_get(high)
