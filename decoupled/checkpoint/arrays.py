"""Arrays to and from a folder, through Orbax."""

import logging
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from decoupled import background

FOLDER = "arrays"

_LOG = logging.getLogger(__name__)


# One for the process: to make one for each save costs as much as the save. It
# saves in the calling thread and has none of its own to be woken.
_lock = threading.Lock()
_saver: ocp.Checkpointer | None = None


def warm_up(small: Any) -> None:
  """Saves `small`, so that the first real save takes no longer than others.

  What is imported and set up at the first save would otherwise compete with
  the inner loop for the interpreter. It happens on a thread that gives way: the
  pools of threads that write files are made here, once for the process, and
  inherit that. A failure (no room for temporary files) is said and costs
  nothing else.

  Args:
    small: an array of the kind that will be saved: NumPy, or JAX on a mesh.
  """
  thread = threading.Thread(target=_warm_up, args=(small,), name="warm up")
  thread.start()
  thread.join()


def _warm_up(small: Any) -> None:
  background.give_way()
  try:
    with tempfile.TemporaryDirectory(prefix="decoupled-") as folder:
      save(epath.Path(folder), {"small": small})
  except Exception as error:  # Orbax raises many kinds
    _LOG.warning("saving is not warmed up: %s", error)


def save(folder: epath.Path, tree: Any) -> None:
  """Writes a pytree of NumPy or JAX arrays; returns when it is on disk."""
  global _saver
  arguments = ocp.args.StandardSave(jax.tree.map(_plain, tree))
  with _lock:
    if _saver is None:
      _saver = ocp.Checkpointer(ocp.StandardCheckpointHandler())
    _saver.save(folder / FOLDER, args=arguments)


def _plain(array: Any) -> Any:
  """An array of one device as NumPy, for which Orbax has far less to do.

  On CPU that takes hold of the same memory, elsewhere a copy to the host is
  needed anyway. What is spread over devices or hosts stays as it is: each shard
  is written by who has it.
  """
  if not isinstance(array, jax.Array) or len(array.sharding.device_set) > 1:
    return array
  is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
  return array if is_key else np.asarray(array)


def restore(folder: epath.Path, abstract: Any) -> Any:
  """Reads a pytree of the structure of `abstract`.

  Args:
    folder: where `save` wrote.
    abstract: pytree of `jax.ShapeDtypeStruct`; leaves with a sharding come
      back as JAX arrays so laid out, on whatever mesh, the others as NumPy.
  """
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(folder / FOLDER, abstract)


def restore_flat(folder: epath.Path) -> Mapping[str, np.ndarray]:
  """Reads a flat dictionary of NumPy arrays as it was saved."""
  with ocp.StandardCheckpointer() as checkpointer:
    found = checkpointer.restore(folder / FOLDER)
  return {key: np.asarray(value) for key, value in found.items()}
