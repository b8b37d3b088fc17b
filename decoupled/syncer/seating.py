"""The seats service: through it the hosts of a learner form their epochs.

A host has its seat for as long as its stream lives and speaks; see `seats` for
what follows from one that is lost. Each is told the whole state whenever it
changes. A host that still believes in an epoch that has gone on without it is
refused: it is a zombie.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc.aio

from decoupled.errors import Refused
from decoupled.syncer.control import same_protocol
from decoupled.syncer.driver import Driver, JobT
from decoupled.syncer.seats import SeatLimits, Seats, State
from decoupled.syncer.settings import Limits
from decoupled.types import Phase, Seat, SeatWord, Sitting
from decoupled.wire import messages
from decoupled.wire.proto.decoupled.v1 import seats_pb2 as pb
from decoupled.wire.proto.decoupled.v1 import seats_pb2_grpc
from decoupled.wire.refusals import refuse

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

_LOG = logging.getLogger("decoupled.syncer")
_TICK_S = 0.1
_EPOCHS_PER_TERM = 1 << 16
_SILENT_SHARE = 0.5  # of a collective's limit


@dataclasses.dataclass(eq=False)
class _Stream:
  """An open stream.

  Attributes:
    said: the newest that its host has said.
    heard_at: when.
    news: set while there is something to tell.
    cut: fails when the syncer ends the stream.
  """

  said: Sitting
  heard_at: float
  news: asyncio.Event
  cut: asyncio.Future[None]


@dataclasses.dataclass(eq=False)
class _Table:
  """One learner: its seats, and the streams of who sits on them."""

  seats: Seats
  streams: dict[int, _Stream] = dataclasses.field(default_factory=dict)
  known: bool = False  # it has trained once, so that standbys are wanted


class Seating(seats_pb2_grpc.SeatsServicer):
  """Serves `decoupled.v1.Seats`.

  Args:
    driver: of the rounds, whose pool has the standbys.
    limits: how long hosts may take.
    open_s: how long a new stream may take to say whose it is.
  """

  def __init__(self, driver: Driver[JobT], limits: Limits, open_s: float):
    self._driver = driver
    self._rounds = driver.rounds
    self._pool = driver.rounds.pool
    self._open_s = open_s
    self._silent_s = _SILENT_SHARE * limits.collective_s
    self._lease_s = limits.lease_s
    self._limits = SeatLimits(
      prepare_s=limits.reform_s,
      commit_s=limits.reform_s,
      short_s=limits.seat_s,
    )
    self._tables: dict[int, _Table] = {}
    self._ticking: asyncio.Task[None] | None = None
    self._empty = asyncio.Event()
    self._empty.set()

  def changed(self) -> None:
    """The run's phase may have changed."""
    for table in self._tables.values():
      for stream in table.streams.values():
        stream.news.set()

  def close(self) -> None:
    """Watches no seat any more."""
    if self._ticking is not None:
      self._ticking.cancel()

  async def all_gone(self) -> None:
    """Returns when no host has a seat any more."""
    await self._empty.wait()

  async def Sit(  # type: ignore[override]
    self, request_iterator: AsyncIterator[pb.Sitting], context: Context
  ) -> None:
    try:
      table, stream = await self._open(request_iterator)
    except Refused as error:
      await refuse(context, error)
    ending = [
      asyncio.create_task(self._hear(table, stream, request_iterator)),
      asyncio.create_task(self._tell(table, stream, context)),
      stream.cut,
    ]
    try:
      await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
    finally:
      for future in ending:
        future.cancel()
      self._close(table, stream)
    results = await asyncio.gather(*ending, return_exceptions=True)
    for result in results:
      if isinstance(result, Refused):
        await refuse(context, result)
      if isinstance(result, Exception):
        raise result

  # --- streams ---------------------------------------------------------------

  async def _open(
    self, said: AsyncIterator[pb.Sitting]
  ) -> tuple[_Table, _Stream]:
    """Waits for the message that says whose stream this is; seats the host."""
    if self._ticking is None:
      self._ticking = asyncio.create_task(self._tick())
    try:
      first = await asyncio.wait_for(anext(said, None), self._open_s)
    except TimeoutError:
      first = None
    if first is None:
      raise messages.malformed("a host that says nothing")
    same_protocol(first.protocol, first.holder)
    sitting = messages.sitting_from(first)
    table = self._table(sitting)
    self._seat(table, sitting)
    stream = _Stream(
      sitting,
      self._now,
      asyncio.Event(),
      asyncio.get_running_loop().create_future(),
    )
    self._cut(table, sitting.rank, Refused("fenced", "it has a newer stream"))
    table.streams[sitting.rank] = stream
    self._empty.clear()
    self._act(table, stream)
    return table, stream

  def _table(self, sitting: Sitting) -> _Table:
    table = self._tables.get(sitting.learner_id)
    if table is None:
      # numbers that no syncer before this one has used
      base = self._rounds.term * _EPOCHS_PER_TERM
      if sitting.epoch > sitting.left:  # it may have formed one before
        base = sitting.epoch
      table = _Table(Seats(sitting.hosts, self._limits, base))
      self._tables[sitting.learner_id] = table
    if table.seats.hosts != sitting.hosts:
      raise Refused(
        "hosts",
        f"{sitting.holder} is one of {sitting.hosts} hosts, learner "
        f"{sitting.learner_id} has {table.seats.hosts}: give every host the "
        "same --num_processes",
      )
    return table

  def _seat(self, table: _Table, sitting: Sitting) -> None:
    """Sits a host down; raises Refused where somebody else sits there."""
    seats, rank, holder = table.seats, sitting.rank, sitting.holder
    if 0 <= rank < seats.hosts and seats.proposed.holders[rank] == holder:
      return
    goes_on = sitting.epoch and sitting.left < sitting.epoch
    if goes_on and not table.known and sitting.epoch >= seats.epoch:
      seats.resume(self._now, rank, holder, sitting.epoch)
    else:
      seats.take(self._now, rank, holder, fresh=not sitting.copies)
    self._driver.call(self._pool.seated, sitting.learner_id, rank, holder)

  def _cut(self, table: _Table, rank: int, why: Refused) -> None:
    stream = table.streams.pop(rank, None)
    if stream is not None and not stream.cut.done():
      stream.cut.set_exception(why)

  def _close(self, table: _Table, stream: _Stream) -> None:
    """Forgets a stream; its seat is empty unless a newer one carries it."""
    said = stream.said
    if table.streams.get(said.rank) is stream:
      del table.streams[said.rank]
      table.seats.lost(self._now, said.rank, said.holder, table.seats.epoch)
      self._settle(said.learner_id, table)
    if not any(each.streams for each in self._tables.values()):
      self._empty.set()

  async def _hear(
    self, table: _Table, stream: _Stream, said: AsyncIterator[pb.Sitting]
  ) -> None:
    async for message in said:
      sitting = messages.sitting_from(message)
      own = stream.said
      for name in ("learner_id", "rank", "hosts", "holder"):
        if getattr(own, name) != getattr(sitting, name):
          raise messages.malformed(f"another {name} on the stream of {own}")
      stream.said, stream.heard_at = sitting, self._now
      self._act(table, stream)

  def _act(self, table: _Table, stream: _Stream) -> None:
    """What follows from what a host has just said."""
    seats, said, now = table.seats, stream.said, self._now
    epoch = seats.epoch
    if seats.proposed.holders[said.rank] != said.holder:
      raise Refused(
        "fenced",
        f"host {said.rank} of learner {said.learner_id} is "
        f"{seats.proposed.holders[said.rank] or 'nobody'} in epoch {epoch}, "
        f"not {said.holder}",
      )
    with contextlib.suppress(Refused):  # "busy": said again when it is time
      if said.left == epoch:
        seats.left(now, said.rank, said.holder, epoch)
      elif said.ready == epoch and seats.state is State.PREPARING:
        seats.ready(now, said.rank, said.holder, epoch)
      if said.stepped == epoch:
        seats.stepped(now, said.rank, said.holder, epoch)
    self._settle(said.learner_id, table)

  def _settle(self, learner_id: int, table: _Table) -> None:
    """Tells the pool and the hosts what has become of the seats."""
    seats = table.seats
    table.known = table.known or seats.formed
    if seats.state is State.RECOVERING:
      why = Refused("recover", f"learner {learner_id}: {seats.why}")
      for rank in list(table.streams):
        self._cut(table, rank, why)
      seats.recovered(self._now, {})
    if table.known:
      ending = self._rounds.phase not in (Phase.WAITING, Phase.TRAINING)
      empty = () if ending else seats.empty
      self._driver.call(self._pool.seats, learner_id, empty)
    for stream in table.streams.values():
      stream.news.set()

  async def _tell(
    self, table: _Table, stream: _Stream, context: Context
  ) -> None:
    """Sends the newest word whenever there is a newer one."""
    told: SeatWord | None = None
    while True:
      await stream.news.wait()
      stream.news.clear()
      word = self._word(table)
      if word == told:
        continue
      told = word
      await context.write(messages.seat_word_to(word))

  def _word(self, table: _Table) -> SeatWord:
    seats = []
    for rank, holder in enumerate(table.seats.proposed.holders):
      stream = table.streams.get(rank)
      said = None if stream is None else stream.said
      if said is None or said.holder != holder:
        seats.append(Seat(holder))
      else:
        seats.append(Seat(holder, said.address, said.copies))
    return SeatWord(
      epoch=table.seats.epoch,
      state=table.seats.state,
      why=table.seats.why,
      seats=tuple(seats),
      phase=self._rounds.phase,
    )

  # --- time ------------------------------------------------------------------

  @property
  def _now(self) -> float:
    return self._driver.now()

  async def _tick(self) -> None:
    while True:
      await asyncio.sleep(_TICK_S)
      for learner_id, table in list(self._tables.items()):
        try:
          self._look(learner_id, table)
        except Exception:  # of one learner: the others' seats are watched on
          _LOG.exception("the seats of learner %d", learner_id)

  def _look(self, learner_id: int, table: _Table) -> None:
    """Ends what has been silent, or has taken, too long.

    A host that is frozen is known by both: its peers' epoch has broken, and it
    says nothing.
    """
    seats, now = table.seats, self._now
    before = seats.epoch, seats.state
    for rank, stream in list(table.streams.items()):
      broken = bool(seats.broken) and rank not in seats.broken
      limit_s = self._silent_s if broken else self._lease_s
      if now - stream.heard_at > limit_s:
        said = stream.said
        why = f"host {rank} was silent for {limit_s:g} s; its seat is empty"
        self._cut(table, rank, Refused("fenced", why))
        seats.lost(now, rank, said.holder, seats.epoch)
    seats.tick(now)
    if (seats.epoch, seats.state) != before:
      for rank, stream in list(table.streams.items()):
        if seats.proposed.holders[rank] != stream.said.holder:
          why = f"host {rank} was too late: {seats.why}"
          self._cut(table, rank, Refused("fenced", why))
      self._settle(learner_id, table)
