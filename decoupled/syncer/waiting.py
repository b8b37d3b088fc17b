"""The pool service: where standbys wait, and follow the global fragments.

As with control streams, each is told the whole state whenever it changes, and
one that reads slowly holds up nobody.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc.aio

from decoupled.errors import Refused
from decoupled.syncer.control import same_protocol
from decoupled.syncer.driver import Driver, JobT
from decoupled.syncer.transfers import FragmentStore
from decoupled.types import Phase, PoolWord
from decoupled.wire import messages
from decoupled.wire.proto.decoupled.v1 import (
  fragments_pb2,
  pool_pb2_grpc,
)
from decoupled.wire.proto.decoupled.v1 import (
  pool_pb2 as pb,
)
from decoupled.wire.refusals import refuse

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

MAX_STANDBYS = 1024


@dataclasses.dataclass(eq=False)
class _Stream:
  """An open stream: which standby's, and whether there is news for it."""

  number: int
  news: asyncio.Event


class Waiting(pool_pb2_grpc.PoolServicer):
  """Serves `decoupled.v1.Pool`.

  Args:
    driver: of the rounds, whose pool this is.
    store: sends fragments.
    open_s: how long a new stream may take to say whose it is.
  """

  def __init__(self, driver: Driver[JobT], store: FragmentStore, open_s: float):
    self._driver = driver
    self._rounds = driver.rounds
    self._pool = driver.rounds.pool
    self._store = store
    self._open_s = open_s
    self._streams: set[_Stream] = set()
    self._empty = asyncio.Event()
    self._empty.set()

  def changed(self) -> None:
    """Words may have changed: every standby is told the current one."""
    for stream in self._streams:
      stream.news.set()

  async def all_gone(self) -> None:
    """Returns when no standby waits any more."""
    await self._empty.wait()

  async def Wait(  # type: ignore[override]
    self, request_iterator: AsyncIterator[pb.Standing], context: Context
  ) -> None:
    try:
      stream = await self._open(request_iterator)
    except Refused as error:
      await refuse(context, error)
    self._streams.add(stream)
    self._empty.clear()
    ending = [
      asyncio.create_task(self._hear(stream, request_iterator)),
      asyncio.create_task(self._tell(stream, context)),
    ]
    try:
      await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
    finally:
      for task in ending:
        task.cancel()
      self._streams.discard(stream)
      if not self._streams:
        self._empty.set()
      why = "its connection closed"
      self._driver.call(self._pool.gone, stream.number, why)
    results = await asyncio.gather(*ending, return_exceptions=True)
    for result in results:
      if isinstance(result, Refused):
        await refuse(context, result)
      if isinstance(result, Exception):
        raise result

  async def Follow(
    self, request: pb.FollowRequest, context: Context
  ) -> AsyncIterator[fragments_pb2.Chunk]:
    try:
      held = messages.version_from(request.held)
      merged = self._driver.call(self._rounds.follow, request.fragment)
    except Refused as error:
      await refuse(context, error)
    for chunk in self._store.down(merged, held):
      yield chunk

  async def _open(self, said: AsyncIterator[pb.Standing]) -> _Stream:
    if len(self._streams) >= MAX_STANDBYS:
      raise Refused(
        "full", f"this syncer has {MAX_STANDBYS} standbys already: stop one"
      )
    try:
      first = await asyncio.wait_for(anext(said, None), self._open_s)
    except TimeoutError:
      first = None
    if first is None:
      raise messages.malformed("a standby that says nothing")
    same_protocol(first.protocol, first.holder)
    standing = messages.standing_from(first)
    number = self._driver.call(self._rounds.enter_pool, standing)
    stream = _Stream(number, asyncio.Event())
    stream.news.set()
    return stream

  async def _hear(
    self, stream: _Stream, said: AsyncIterator[pb.Standing]
  ) -> None:
    async for message in said:
      standing = messages.standing_from(message)
      self._driver.call(self._pool.said, stream.number, standing)

  async def _tell(self, stream: _Stream, context: Context) -> None:
    """Sends the newest word whenever there is a newer one."""
    told: PoolWord | None = None
    while True:
      await stream.news.wait()
      stream.news.clear()
      word = self._word(stream)
      if word == told:
        continue  # the news were others'
      told = word
      await context.write(messages.pool_word_to(word))

  def _word(self, stream: _Stream) -> PoolWord:
    model = self._rounds.model
    offer = None
    if self._rounds.phase in (Phase.WAITING, Phase.TRAINING):
      offer = self._pool.offer(stream.number)
    return PoolWord(
      run_id=self._rounds.run_id,
      phase=self._rounds.phase,
      versions=() if model is None else model.versions,
      offer=offer,
      heartbeat_s=self._pool.heartbeat_s,
    )
