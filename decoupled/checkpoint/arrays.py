"""Arrays to and from a folder, through Orbax."""

import logging
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

FOLDER = "arrays"

_LOG = logging.getLogger(__name__)


def warm_up(small: Any) -> None:
  """Saves `small`, so that the first real save takes no longer than others.

  What is imported and set up at the first save would otherwise compete with
  the inner loop for the interpreter. A failure (no room for temporary files)
  is said and costs nothing else.

  Args:
    small: an array of the kind that will be saved: NumPy, or JAX on a mesh.
  """
  try:
    with tempfile.TemporaryDirectory(prefix="decoupled-") as folder:
      save(epath.Path(folder), {"small": small})
  except Exception as error:  # Orbax raises many kinds
    _LOG.warning("saving is not warmed up: %s", error)


def save(folder: epath.Path, tree: Any) -> None:
  """Writes a pytree of NumPy or JAX arrays; returns when it is on disk."""
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / FOLDER, tree)
    checkpointer.wait_until_finished()


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
