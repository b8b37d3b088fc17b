"""Copies of shards from host to host, over gRPC with the run's token.

A host serves its memory (`BuddyServer`) on a thread with an event loop of its
own; others put copies into it, and a replacement gets them out (`BuddyClient`).
Chunks are checked as they come, every shard once more when it is whole.
"""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, TypeAlias

import grpc
import grpc.aio
import numpy as np

from decoupled.errors import Refused
from decoupled.learner.buddies import HostCopy, Memory, Shard
from decoupled.wire import chunks, client, credentials, messages, states
from decoupled.wire import tls as tls_lib
from decoupled.wire.address import Address
from decoupled.wire.proto.decoupled.v1 import buddies_pb2 as pb
from decoupled.wire.proto.decoupled.v1 import buddies_pb2_grpc as pb_grpc
from decoupled.wire.proto.decoupled.v1 import fragments_pb2 as fragments_pb
from decoupled.wire.refusals import refuse

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

_MAX_CALLS = 64
_START_S = 10.0


class BuddyServer:
  """Serves one host's memory until it is closed.

  Args:
    memory: what is held.
    learner_id: whose copies; others are refused.
    token: of the run.
    bind: where to listen; port 0 takes any free one.
    max_bytes: the largest copy that is taken in, from the host's own.
    tls: credentials of the server, None for plain text.

  Attributes:
    address: where it listens.
  """

  def __init__(
    self,
    memory: Memory,
    learner_id: int,
    token: str,
    bind: Address,
    max_bytes: int,
    tls: grpc.ServerCredentials | None = None,
  ):
    self.address = bind
    self._servicer = _Servicer(memory, learner_id, max_bytes)
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name="buddies", daemon=True
    )
    self._thread.start()
    self._server: grpc.aio.Server | None = None
    asyncio.run_coroutine_threadsafe(
      self._start(token, bind, tls), self._loop
    ).result(_START_S)

  def close(self) -> None:
    """Serves no more; does nothing the second time."""
    if not self._thread.is_alive():
      return

    async def stop() -> None:
      if self._server is not None:
        await self._server.stop(0.5)

    asyncio.run_coroutine_threadsafe(stop(), self._loop).result(_START_S)
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(_START_S)

  async def _start(
    self, token: str, bind: Address, tls: grpc.ServerCredentials | None
  ) -> None:
    self._server = credentials.server(token, _MAX_CALLS)
    pb_grpc.add_BuddiesServicer_to_server(self._servicer, self._server)
    port = credentials.add_port(self._server, bind, tls)
    await self._server.start()
    self.address = Address(bind.host, port)


class _Servicer(pb_grpc.BuddiesServicer):
  def __init__(self, memory: Memory, learner_id: int, max_bytes: int):
    self._memory = memory
    self._learner_id = learner_id
    self._max_bytes = max_bytes

  async def Put(
    self, request_iterator: AsyncIterator[pb.CopyChunk], context: Context
  ) -> pb.PutReply:
    try:
      incoming: _Incoming | None = None
      async for chunk in request_iterator:
        if incoming is None:
          self._mine(chunk.header.learner_id)
          incoming = _Incoming(chunk, self._max_bytes)
        else:
          incoming.add(chunk)
      if incoming is None:
        raise messages.malformed("a copy without anything in it")
      await asyncio.to_thread(self._memory.keep, incoming.finish())
    except Refused as error:
      await refuse(context, error)
    return pb.PutReply()

  async def Get(  # type: ignore[override]
    self, request: pb.CopyRequest, context: Context
  ) -> None:
    try:
      self._mine(request.learner_id)
      copy = self._memory.get(request.owner, request.step)
      if copy is None:
        raise Refused(
          "no_copy",
          f"this host holds no copy of host {request.owner} at step "
          f"{request.step}, only {self._memory.held()}",
        )
    except Refused as error:
      await refuse(context, error)
      raise AssertionError("unreachable") from None
    for chunk in _outgoing(copy, self._learner_id):
      await context.write(chunk)

  async def Held(
    self, request: pb.HeldRequest, context: Context
  ) -> pb.HeldReply:
    try:
      self._mine(request.learner_id)
    except Refused as error:
      await refuse(context, error)
    return pb.HeldReply(
      copies=[
        pb.HeldSteps(owner=owner, steps=steps)
        for owner, steps in self._memory.held().items()
      ]
    )

  def _mine(self, learner_id: int) -> None:
    if learner_id != self._learner_id:
      raise Refused(
        "learner",
        f"this host belongs to learner {self._learner_id}, not {learner_id}",
      )


class BuddyClient:
  """Calls to another host's memory; each raises Refused and Unreachable.

  Args:
    address: of that host.
    learner_id: whose copies.
    token: of the run.
    limit_s: how long a transfer may take.
    max_bytes: the largest copy that is taken in, from this host's own specs.
    tls: whom to believe, None for plain text.
  """

  def __init__(
    self,
    address: Address,
    learner_id: int,
    token: str,
    limit_s: float,
    max_bytes: int,
    tls: tls_lib.ClientTls | None = None,
  ):
    self._address = address
    self._learner_id = learner_id
    self._limit_s = limit_s
    self._max_bytes = max_bytes
    self._metadata = credentials.metadata(token)
    self._channel = credentials.channel(
      address, token, tls.credentials if tls else None, bulk=True
    )
    self._stub = pb_grpc.BuddiesStub(self._channel)

  def put(self, copy: HostCopy) -> None:
    self._call(self._stub.Put, _outgoing(copy, self._learner_id))

  def get(self, owner: int, step: int) -> HostCopy:
    """A whole, checked copy; `no_copy` if it is not there."""
    asked = pb.CopyRequest(learner_id=self._learner_id, owner=owner, step=step)
    incoming: _Incoming | None = None
    try:
      for chunk in self._call(self._stub.Get, asked):
        if incoming is None:
          incoming = _Incoming(chunk, self._max_bytes)
        else:
          incoming.add(chunk)
    except grpc.RpcError as error:
      raise self._failure(error) from None
    if incoming is None:
      raise messages.malformed("a copy without anything in it")
    return incoming.finish()

  def held(self) -> dict[int, tuple[int, ...]]:
    """Per owner the steps of the copies there."""
    asked = pb.HeldRequest(learner_id=self._learner_id)
    answer = self._call(self._stub.Held, asked)
    return {each.owner: tuple(each.steps) for each in answer.copies}

  def close(self) -> None:
    self._channel.close()

  def _call(self, method: Any, request: Any) -> Any:
    try:
      return method(request, timeout=self._limit_s, metadata=self._metadata)
    except grpc.RpcError as error:
      raise self._failure(error) from None

  def _failure(self, error: grpc.RpcError) -> Exception:
    return client.failure(error, self._address, self._limit_s, "host")


class _Incoming:
  """A copy that comes in; memory is taken for no more than is allowed."""

  def __init__(self, first: pb.CopyChunk, max_bytes: int):
    if first.WhichOneof("part") != "header":
      raise messages.malformed("a copy without a header")
    self._header = first.header
    self._parts: list[tuple[tuple[int, ...], np.dtype[Any], int]] = []
    total = 0
    for shard in first.header.shards:
      shape = tuple(
        stop - start
        for start, stop in zip(shard.start, shard.stop, strict=True)
      )
      try:
        dtype = np.dtype(shard.dtype)
      except TypeError:
        raise messages.malformed(f"dtype {shard.dtype!r}") from None
      if any(size < 0 for size in shape) or dtype.hasobject:
        raise messages.malformed(f"a shard of {dtype} {shape}")
      nbytes = math.prod(shape) * dtype.itemsize
      self._parts.append((shape, dtype, nbytes))
      total += nbytes
    if total > max_bytes:
      raise Refused(
        "shape",
        f"a copy of {total} bytes, no more than {max_bytes} can be a host's: "
        "are both of one program?",
      )
    self._data = bytearray(total)
    self._checked = states.Checked()

  def add(self, chunk: pb.CopyChunk) -> None:
    if chunk.WhichOneof("part") != "data":
      raise messages.malformed("a second header in a copy")
    at = self._checked.size
    end = at + len(chunk.data.data)
    if end > len(self._data):
      raise Refused("shape", "the stream is longer than its header says")
    self._checked.add(chunk.data.data, chunk.data.crc32)
    self._data[at:end] = chunk.data.data

  def finish(self) -> HostCopy:
    if self._checked.size != len(self._data):
      raise Refused(
        "incomplete",
        f"the stream ended after {self._checked.size} of {len(self._data)} "
        "bytes",
      )
    header, at, shards = self._header, 0, []
    for said, (shape, dtype, nbytes) in zip(
      header.shards, self._parts, strict=True
    ):
      raw = np.frombuffer(self._data, np.uint8, nbytes, at)
      index = tuple(zip(said.start, said.stop, strict=True))
      data = raw.view(dtype).reshape(shape)
      shards.append(Shard(said.leaf, index, data, said.crc32))
      at += nbytes
    copy = HostCopy(
      header.owner,
      header.epoch,
      header.step,
      {each.name: each.value for each in header.counters},
      tuple(shards),
    )
    copy.check()
    return copy


def _outgoing(copy: HostCopy, learner_id: int) -> Iterator[pb.CopyChunk]:
  yield pb.CopyChunk(
    header=pb.HostCopyHeader(
      learner_id=learner_id,
      owner=copy.owner,
      epoch=copy.epoch,
      step=copy.step,
      counters=[
        pb.Counter(name=name, value=value)
        for name, value in copy.counters.items()
      ],
      shards=[
        pb.ShardHeader(
          leaf=shard.leaf,
          start=[start for start, _ in shard.index],
          stop=[stop for _, stop in shard.index],
          dtype=shard.data.dtype.name,
          crc32=shard.crc32,
        )
        for shard in copy.shards
      ],
    )
  )
  arrays: Iterable[np.ndarray] = (shard.data for shard in copy.shards)
  for piece in chunks.split(arrays, credentials.CHUNK_BYTES):
    data = fragments_pb.Data(crc32=piece.crc32, data=piece.data)
    yield pb.CopyChunk(data=data)
