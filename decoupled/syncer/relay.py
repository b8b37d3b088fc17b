"""Passes a donor's optimizer state on to the joiner that asked for it.

The two calls meet in a pipe of a few chunks: a joiner that reads slowly slows
its donor's stream, and the syncer never holds more than that.
"""

import asyncio
import collections
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc.aio

from decoupled import faults
from decoupled.errors import Refused
from decoupled.syncer.control import Traffic
from decoupled.syncer.donors import Donation
from decoupled.syncer.driver import Driver, JobT
from decoupled.types import StateHeader
from decoupled.wire import messages, states
from decoupled.wire.proto.decoupled.v1 import (
  donations_pb2 as pb,
)
from decoupled.wire.proto.decoupled.v1 import (
  donations_pb2_grpc as pb_grpc,
)
from decoupled.wire.refusals import refuse

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

_CHUNKS_HELD = 4


class Relay(pb_grpc.DonationsServicer):
  """Serves `decoupled.v1.Donations`.

  Args:
    driver: of the rounds, which choose the donors.
    traffic: counts the bytes.
    silent_s: how long a donor's call may send nothing before it is ended.
  """

  def __init__(self, driver: Driver[JobT], traffic: Traffic, silent_s: float):
    self._driver = driver
    self._donors = driver.rounds.donors
    self._traffic = traffic
    self._silent_s = silent_s
    self._pipes: dict[int, _Pipe] = {}

  # --- to the joiner -------------------------------------------------------

  async def Take(  # type: ignore[override]
    self, request: pb.TakeRequest, context: Context
  ) -> None:
    try:
      donation = self._driver.call(
        self._donors.ask_itself if request.own else self._donors.ask,
        request.learner_id,
        request.incarnation,
      )
      await self._pass_down(donation, context)
    except Refused as error:
      await refuse(context, error)

  async def _pass_down(self, donation: Donation, context: Context) -> None:
    number, pipe = donation.request, _Pipe()
    donation.told = lambda: pipe.end(donation.over or "")
    self._pipes[number] = pipe
    try:
      while (part := await pipe.get()) is not None:
        await context.write(part)
        self._traffic.bytes_down += len(part.data.data)
      self._driver.call(self._donors.done, number)
    finally:
      del self._pipes[number]
      self._driver.call(self._donors.fail, number, "its joiner stopped reading")

  # --- from the donor ------------------------------------------------------

  async def Give(
    self, request_iterator: AsyncIterator[pb.StateChunk], context: Context
  ) -> pb.GiveReply:
    parts = aiter(request_iterator)
    try:
      first = await self._next(parts)
      if first is None:
        raise messages.malformed("a state without anything in it")
      header = messages.state_header_from(first)
      self._moved(header, 0)
      await self._pass_on(header, first, parts)
    except Refused as error:
      return pb.GiveReply(refusal=error.reason, message=str(error))
    return pb.GiveReply()

  async def _pass_on(
    self,
    header: StateHeader,
    first: pb.StateChunk,
    parts: AsyncIterator[pb.StateChunk],
  ) -> None:
    pipe = self._pipes.get(header.request)
    if pipe is None:
      raise Refused("late", f"nobody reads request {header.request} any more")
    why = f"the transfer from learner {header.donor} was cut off"
    try:
      await pipe.put(first)
      await self._check(header, pipe, parts)
      await pipe.put(None)
      why = ""
    except Refused as error:
      why = f"learner {header.donor}: {error}"
      raise
    finally:
      if why:
        self._driver.call(self._donors.fail, header.request, why)

  async def _check(
    self,
    header: StateHeader,
    pipe: "_Pipe",
    parts: AsyncIterator[pb.StateChunk],
  ) -> None:
    """Passes the data on; damage ends here, not at the joiner."""
    checked = states.Checked()
    while (part := await self._next(parts)) is not None:
      data = messages.data_from(part)
      checked.add(data.data, data.crc32)
      self._traffic.bytes_up += len(data.data)
      self._moved(header, len(data.data))
      faults.reached("syncer.relaying")
      await pipe.put(part)
    states.check_size(header, checked.size)

  def _moved(self, header: StateHeader, size: int) -> None:
    self._donors.moved(
      self._driver.now(), header.request, header.donor, header.incarnation, size
    )

  async def _next(
    self, parts: AsyncIterator[pb.StateChunk]
  ) -> pb.StateChunk | None:
    try:
      return await asyncio.wait_for(anext(parts, None), self._silent_s)
    except TimeoutError:
      raise Refused(
        "timeout", f"nothing came for {self._silent_s:g} s"
      ) from None


class _Pipe:
  """Chunks on their way from one call to the other; one at each end."""

  def __init__(self) -> None:
    self._parts: collections.deque[pb.StateChunk | None] = collections.deque()
    self._news = asyncio.Event()
    self._broken = ""

  async def put(self, part: pb.StateChunk | None) -> None:
    """Waits for room; None is the end.

    Raises:
      Refused: `late`: nobody waits for it any more.
    """
    while len(self._parts) >= _CHUNKS_HELD and not self._broken:
      await self._wait()
    if self._broken:
      raise Refused("late", self._broken)
    self._parts.append(part)
    self._news.set()

  async def get(self) -> pb.StateChunk | None:
    """Waits for the next chunk.

    Raises:
      Refused: `donor`: it will not come.
    """
    while not self._parts and not self._broken:
      await self._wait()
    if self._broken:
      raise Refused("donor", self._broken)
    self._news.set()
    return self._parts.popleft()

  def end(self, broken: str) -> None:
    """The donation is over; "" if all has been passed on."""
    self._broken = broken
    self._news.set()

  async def _wait(self) -> None:
    # never both at once: the pipe is not full and empty at a time
    self._news.clear()
    await self._news.wait()
