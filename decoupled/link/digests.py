"""Parameters as one short text: the same where every bit is the same."""

import hashlib
from collections.abc import Iterable

import numpy as np

from decoupled.types import Arrays


def of(fragments: Iterable[Arrays]) -> str:
  """SHA-256, in hex, of every fragment's arrays, in the order of units.

  Shapes and dtypes count as well: the float32 arrays of a snapshot of the
  syncer give the same text as the parameters of a learner that holds it.
  """
  sha = hashlib.sha256()
  for arrays in fragments:
    for array in arrays:
      sha.update(f"{array.dtype}{array.shape}".encode())
      sha.update(np.ascontiguousarray(array).data)
  return sha.hexdigest()
