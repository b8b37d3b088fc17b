"""Copies from host to host over real gRPC."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from decoupled.errors import Refused, Unreachable
from decoupled.learner import buddies
from decoupled.learner.buddies import HostCopy, Memory, Shard
from decoupled.learner.buddy_wire import BuddyClient, BuddyServer
from decoupled.wire.address import Address

_TOKEN = "a-token-of-a-run-that-is-long"
_LIMIT_S = 60.0


def refused(reason: str) -> Any:
  return pytest.RaisesExc(Refused, check=lambda error: error.reason == reason)


def a_copy(step: int) -> HostCopy:
  """More than one chunk, an odd dtype, a scalar and an empty shard."""
  rng = np.random.default_rng(step)
  arrays = [
    rng.normal(size=(600, 400)).astype(np.float32),
    rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16),
    np.array(step, np.int32),
    np.zeros((0, 4), np.float32),
  ]
  shards = tuple(
    Shard(i, tuple((7, 7 + n) for n in array.shape), array, buddies._crc(array))
    for i, array in enumerate(arrays)
  )
  return HostCopy(1, 4, step, {"tokens": 12, "place": -1}, shards)


@pytest.fixture
def served() -> Iterator[tuple[Memory, BuddyServer]]:
  memory = Memory()
  server = BuddyServer(
    memory, 3, _TOKEN, Address("127.0.0.1", 0), max_bytes=1_000_000
  )
  yield memory, server
  server.close()


def dial(server: BuddyServer, **more: Any) -> BuddyClient:
  args = {"learner_id": 3, "token": _TOKEN, "max_bytes": 1_000_000} | more
  return BuddyClient(server.address, limit_s=_LIMIT_S, **args)


def test_a_copy_goes_out_and_comes_back_bit_for_bit(
  served: tuple[Memory, BuddyServer],
) -> None:
  memory, server = served
  client = dial(server)
  for step in (10, 20):
    client.put(a_copy(step))
  assert client.held() == memory.held() == {1: (10, 20)}
  back, sent = client.get(1, 20), a_copy(20)
  assert (back.owner, back.epoch, back.step) == (1, 4, 20)
  assert back.counters == sent.counters
  for ours, theirs in zip(back.shards, sent.shards, strict=True):
    assert (ours.leaf, ours.index) == (theirs.leaf, theirs.index)
    assert ours.data.dtype == theirs.data.dtype
    assert ours.data.tobytes() == theirs.data.tobytes()
  with refused("no_copy"):
    client.get(1, 30)
  client.close()


def test_what_is_wrong_is_refused_and_not_kept(
  served: tuple[Memory, BuddyServer],
) -> None:
  memory, server = served
  good = a_copy(1)
  bad = dataclasses.replace(good.shards[1], crc32=1)
  client = dial(server)
  with refused("checksum"):
    client.put(dataclasses.replace(good, shards=(good.shards[0], bad)))
  huge = good.shards[0]
  twice = dataclasses.replace(good, shards=(huge, huge))
  with refused("shape"):
    client.put(twice)
  with refused("learner"):
    dial(server, learner_id=4).put(good)
  with refused("unauthenticated"):
    dial(server, token="x" * 32).put(good)
  client.put(good)
  with refused("shape"):
    dial(server, max_bytes=1000).get(1, 1)
  assert memory.held() == {1: (1,)}
  server.close()
  with pytest.raises(Unreachable):
    client.put(a_copy(2))
