"""The state of an inner optimizer as a stream, from a donor to a joiner.

A header, then every leaf whole, one after the other, cut into the same checked
chunks as fragments. Neither end ever holds more of the stream than one leaf,
the syncer in between never more than a few chunks.
"""

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from decoupled import faults
from decoupled.errors import Refused
from decoupled.types import Leaf, StateHeader
from decoupled.wire import chunks, messages
from decoupled.wire.credentials import CHUNK_BYTES
from decoupled.wire.proto.decoupled.v1 import donations_pb2 as pb
from decoupled.wire.proto.decoupled.v1 import fragments_pb2 as fragments_pb


def check_fit(theirs: StateHeader, own: tuple[Leaf, ...]) -> None:
  """Whether a joiner can take what a donor gives.

  Raises:
    Refused: `misfit`, with both sides of the first leaf that differs.
  """
  donor = f"learner {theirs.donor}"
  for given, needed in zip(theirs.leaves, own, strict=False):
    if given != needed:
      raise Refused(
        "misfit",
        f"the optimizer state of {donor} has {given} where this learner has "
        f"{needed}: use one optimizer and one model in a run",
      )
  if len(theirs.leaves) != len(own):
    raise Refused(
      "misfit",
      f"the optimizer state of {donor} has {len(theirs.leaves)} arrays, this "
      f"learner's {len(own)}: use one optimizer and one model in a run",
    )


def check_size(header: StateHeader, size: int) -> None:
  """Raises Refused (`incomplete`, `shape`) unless so many bytes are meant."""
  expected = sum(leaf.nbytes for leaf in header.leaves)
  if size < expected:
    raise Refused(
      "incomplete", f"the stream ended after {size} of {expected} bytes"
    )
  if size > expected:
    raise Refused("shape", f"{size} bytes came, {expected} were announced")


def outgoing(
  header: StateHeader, arrays: Iterable[np.ndarray]
) -> Iterator[pb.StateChunk]:
  """The stream of a state; `arrays` are asked for one at a time."""
  yield messages.state_header_to(header)
  faults.reached("donor.donating")
  for piece in chunks.split(arrays, CHUNK_BYTES):
    data = fragments_pb.Data(crc32=piece.crc32, data=piece.data)
    yield pb.StateChunk(data=data)


class Incoming:
  """A state that comes in.

  Attributes:
    header: what its donor says of it.

  Args:
    stream: chunks, the header first.

  Raises:
    Refused: `malformed`: there is no header.
  """

  def __init__(self, stream: Iterator[pb.StateChunk]):
    self._stream = stream
    first = next(stream, None)
    if first is None:
      raise messages.malformed("a state without anything in it")
    self.header = messages.state_header_from(first)

  def arrays(self) -> Iterator[np.ndarray]:
    """The leaves in order; each is checked before it is handed over.

    Call `check_fit` first: memory is reserved for what the header announces.

    Raises:
      Refused: `checksum`, `incomplete`, `shape` (more than was announced).
    """
    checked = Checked()
    rest = memoryview(b"")
    for leaf in self.header.leaves:
      data = np.empty(leaf.nbytes, np.uint8)
      filled = 0
      while filled < len(data):
        if not len(rest):
          rest = memoryview(self._next(checked))
        taken = rest[: len(data) - filled]
        data[filled : filled + len(taken)] = np.frombuffer(taken, np.uint8)
        filled += len(taken)
        rest = rest[len(taken) :]
      dtype: np.dtype[Any] = np.dtype(leaf.dtype)
      yield data.view(dtype).reshape(leaf.shape)
    if len(rest) or next(self._stream, None) is not None:
      raise Refused("shape", "the stream is longer than its header says")

  def _next(self, checked: "Checked") -> bytes:
    for chunk in self._stream:
      data = messages.data_from(chunk)
      checked.add(data.data, data.crc32)
      if data.data:
        return data.data
    raise Refused(
      "incomplete", f"the stream ended after {checked.size} bytes of data"
    )


class Checked:
  """Checks chunks as they pass.

  Attributes:
    size: bytes that have passed.
  """

  def __init__(self) -> None:
    self.size = 0
    self._crc = 0

  def add(self, data: bytes, crc32: int) -> None:
    """Looks at the next chunk.

    Raises:
      Refused: `checksum`, with both.
    """
    self._crc = zlib.crc32(data, self._crc)
    if self._crc != crc32:
      raise Refused(
        "checksum",
        f"bytes {self.size} to {self.size + len(data)} arrived with CRC-32 "
        f"{self._crc:08x}, sent with {crc32:08x}",
      )
    self.size += len(data)
