"""The fragment store: copies on their way up, merged fragments down.

Memory is bounded: a stream may not bring more bytes than the manifest gives
its fragment, and a learner has a limited number of transfers. Work on whole
fragments happens off the event loop.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeAlias

import grpc
import grpc.aio
import numpy as np

from decoupled import faults
from decoupled.errors import Refused
from decoupled.syncer.assembly import Assemblies
from decoupled.syncer.control import Traffic
from decoupled.syncer.driver import Driver, JobT
from decoupled.types import (
  NO_VERSION,
  Arrays,
  Contribution,
  EventSink,
  MergedFragment,
  Version,
)
from decoupled.wire import chunks, codecs, messages
from decoupled.wire.credentials import CHUNK_BYTES
from decoupled.wire.messages import Encoding
from decoupled.wire.proto.decoupled.v1 import (
  fragments_pb2 as pb,
)
from decoupled.wire.proto.decoupled.v1 import (
  fragments_pb2_grpc as pb_grpc,
)
from decoupled.wire.refusals import refuse

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

TRANSFERS_PER_LEARNER = 8


class FragmentStore(pb_grpc.FragmentStoreServicer):
  """Serves `decoupled.v1.FragmentStore`.

  Args:
    driver: of the rounds.
    traffic: counts the bytes.
    parts: where the parts of copies are put together.
    transfer_s: how long one transfer may take.
    events: where refusals go that never reach the rounds.
  """

  def __init__(
    self,
    driver: Driver[JobT],
    traffic: Traffic,
    parts: Assemblies,
    transfer_s: float,
    events: EventSink | None,
  ):
    self._driver = driver
    self._rounds = driver.rounds
    self._traffic = traffic
    self._parts = parts
    self._transfer_s = transfer_s
    self._events = events
    self._busy: collections.Counter[tuple[int, int]] = collections.Counter()
    self._pool = concurrent.futures.ThreadPoolExecutor(1, "decode")

  def close(self) -> None:
    self._pool.shutdown(wait=False, cancel_futures=True)

  # --- up ------------------------------------------------------------------

  async def Contribute(
    self, request_iterator: AsyncIterator[pb.Chunk], context: Context
  ) -> pb.ContributeReply:
    known: list[Contribution] = []
    try:
      async with asyncio.timeout(self._transfer_s):
        contribution = await self._receive(request_iterator, known)
      faults.reached("syncer.received")
      if contribution.slices:
        whole = self._joined(contribution)
        if whole is None:
          return pb.ContributeReply()
        contribution = whole
      reason = self._driver.call(self._rounds.contribution, contribution)
      return pb.ContributeReply(refusal=reason)
    except Refused as error:
      self._note(known, error.reason)
      return pb.ContributeReply(refusal=error.reason, message=str(error))
    except TimeoutError:
      self._note(known, "timeout")
      return pb.ContributeReply(
        refusal="timeout",
        message=f"the transfer took longer than {self._transfer_s:g} s",
      )

  def _joined(self, part: Contribution) -> Contribution | None:
    """The copy that a part has made complete, if it has."""
    shapes = self._shapes(part.header.copy.fragment)
    return self._parts.add(part, shapes)

  async def _receive(
    self, stream: AsyncIterator[pb.Chunk], known: list[Contribution]
  ) -> Contribution:
    """Reads one contribution; `known` gets its header for the log."""
    parts = aiter(stream)
    first = await anext(parts, None)
    if first is None:
      raise messages.malformed("a contribution without anything in it")
    contribution, encoding = messages.contribution_from(first)
    known.append(contribution)
    if contribution.slices:
      shapes = self._shapes(contribution.header.copy.fragment)
      self._parts.check(contribution, shapes)
    with self._transfer(contribution.learner_id, contribution.host):
      payload = await self._assemble(parts, contribution, encoding)
      arrays = await self._decode(contribution, encoding, payload)
    return dataclasses.replace(contribution, arrays=arrays)

  @contextlib.contextmanager
  def _transfer(self, learner_id: int, host: int) -> Iterator[None]:
    who = (learner_id, host)
    if self._busy[who] >= TRANSFERS_PER_LEARNER:
      raise Refused(
        "busy",
        f"learner {learner_id} has {TRANSFERS_PER_LEARNER} transfers already",
      )
    self._busy[who] += 1
    try:
      yield
    finally:
      self._busy[who] -= 1
      if not self._busy[who]:
        del self._busy[who]

  async def _assemble(
    self,
    parts: AsyncIterator[pb.Chunk],
    contribution: Contribution,
    encoding: Encoding,
  ) -> codecs.Payload:
    assembly = self._assembly(contribution, encoding)
    async for part in parts:
      data = messages.data_from(part)
      self._traffic.bytes_up += len(data.data)
      assembly.add(data.data, data.crc32)
      faults.reached("syncer.half_received")
    return assembly.finish()

  def _shapes(self, fragment: int) -> list[tuple[int, ...]]:
    """Of the units of a fragment."""
    manifest = self._rounds.manifest
    if fragment >= len(manifest.fragments):
      raise Refused("fragment", f"this run has no fragment {fragment}")
    return [manifest.shape(unit) for unit in manifest.fragments[fragment]]

  def _assembly(
    self, contribution: Contribution, encoding: Encoding
  ) -> chunks.Assembly:
    fragment = contribution.header.copy.fragment
    shapes = self._shapes(fragment)
    if contribution.slices:  # checked: they lie in their units, disjoint
      shapes = [box.shape for box in contribution.slices]
    dtype: np.dtype[Any] = (
      codecs.FULL if encoding.base is None else codecs.DELTA
    )
    expected = chunks.count(shapes) * dtype.itemsize
    if encoding.size != expected:
      raise Refused(
        "shape",
        f"fragment {fragment} has {expected} bytes, {encoding.size} were "
        "announced",
      )
    return chunks.Assembly(shapes, dtype)

  async def _decode(
    self,
    contribution: Contribution,
    encoding: Encoding,
    payload: codecs.Payload,
  ) -> Arrays:
    if encoding.base is None:
      return payload
    fragment = contribution.header.copy.fragment
    base = self._rounds.published(fragment, encoding.base)
    if base is None:
      raise Refused(
        "base",
        f"fragment {fragment} is no longer at {tuple(encoding.base)}",
      )
    if contribution.slices:
      base = tuple(base[s.unit][s.within] for s in contribution.slices)
    return await asyncio.get_running_loop().run_in_executor(
      self._pool, codecs.decode, encoding.codec, payload, base
    )

  def _note(self, known: list[Contribution], reason: str) -> None:
    """Logs a refusal in the same terms as those of the rounds."""
    if self._events is None or not known:
      return
    header = known[0].header
    self._events.emit(
      "refused",
      learner=known[0].learner_id,
      round=header.copy.round,
      fragment=header.copy.fragment,
      reason=reason,
      tokens=header.tokens,
    )

  # --- down ----------------------------------------------------------------

  async def Fetch(
    self, request: pb.FetchRequest, context: Context
  ) -> AsyncIterator[pb.Chunk]:
    try:
      held = messages.version_from(request.held)
      merged = self._driver.call(
        self._rounds.fetch,
        request.learner_id,
        request.incarnation,
        request.fragment,
      )
    except Refused as error:
      await refuse(context, error)
    for chunk in self.down(merged, held):
      yield chunk

  def down(self, merged: MergedFragment, held: Version) -> Iterator[pb.Chunk]:
    """A fragment as a stream, for who holds the version `held` of it."""
    encoding, payload = self._encoded(merged, held)
    yield messages.fragment_to(merged, encoding)
    faults.reached("syncer.half_sent")
    for piece in chunks.split(payload, CHUNK_BYTES):
      self._traffic.bytes_down += len(piece.data)
      yield pb.Chunk(data=pb.Data(crc32=piece.crc32, data=piece.data))

  def _encoded(
    self, merged: MergedFragment, held: Version
  ) -> tuple[Encoding, codecs.Payload]:
    """As a delta where the other end has its base, else in full."""
    short = None
    if held != NO_VERSION:
      short = self._rounds.delta(merged.fragment, held)
    if short is not None and short[0] == merged.version:
      payload = short[1]
      if codecs.is_delta(payload):
        encoding = Encoding("bfloat16", held, chunks.size(payload))
        return encoding, payload
    size = chunks.size(merged.arrays)
    return Encoding("float32", None, size), merged.arrays
