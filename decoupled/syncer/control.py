"""The membership service: claims, control streams, the operator's calls.

A claim lives as long as its control streams, one for each host of the learner.
Each stream is told the whole state whenever it changes; a reader that is slow
misses intermediate states, never the newest one, and holds up nobody.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
import grpc.aio

from decoupled import faults, types
from decoupled.errors import Refused
from decoupled.syncer import hosts
from decoupled.syncer.assembly import Assemblies
from decoupled.syncer.driver import Driver, JobT
from decoupled.types import (
  PROTOCOL_VERSION,
  Heartbeat,
  Report,
  RunContract,
  Stage,
  Welcome,
)
from decoupled.wire import messages
from decoupled.wire.proto.decoupled.v1 import (
  membership_pb2 as pb,
)
from decoupled.wire.proto.decoupled.v1 import (
  membership_pb2_grpc as pb_grpc,
)
from decoupled.wire.refusals import refuse
from decoupled.wire.status import JobStatus, LearnerStatus

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


@dataclasses.dataclass
class Traffic:
  """Bytes of messages, seen from the syncer.

  Attributes:
    bytes_up: from learners.
    bytes_down: to learners.
  """

  bytes_up: int = 0
  bytes_down: int = 0


@dataclasses.dataclass(frozen=True)
class _Claim:
  """What is remembered of a granted hello."""

  incarnation: int
  holder: str
  hosts: int
  epoch: int = 0


@dataclasses.dataclass(eq=False)
class _Stream:
  """An open control stream.

  Attributes:
    learner_id: whose.
    host: which of its hosts.
    incarnation: under which fencing number.
    heard_at: when something last came from it.
    news: set while there is something to tell.
    cut: fails when the syncer ends the stream.
    report: its newest report.
    left: it said that it goes.
  """

  learner_id: int
  host: int
  incarnation: int
  heard_at: float
  news: asyncio.Event
  cut: asyncio.Future[None]
  report: Report | None = None
  left: bool = False


@dataclasses.dataclass(eq=False)
class _Waiting:
  """Hosts of one learner whose claim is not complete yet."""

  gathering: hosts.Gathering = dataclasses.field(
    default_factory=hosts.Gathering
  )
  answers: dict[int, asyncio.Future[Welcome]] = dataclasses.field(
    default_factory=dict
  )


class Membership(pb_grpc.MembershipServicer):
  """Serves `decoupled.v1.Membership`.

  Args:
    driver: of the rounds; tell it to call `changed`.
    traffic: counts the bytes.
    parts: told which incarnations there are.
    max_learners: learners with control streams at one time.
    open_s: how long a new stream may take to say whose it is.
    hosts_s: how long a host's claim waits for the learner's other hosts.
  """

  def __init__(
    self,
    driver: Driver[JobT],
    traffic: Traffic,
    parts: Assemblies,
    max_learners: int,
    open_s: float,
    hosts_s: float,
  ):
    self._driver = driver
    self._rounds = driver.rounds
    self._traffic = traffic
    self._parts = parts
    self._max_learners = max_learners
    self._open_s = open_s
    self._hosts_s = hosts_s
    self._streams: dict[tuple[int, int], _Stream] = {}
    self._claims: dict[int, _Claim] = {}
    self._groups: dict[int, hosts.Group] = {}
    self._waiting: dict[int, _Waiting] = {}
    self._run_id = ""
    self._empty = asyncio.Event()
    self._empty.set()

  def changed(self) -> None:
    """Announcements may have changed: every stream is told the current one."""
    for stream in self._streams.values():
      stream.news.set()

  async def all_gone(self) -> None:
    """Returns when no control stream is open."""
    await self._empty.wait()

  # --- calls ---------------------------------------------------------------

  async def Contract(
    self, request: pb.ContractRequest, context: Context
  ) -> pb.ContractReply:
    try:
      same_protocol(request.protocol, request.holder)
    except Refused as error:
      await refuse(context, error)
    rounds = self._rounds
    lines = tuple(sorted(rounds.contract.items()))
    manifest = None if rounds.model is None else rounds.manifest
    said = RunContract(rounds.run_id, rounds.phase, lines, manifest)
    return messages.run_contract_to(said)

  async def Hello(
    self, request: pb.HelloRequest, context: Context
  ) -> pb.Welcome:
    self._traffic.bytes_up += request.ByteSize()
    try:
      welcome = await self._hello(request)
    except Refused as error:
      await refuse(context, error)
    reply = messages.welcome_to(welcome)
    self._traffic.bytes_down += reply.ByteSize()
    return reply

  async def _hello(self, request: pb.HelloRequest) -> Welcome:
    same_protocol(request.protocol, request.holder)
    hello = messages.hello_from(request)
    if hello.hosts == 1:
      return self._grant(hello)
    if hello.learner_id < 0:
      raise Refused(
        "hosts",
        f"{hello.holder} is one of {hello.hosts} hosts: these must name the "
        "--learner_id that they have in common",
      )
    return await self._together(hello)

  async def _together(self, hello: types.Hello) -> Welcome:
    """The answer to a claim of several hosts, once all of them have claimed.

    Raises:
      Refused: the claim is, or some host was not there in time.
    """
    learner_id = hello.learner_id
    waiting = self._waiting.setdefault(learner_id, _Waiting())
    for host in waiting.gathering.add(hello):
      self._answer(
        waiting,
        host,
        Refused(
          "fenced",
          f"host {host} of learner {learner_id} was claimed again by "
          f"{hello.holder}",
        ),
      )
    answer = asyncio.get_running_loop().create_future()
    waiting.answers[hello.host] = answer
    self._renewed(hello)
    if waiting.gathering.complete:
      del self._waiting[learner_id]
      self._decide(waiting)
    try:
      return await asyncio.wait_for(answer, self._hosts_s)
    except TimeoutError:
      raise hosts.incomplete(
        learner_id, waiting.gathering.missing, self._hosts_s
      ) from None
    finally:
      waiting.gathering.take_back(hello)

  def _decide(self, waiting: _Waiting) -> None:
    """Grants or refuses a complete claim; all its hosts hear the same."""
    found: Welcome | Refused
    try:
      joined = waiting.gathering.joined()
      self._succeed(joined)
      found = self._grant(joined)
    except Refused as error:
      found = error
    for host in list(waiting.answers):
      self._answer(waiting, host, found)

  def _succeed(self, hello: types.Hello) -> None:
    """Hosts that have formed a newer epoch are the learner, and nobody else."""
    claim = self._claims.get(hello.learner_id)
    if claim is not None and hello.epoch > claim.epoch:
      self._end(
        hello.learner_id,
        claim.incarnation,
        f"its hosts have formed epoch {hello.epoch}",
      )

  def _answer(
    self, waiting: _Waiting, host: int, found: Welcome | Refused
  ) -> None:
    answer = waiting.answers.pop(host, None)
    if answer is None or answer.done():
      return
    if isinstance(found, Refused):
      answer.set_exception(found)
    else:
      answer.set_result(found)

  def _renewed(self, hello: types.Hello) -> None:
    """A host that claims again has lost its connection: the others must, too.

    Its stream may be open still, as far as is known here.
    """
    group = self._groups.get(hello.learner_id)
    claim = self._claims.get(hello.learner_id)
    if (
      group is not None
      and claim is not None
      and hello.previous == group.incarnation
      and hello.holder in claim.holder.split(",")
    ):
      self._end(
        hello.learner_id,
        group.incarnation,
        f"host {hello.host} lost its connection and joins again",
      )

  def _grant(self, hello: types.Hello) -> Welcome:
    welcome = self._driver.call(self._rounds.hello, hello)
    faults.reached("syncer.granted")
    self._run_id = welcome.run_id
    group = hosts.Group(welcome.incarnation, hello.hosts)
    self._groups[welcome.learner_id] = group
    self._parts.begin(welcome.learner_id, welcome.incarnation)
    self._claims[welcome.learner_id] = _Claim(
      welcome.incarnation, hello.holder, hello.hosts, hello.epoch
    )
    self._cut(
      welcome.learner_id,
      Refused(
        "fenced",
        f"learner {welcome.learner_id} is now held by {hello.holder}, "
        f"incarnation {welcome.incarnation}",
      ),
    )
    return welcome

  async def Control(  # type: ignore[override]
    self, request_iterator: AsyncIterator[pb.LearnerMessage], context: Context
  ) -> None:
    try:
      stream = await self._open(request_iterator)
    except Refused as error:
      await refuse(context, error)
    ending = [
      asyncio.create_task(self._hear(stream, request_iterator)),
      asyncio.create_task(self._tell(stream, context)),
      stream.cut,
    ]
    try:
      await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
    finally:
      for future in ending:
        future.cancel()
      self._close(stream)
    await self._finish(context, await _failures(ending))

  async def Drain(
    self, request: pb.DrainRequest, context: Context
  ) -> pb.DrainReply:
    self._driver.call(self._rounds.drain, request.why[: messages.MAX_TEXT])
    return pb.DrainReply(phase=messages.phase_to(self._rounds.phase))

  async def Expect(
    self, request: pb.ExpectRequest, context: Context
  ) -> pb.ExpectReply:
    if not 0 < request.limit_s < 86400:
      await refuse(context, messages.malformed(f"limit {request.limit_s} s"))
    self._driver.call(self._rounds.expect, request.learner_id, request.limit_s)
    return pb.ExpectReply()

  async def Swap(
    self, request: pb.SwapRequest, context: Context
  ) -> pb.SwapReply:
    over = asyncio.Event()
    try:
      begun = self._driver.call(self._rounds.swap, request.learner_id)
      begun.told = over.set
      if request.wait:
        await over.wait()
      if begun.over:
        raise Refused("given_up", begun.over)
    except Refused as error:
      await refuse(context, error)
    return pb.SwapReply(standby=begun.name)

  async def Status(
    self, request: pb.StatusRequest, context: Context
  ) -> pb.StatusReply:
    return messages.status_to(self.status())

  def status(self) -> JobStatus:
    """The run at a glance."""
    # of each learner the lowest host that is there
    first: dict[int, _Stream] = {}
    for key in sorted(self._streams):
      first.setdefault(key[0], self._streams[key])
    return JobStatus(
      run_id=self._run_id,
      phase=self._rounds.phase,
      bytes_up=self._traffic.bytes_up,
      bytes_down=self._traffic.bytes_down,
      learners=tuple(map(self._learner_status, first.values())),
      standbys=self._rounds.pool.status(self._driver.now()),
      vacant=self._rounds.pool.vacancies(self._driver.now()),
    )

  def _learner_status(self, stream: _Stream) -> LearnerStatus:
    claim = self._claims.get(stream.learner_id, _Claim(0, "", 1))
    report = stream.report
    heard_at = min(s.heard_at for s in self._streams_of(stream.learner_id))
    return LearnerStatus(
      learner_id=stream.learner_id,
      incarnation=stream.incarnation,
      holder=claim.holder,
      hosts=claim.hosts,
      stage=Stage.JOINING if report is None else report.stage,
      step=0 if report is None else report.step,
      tokens=0 if report is None else report.tokens,
      silent_s=self._driver.now() - heard_at,
    )

  # --- control streams -----------------------------------------------------

  async def _open(self, said: AsyncIterator[pb.LearnerMessage]) -> _Stream:
    """Waits for the heartbeat that says whose stream this is."""
    try:
      first = await asyncio.wait_for(anext(said, None), self._open_s)
    except TimeoutError:
      raise messages.malformed(
        f"a control stream said nothing for {self._open_s:g} s"
      ) from None
    if first is None or first.WhichOneof("message") != "heartbeat":
      raise messages.malformed("a control stream opens with a heartbeat")
    beat = messages.heartbeat_from(first.heartbeat)
    self._driver.call(self._rounds.heartbeat, beat)
    return self._attach(beat)

  def _attach(self, beat: Heartbeat) -> _Stream:
    served = {learner_id for learner_id, _ in self._streams}
    if beat.learner_id not in served and len(served) >= self._max_learners:
      raise Refused(
        "full",
        f"this syncer serves {self._max_learners} learners already: raise "
        "its limit, or stop one",
      )
    group = self._groups.get(beat.learner_id)
    if group is None or beat.host >= group.hosts:
      raise messages.malformed(
        f"host {beat.host} of learner {beat.learner_id} has no part in its "
        "claim"
      )
    group.beat(beat)
    again = Refused(
      "fenced", f"learner {beat.learner_id} opened another control stream"
    )
    key = (beat.learner_id, beat.host)
    self._cut_one(key, again)
    stream = _Stream(
      learner_id=beat.learner_id,
      host=beat.host,
      incarnation=beat.incarnation,
      heard_at=self._driver.now(),
      news=asyncio.Event(),
      cut=asyncio.get_running_loop().create_future(),
    )
    stream.news.set()
    self._streams[key] = stream
    self._empty.clear()
    return stream

  def _cut(self, learner_id: int, why: Refused) -> None:
    """Ends a learner's streams, if it has any."""
    for stream in self._streams_of(learner_id):
      self._cut_one((learner_id, stream.host), why)

  def _streams_of(self, learner_id: int) -> list[_Stream]:
    return [s for s in self._streams.values() if s.learner_id == learner_id]

  def _cut_one(self, key: tuple[int, int], why: Refused) -> None:
    stream = self._streams.pop(key, None)
    if stream is not None and not stream.cut.done():
      stream.cut.set_exception(why)

  def _close(self, stream: _Stream) -> None:
    """Forgets a stream; its claim ends unless a newer stream carries it."""
    key = (stream.learner_id, stream.host)
    if self._streams.get(key) is stream:
      del self._streams[key]
      if not stream.left:
        group = self._group(stream)
        several = group is not None and group.hosts > 1
        self._end(
          stream.learner_id,
          stream.incarnation,
          f"the control connection of its host {stream.host} closed"
          if several
          else "its control connection closed",
        )
    if not self._streams:
      self._empty.set()

  def _group(self, stream: _Stream) -> hosts.Group | None:
    """The hosts of a stream's incarnation, unless that is over."""
    group = self._groups.get(stream.learner_id)
    if group is None or group.incarnation != stream.incarnation:
      return None
    return group

  def _end(self, learner_id: int, incarnation: int, why: str) -> None:
    """An incarnation is over with the first of its hosts that is lost."""
    group = self._groups.get(learner_id)
    if group is not None and group.incarnation == incarnation:
      del self._groups[learner_id]
      self._parts.end(learner_id)
      over = f"incarnation {incarnation} of learner {learner_id} is over: {why}"
      self._cut(learner_id, Refused("fenced", f"{over}; join again"))
    self._driver.call(self._rounds.disconnected, learner_id, incarnation, why)

  async def _finish(
    self, context: Context, failures: list[BaseException]
  ) -> None:
    for failure in failures:
      if isinstance(failure, Refused):
        await refuse(context, failure)
      raise failure

  async def _hear(
    self, stream: _Stream, said: AsyncIterator[pb.LearnerMessage]
  ) -> None:
    """Passes on what a learner says until it leaves or hangs up."""
    async for message in said:
      self._traffic.bytes_up += message.ByteSize()
      stream.heard_at = self._driver.now()
      if message.WhichOneof("message") == "leave":
        stream.left = True
        group = self._group(stream)
        if group is not None and not group.leave(stream.host):
          return  # the learner leaves with its last host
        with contextlib.suppress(Refused):  # already gone is as good
          self._driver.call(
            self._rounds.leave,
            stream.learner_id,
            stream.incarnation,
            message.leave.why[: messages.MAX_TEXT],
          )
        return
      self._take(stream, message)

  def _take(self, stream: _Stream, message: pb.LearnerMessage) -> None:
    kind = message.WhichOneof("message")
    if kind == "heartbeat":
      beat = messages.heartbeat_from(message.heartbeat)
      _own(stream, beat)
      group = self._group(stream)
      joined_beat = beat if group is None else group.beat(beat)
      if joined_beat is not None:
        self._driver.call(self._rounds.heartbeat, joined_beat)
    elif kind == "report":
      report = messages.report_from(message.report)
      _own(stream, report)
      faults.reached("syncer.report_received")
      stream.report = report
      group = self._group(stream)
      joined = report if group is None else group.report(report)
      if joined is not None:
        self._driver.call(self._rounds.report, joined)
    else:
      raise messages.malformed("a learner's message says nothing known")

  async def _tell(self, stream: _Stream, context: Context) -> None:
    """Sends the newest announcement whenever there is a newer one."""
    told: tuple[int, int] | None = None
    while True:
      await stream.news.wait()
      stream.news.clear()
      stamp = self._rounds.stamp(stream.learner_id)
      if stamp == told:
        continue  # the news were another learner's
      told = stamp
      try:
        said = self._rounds.announcement(self._driver.now(), stream.learner_id)
      except KeyError:
        raise Refused(
          "fenced",
          f"learner {stream.learner_id}, incarnation {stream.incarnation}, is "
          "no longer a member: its lease ran out",
        ) from None
      group = self._group(stream)
      if group is not None:
        sent = self._parts.sent(stream.learner_id, stream.host)
        said = group.announced(stream.host, said, sent)
      message = messages.announcement_to(said)
      self._traffic.bytes_down += message.ByteSize()
      await context.write(message)


def same_protocol(protocol: int, holder: str) -> None:
  if protocol != PROTOCOL_VERSION:
    raise Refused(
      "protocol",
      f"{holder[:100]} speaks wire protocol {protocol}, this syncer "
      f"{PROTOCOL_VERSION}: install the same release on both sides",
    )


def _own(stream: _Stream, message: Heartbeat | Report) -> None:
  said = (message.learner_id, message.incarnation, message.host)
  if said != (stream.learner_id, stream.incarnation, stream.host):
    raise messages.malformed(
      f"learner {message.learner_id} (host {message.host}) on the stream of "
      f"{stream.learner_id} (host {stream.host})"
    )


async def _failures(
  futures: list[asyncio.Future[None]],
) -> list[BaseException]:
  results = await asyncio.gather(*futures, return_exceptions=True)
  return [
    result
    for result in results
    if isinstance(result, BaseException)
    and not isinstance(result, asyncio.CancelledError)
  ]
