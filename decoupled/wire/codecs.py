"""Precision on the wire: full float32, or bfloat16 deltas against a base.

Below float32 the wire carries the difference to the base *as the receiver
decoded it* (design section 4.7). Both ends therefore hold the same bits after
every transfer, the rounding of one delta is seen and made good by the next,
and errors never add up. Who lacks the base gets float32 in full.
"""

from typing import TypeAlias

import ml_dtypes
import numpy as np

from decoupled.types import Arrays

# float32 values, or bfloat16 bits in uint16; all arrays of one kind.
Payload: TypeAlias = tuple[np.ndarray, ...]

FULL = np.dtype("<f4")
DELTA = np.dtype("<u2")


def encode(codec: str, arrays: Arrays, base: Arrays | None) -> Payload:
  """Prepares a fragment for the wire.

  Args:
    codec: `float32` or `bfloat16`.
    arrays: float32 parameters.
    base: parameters that the receiver has, of the same shapes; None if it
      has none.

  Returns:
    `arrays` themselves, or bfloat16 bits of `arrays - base` as uint16.
  """
  _known(codec)
  if codec == "float32" or base is None:
    return arrays
  pairs = zip(arrays, base, strict=True)
  return tuple(_to_bfloat16(array, reference) for array, reference in pairs)


def decode(codec: str, payload: Payload, base: Arrays | None) -> Arrays:
  """The float32 parameters that a payload stands for.

  Args:
    codec: `float32` or `bfloat16`.
    payload: what `encode` made; float32 in it means values in full.
    base: what a delta is relative to.

  Raises:
    ValueError: a delta without its base, or of another shape.
  """
  _known(codec)
  if all(array.dtype == FULL for array in payload):
    return payload
  if codec == "float32" or base is None:
    raise ValueError(f"a delta needs its base (codec {codec})")
  pairs = zip(payload, base, strict=True)
  return tuple(_add(delta, reference) for delta, reference in pairs)


def is_delta(payload: Payload) -> bool:
  """Whether a payload is relative to a base."""
  return any(array.dtype == DELTA for array in payload)


def _to_bfloat16(array: np.ndarray, base: np.ndarray) -> np.ndarray:
  with np.errstate(all="ignore"):  # the receiver checks for finiteness
    delta = np.subtract(array, base, dtype=np.float32)
    rounded = np.asarray(delta).astype(ml_dtypes.bfloat16)
  return rounded.view(DELTA)


def _add(delta: np.ndarray, base: np.ndarray) -> np.ndarray:
  if delta.shape != base.shape:
    raise ValueError(f"delta of shape {delta.shape}, base {base.shape}")
  with np.errstate(all="ignore"):
    change = delta.view(ml_dtypes.bfloat16).astype(np.float32)
    return np.asarray(np.add(base, change, dtype=np.float32))


def _known(codec: str) -> None:
  if codec not in ("float32", "bfloat16"):
    raise ValueError(f"unknown codec {codec!r}")
