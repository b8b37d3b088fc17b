"""A fragment as a stream of checked chunks, and back."""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from decoupled.errors import Refused
from decoupled.wire.codecs import Payload


class Piece(NamedTuple):
  """A chunk's bytes and the CRC-32 of everything up to and including it."""

  data: bytes
  crc32: int


def split(payload: Iterable[np.ndarray], chunk_bytes: int) -> Iterator[Piece]:
  """Cuts a payload into pieces of `chunk_bytes`; the last may be shorter.

  Its arrays are asked for one at a time.
  """
  crc, held = 0, bytearray()
  for array in payload:
    flat = _bytes(array)
    at = 0
    while at < len(flat):
      taken = flat[at : at + chunk_bytes - len(held)]
      held += taken
      at += len(taken)
      if len(held) == chunk_bytes:
        crc = zlib.crc32(held, crc)
        yield Piece(bytes(held), crc)
        held.clear()
  if held:
    crc = zlib.crc32(held, crc)
    yield Piece(bytes(held), crc)


def size(payload: Payload) -> int:
  """Bytes of a payload on the wire."""
  return sum(array.nbytes for array in payload)


class Assembly:
  """Puts a payload together again; never holds more than was announced.

  Args:
    shapes: of the fragment's units.
    dtype: of the payload, `codecs.FULL` or `codecs.DELTA`.
  """

  def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype):
    self._shapes = shapes
    self._dtype = dtype
    self.size = count(shapes) * dtype.itemsize
    self._data = np.empty(self.size, np.uint8)
    self._filled = 0
    self._crc = 0

  def add(self, data: bytes, crc32: int) -> None:
    """Takes the next piece.

    Raises:
      Refused: `shape` (more data than the fragment has), `checksum`.
    """
    end = self._filled + len(data)
    if end > self.size:
      raise Refused(
        "shape",
        f"the stream is longer than the fragment's {self.size} bytes",
      )
    self._crc = zlib.crc32(data, self._crc)
    if self._crc != crc32:
      raise Refused(
        "checksum",
        f"bytes {self._filled} to {end} arrived with CRC-32 "
        f"{self._crc:08x}, sent with {crc32:08x}",
      )
    self._data[self._filled : end] = np.frombuffer(data, np.uint8)
    self._filled = end

  def finish(self) -> Payload:
    """The whole payload, read-only.

    Raises:
      Refused: `incomplete`: the stream ended too early; its sender may be dead.
    """
    if self._filled != self.size:
      raise Refused(
        "incomplete",
        f"the stream ended after {self._filled} of {self.size} bytes",
      )
    self._data.flags.writeable = False
    arrays, at = [], 0
    for shape in self._shapes:
      end = at + count([shape]) * self._dtype.itemsize
      arrays.append(self._data[at:end].view(self._dtype).reshape(shape))
      at = end
    return tuple(arrays)


def _bytes(array: np.ndarray) -> memoryview:
  return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def count(shapes: Sequence[tuple[int, ...]]) -> int:
  """Number of elements in arrays of these shapes."""
  return sum(math.prod(shape) for shape in shapes)
