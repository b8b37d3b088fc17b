"""The wire without a network: many learners and a syncer in one thread.

Messages are events on a manual clock, so a run is exactly repeatable, and a
`Fault` may drop, repeat, delay or reorder any of them. The syncer's rounds
and the learners' links are the very classes that run over gRPC.
"""

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable
from typing import Protocol

from decoupled.clock import ManualClock
from decoupled.errors import Refused, Unreachable
from decoupled.syncer.merging import MergeJob
from decoupled.syncer.rounds import Rounds
from decoupled.types import (
  Announcement,
  Arrays,
  Contribution,
  Heartbeat,
  Hello,
  MergedFragment,
  Report,
  Version,
  Welcome,
)
from decoupled.wire import codecs

OnAnnouncement = Callable[[Announcement], None]
OnLost = Callable[[str], None]


class Fault(Protocol):
  """Decides what happens to one message.

  Args of a call: kind (report, contribution, announcement), learner id, the
  message. Returns the delays, in seconds, after which copies of it arrive:
  `()` loses it, two delays repeat it.
  """

  def __call__(
    self, kind: str, learner_id: int, message: object
  ) -> tuple[float, ...]: ...


@dataclasses.dataclass(order=True)
class _Event:
  at: float
  order: int
  action: Callable[[], None] = dataclasses.field(compare=False)


class MemoryNetwork:
  """Delivers messages and drives the rounds' time.

  Args:
    rounds: the syncer.
    clock: moved by `run_until` alone.
    latency_s: one way, for control messages.
    transfer_s: for one contribution.
    merge_s: for one merge.
    fault: what happens to messages; everything arrives by default.
    settled: called after every event, to run the links' inline work.
  """

  def __init__(
    self,
    rounds: Rounds,
    clock: ManualClock,
    *,
    latency_s: float = 1e-3,
    transfer_s: float = 1e-3,
    merge_s: float = 1e-3,
    fault: Fault | None = None,
    settled: Callable[[], None] = lambda: None,
  ):
    self.rounds = rounds
    self.clock = clock
    self.latency_s = latency_s
    self.transfer_s = transfer_s
    self.merge_s = merge_s
    self.fault = fault
    self.settled = settled
    self._events: list[_Event] = []
    self._order = itertools.count()
    self._wires: list[MemoryWire] = []
    self._tick_at = math.inf

  def wire(self) -> "MemoryWire":
    return MemoryWire(self)

  def after(self, delay_s: float, action: Callable[[], None]) -> None:
    """Schedules an action; equal times keep the order of scheduling."""
    at = self.clock.now() + delay_s
    heapq.heappush(self._events, _Event(at, next(self._order), action))

  def run_until(self, stop: Callable[[], bool], limit_s: float) -> bool:
    """Runs events until `stop()`; False if the clock passes `limit_s`."""
    self._settle()
    while not stop():
      if not self._events or self._events[0].at > limit_s:
        return False
      event = heapq.heappop(self._events)
      self.clock.set(max(event.at, self.clock.now()))
      event.action()
      self._settle()
    return True

  def _settle(self) -> None:
    self.settled()
    while (job := self.rounds.next_merge()) is not None:
      job.run()
      self.after(self.merge_s, functools.partial(self._merged, job))
    for wire in self._wires:
      wire.announce()
    at = self.rounds.wake_at(self.clock.now())
    if at < math.inf and not (self.clock.now() < self._tick_at <= at):
      self._tick_at = at
      self.after(max(0.0, at - self.clock.now()), self._tick)

  def _merged(self, job: MergeJob) -> None:
    self.rounds.merged(self.clock.now(), job)

  def _tick(self) -> None:
    self.rounds.tick(self.clock.now())

  def deliver(
    self, kind: str, learner_id: int, message: object,
    delay_s: float, action: Callable[[], None],
  ) -> None:  # fmt: skip
    """Schedules a message, or what the fault makes of it."""
    delays: tuple[float, ...] = (delay_s,)
    if self.fault is not None:
      extra = self.fault(kind, learner_id, message)
      delays = tuple(delay_s + e for e in extra)
    for delay in delays:
      self.after(delay, action)

  def connected(self, wire: "MemoryWire") -> None:
    if wire not in self._wires:
      self._wires.append(wire)

  def disconnected(self, wire: "MemoryWire") -> None:
    if wire in self._wires:
      self._wires.remove(wire)


class MemoryWire:
  """A `LearnerWire` over a `MemoryNetwork`."""

  def __init__(self, network: MemoryNetwork):
    self.peer = "memory"
    self._network = network
    self._codec = "float32"
    self._on_announcement: OnAnnouncement | None = None
    self._on_lost: OnLost | None = None
    self.welcome: Welcome | None = None
    self.cut = False
    self.frozen = False
    self._stamp: tuple[int, int, int] | None = None

  # --- LearnerWire -----------------------------------------------------------

  def hello(self, hello: Hello) -> Welcome:
    if self.cut:
      raise Unreachable("the syncer in memory is cut off")
    welcome = self._network.rounds.hello(self._network.clock.now(), hello)
    self.welcome = welcome
    contract = dict(welcome.contract)
    self._codec = contract.get("Exchange.codec", "'float32'").strip("'\"")
    return welcome

  def listen(self, on_announcement: OnAnnouncement, on_lost: OnLost) -> None:
    self._on_announcement, self._on_lost = on_announcement, on_lost
    self._network.connected(self)
    self._beat(self._identity())

  def report(self, report: Report) -> None:
    if self._silent:
      return
    self._network.deliver(
      "report",
      report.learner_id,
      report,
      self._network.latency_s,
      lambda: self._reported(report),
    )

  def contribute(self, contribution: Contribution, base: Arrays | None) -> str:
    if self._silent:
      raise Unreachable("the syncer in memory is cut off")
    payload = codecs.encode(self._codec, contribution.arrays, base)
    self._network.deliver(
      "contribution",
      contribution.learner_id,
      contribution,
      self._network.transfer_s,
      lambda: self._contributed(contribution, payload),
    )
    return ""  # a refusal comes with an announcement

  def fetch(
    self, fragment: int, held: Version, base: Arrays | None
  ) -> MergedFragment:
    if self._silent:
      raise Unreachable("the syncer in memory is cut off")
    rounds, (learner_id, incarnation) = self._network.rounds, self._identity()
    merged = rounds.fetch(
      self._network.clock.now(), learner_id, incarnation, fragment
    )
    short = rounds.delta(fragment, held)
    if short is not None and base is not None:
      arrays = codecs.decode(self._codec, short[1], base)
      merged = dataclasses.replace(merged, arrays=arrays)
    return merged

  def leave(self, why: str = "") -> None:
    if self._silent or self.welcome is None:
      return
    self._network.disconnected(self)
    now = self._network.clock.now()
    self._network.rounds.leave(now, *self._identity(), why)

  def close(self) -> None:
    self._network.disconnected(self)
    self.welcome = None

  # --- for tests: what can happen to a connection ----------------------------

  def kill(self) -> None:
    """The process is gone: its connection closes at once."""
    self._network.disconnected(self)
    identity = self._identity()
    self.frozen = True
    self._network.rounds.disconnected(
      self._network.clock.now(), *identity, "connection closed"
    )

  def partition(self) -> None:
    """Nothing gets through; both sides find out."""
    self.cut = True
    self._network.disconnected(self)
    self._network.rounds.disconnected(
      self._network.clock.now(), *self._identity(), "connection reset"
    )
    if self._on_lost is not None:
      self._on_lost("connection reset")

  def heal(self) -> None:
    self.cut = False

  # --- pieces ----------------------------------------------------------------

  @property
  def _silent(self) -> bool:
    return self.cut or self.frozen or self.welcome is None

  def _identity(self) -> tuple[int, int]:
    assert self.welcome is not None
    return self.welcome.learner_id, self.welcome.incarnation

  def announce(self) -> None:
    """Sends the syncer's wishes if they have changed."""
    learner_id, incarnation = self._identity()
    stamp = (incarnation, *self._network.rounds.stamp(learner_id))
    if stamp == self._stamp:
      return
    self._stamp = stamp
    member = self._network.rounds.membership.live.get(learner_id)
    if member is None or member.incarnation != incarnation:
      return
    a = self._network.rounds.announcement(self._network.clock.now(), learner_id)
    self._network.deliver(
      "announcement",
      learner_id,
      a,
      self._network.latency_s,
      lambda: self._announced(a, incarnation),
    )

  def _announced(self, a: Announcement, incarnation: int) -> None:
    if self._silent or self._identity()[1] != incarnation:
      return
    if self._on_announcement is not None:
      self._on_announcement(a)

  def _reported(self, report: Report) -> None:
    if self.cut:
      return
    try:
      self._network.rounds.report(self._network.clock.now(), report)
    except Refused as error:
      self._fenced(report.incarnation, error)

  def _fenced(self, incarnation: int, error: Refused) -> None:
    """The syncer closes the connection of a fenced incarnation."""
    if self._silent or self._identity()[1] != incarnation:
      return
    self._network.disconnected(self)
    if self._on_lost is not None:
      self._on_lost(str(error))

  def _contributed(
    self, contribution: Contribution, payload: codecs.Payload
  ) -> None:
    rounds = self._network.rounds
    header = contribution.header
    base = rounds.published(header.copy.fragment, header.base)
    if base is not None or self._codec == "float32" or header.copy.round == 0:
      contribution = dataclasses.replace(
        contribution, arrays=codecs.decode(self._codec, payload, base)
      )
    rounds.contribution(self._network.clock.now(), contribution)

  def _beat(self, identity: tuple[int, int]) -> None:
    """Heartbeats until the incarnation is over."""
    if self._silent or self._identity() != identity:
      if self.frozen and self.welcome is not None:
        self._next_beat(identity)
      return
    now = self._network.clock.now()
    try:
      self._network.rounds.heartbeat(now, Heartbeat(*identity, now))
    except Refused as error:
      self._fenced(identity[1], error)
      return
    self._stamp = None  # whole state again, should the last have been lost
    self.announce()
    self._next_beat(identity)

  def _next_beat(self, identity: tuple[int, int]) -> None:
    assert self.welcome is not None
    self._network.after(self.welcome.heartbeat_s, lambda: self._beat(identity))
