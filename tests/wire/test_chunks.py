"""Streams of chunks: complete, in order and undamaged, or refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled.errors import Refused
from decoupled.wire import chunks, codecs

SHAPES = ((3, 5), (), (0, 4), (7,))


def payload(dtype=np.float32):
  rng = np.random.default_rng(0)
  return tuple(
    np.asarray(rng.integers(0, 99, shape)).astype(dtype) for shape in SHAPES
  )


def assemble(pieces, dtype=codecs.FULL):
  assembly = chunks.Assembly(SHAPES, dtype)
  for piece in pieces:
    assembly.add(piece.data, piece.crc32)
  return assembly.finish()


@given(st.integers(1, 200), st.sampled_from([np.float32, np.uint16]))
def test_any_chunk_size_gives_the_payload_back(chunk_bytes, dtype):
  sent = payload(dtype)
  pieces = list(chunks.split(sent, chunk_bytes))
  assert all(len(piece.data) == chunk_bytes for piece in pieces[:-1])
  assert sum(len(piece.data) for piece in pieces) == chunks.size(sent)
  got = assemble(pieces, np.dtype(dtype))
  assert [a.shape for a in got] == list(SHAPES)
  for ours, theirs in zip(got, sent, strict=True):
    np.testing.assert_array_equal(ours, theirs)
    assert not ours.flags.writeable


def test_the_order_of_memory_does_not_matter():
  array = np.arange(15, dtype=np.float32).reshape(5, 3).T
  pieces = chunks.split((array, *payload()[1:]), 8)
  np.testing.assert_array_equal(assemble(pieces)[0], array)


@given(st.data())
def test_a_flipped_bit_is_noticed(data):
  pieces = list(chunks.split(payload(), 10))
  which = data.draw(st.integers(0, len(pieces) - 1))
  damaged = bytearray(pieces[which].data)
  at = data.draw(st.integers(0, len(damaged) - 1))
  damaged[at] ^= 1 << data.draw(st.integers(0, 7))
  pieces[which] = pieces[which]._replace(data=bytes(damaged))
  with pytest.raises(Refused) as caught:
    assemble(pieces)
  assert caught.value.reason == "checksum"


@pytest.mark.parametrize(
  "change",
  [
    lambda p: [p[1], p[0], *p[2:]],
    lambda p: [p[0], p[0], *p[2:]],
    lambda p: [*p[:1], *p[2:]],
  ],
  ids=["reordered", "repeated", "lost"],
)
def test_chunks_out_of_order_are_noticed(change):
  pieces = list(chunks.split(payload(), 10))
  with pytest.raises(Refused) as caught:
    assemble(change(pieces))
  assert caught.value.reason == "checksum"


def test_a_stream_of_another_length_is_refused():
  pieces = list(chunks.split(payload(), 10))
  with pytest.raises(Refused, match="ended after") as short:
    assemble(pieces[:-1])
  assert short.value.reason == "incomplete"
  longer = (*payload(), np.ones(1, np.float32))
  with pytest.raises(Refused, match="longer than") as long:
    assemble(chunks.split(longer, 10))
  assert long.value.reason == "shape"
