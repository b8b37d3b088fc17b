"""Gives the round clock its time and its processor, on an event loop.

Everything that reaches `Rounds` goes through `call`, on the loop's thread.
Afterwards the driver starts the merges that have become due (on a thread of
their own, one at a time) and tells its listeners when an announcement may
have changed.
"""

import asyncio
import concurrent.futures
import math
from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

from decoupled import faults
from decoupled.clock import Clock
from decoupled.syncer.donors import Donors
from decoupled.syncer.handover import Handover
from decoupled.syncer.model import GlobalModel
from decoupled.syncer.pool import Pool
from decoupled.types import (
  Announcement,
  Arrays,
  Contribution,
  Heartbeat,
  Hello,
  Manifest,
  MergedFragment,
  Phase,
  Report,
  Standing,
  Version,
  Welcome,
)
from decoupled.wire.codecs import Payload

P = ParamSpec("P")
T = TypeVar("T")
JobT = TypeVar("JobT", bound="MergeJobLike")

_SHORTEST_WAIT_S = 0.001


class MergeJobLike(Protocol):
  """CPU work that touches nothing but itself."""

  def run(self) -> None: ...


class RoundsLike(Protocol[JobT]):
  """What the service needs of `syncer.rounds.Rounds`."""

  generation: int
  term: int
  phase: Phase
  contract: dict[str, str]
  donors: Donors
  pool: Pool
  model: GlobalModel | None

  @property
  def run_id(self) -> str: ...
  @property
  def ended(self) -> bool: ...
  @property
  def handed_over(self) -> bool: ...
  @property
  def manifest(self) -> Manifest: ...
  def hello(self, now: float, hello: Hello) -> Welcome: ...
  def disconnected(
    self, now: float, learner_id: int, incarnation: int, why: str
  ) -> None: ...
  def leave(
    self, now: float, learner_id: int, incarnation: int, why: str = ""
  ) -> None: ...
  def expect(self, now: float, learner_id: int, limit_s: float) -> None: ...
  def swap(self, now: float, learner_id: int) -> Handover: ...
  def heartbeat(self, now: float, beat: Heartbeat) -> None: ...
  def report(self, now: float, report: Report) -> None: ...
  def contribution(self, now: float, contribution: Contribution) -> str: ...
  def fetch(
    self, now: float, learner_id: int, incarnation: int, fragment: int
  ) -> MergedFragment: ...
  def enter_pool(self, now: float, standing: Standing) -> int: ...
  def follow(self, now: float, fragment: int) -> MergedFragment: ...
  def delta(
    self, fragment: int, held: Version
  ) -> tuple[Version, Payload] | None: ...
  def published(self, fragment: int, version: Version) -> Arrays | None: ...
  def stamp(self, learner_id: int) -> tuple[int, int]: ...
  def announcement(self, now: float, learner_id: int) -> Announcement: ...
  def tick(self, now: float) -> None: ...
  def wake_at(self, now: float) -> float: ...
  def next_merge(self) -> JobT | None: ...
  def merged(self, now: float, job: JobT) -> None: ...
  def drain(self, now: float, why: str, limit_s: float = math.inf) -> None: ...
  def hand_over(self, now: float, limit_s: float = math.inf) -> None: ...


class Driver(Generic[JobT]):
  """Runs one `Rounds`.

  Args:
    rounds: the state machine.
    clock: whose times it is given.
    changed: called on the loop's thread when announcements may have changed.
    guard: called before anything happens; raises where it must not any more.
  """

  def __init__(
    self,
    rounds: RoundsLike[JobT],
    clock: Clock,
    changed: Callable[[], None],
    guard: Callable[[], None] = lambda: None,
  ):
    self.rounds = rounds
    self._clock = clock
    self._changed = changed
    self._guard = guard
    self._seen = rounds.generation
    self._wake = asyncio.Event()
    self._ticked = -math.inf
    self._merging: asyncio.Task[None] | None = None
    self._pool = concurrent.futures.ThreadPoolExecutor(1, "merge")

  def now(self) -> float:
    return self._clock.now()

  def call(
    self,
    method: Callable[Concatenate[float, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
  ) -> T:
    """Calls a method of `rounds` with the time, then does what follows."""
    self._guard()
    try:
      return method(self.now(), *args, **kwargs)
    finally:
      self._settle()
      self._wake.set()

  async def run(self) -> None:
    """Keeps time until the run has ended, or is a successor's.

    Raises:
      Exception: whatever a merge raised; the run cannot go on after it.
    """
    try:
      while not (self.rounds.ended or self.rounds.handed_over):
        self._wake.clear()
        self._guard()
        if self.rounds.wake_at(self._ticked) <= self.now():
          self._ticked = self.now()
          self.rounds.tick(self._ticked)
          self._settle()
        await self._until_due()
    finally:
      if self._merging is not None:
        self._merging.cancel()
      self._pool.shutdown(wait=False)

  async def _until_due(self) -> None:
    """Waits for the next tick, an input, or the end of a merge."""
    if self._merging is not None and self._merging.done():
      self._merging.result()  # a failed one ends the run here
      self._merging = None
      self._settle()
    due_s = self.rounds.wake_at(self.now()) - self.now()
    limit = None if math.isinf(due_s) else max(due_s, _SHORTEST_WAIT_S)
    try:
      await asyncio.wait_for(self._wake.wait(), limit)
    except TimeoutError:
      return

  def _settle(self) -> None:
    if self._merging is None:
      job = self.rounds.next_merge()
      if job is not None:
        self._merging = asyncio.create_task(self._merge(job))
    if self.rounds.generation != self._seen:
      self._seen = self.rounds.generation
      self._changed()

  async def _merge(self, first: JobT) -> None:
    loop, job = asyncio.get_running_loop(), first
    try:
      while True:
        faults.reached("syncer.merging")
        await loop.run_in_executor(self._pool, job.run)
        faults.reached("syncer.merged")
        self._guard()
        self.rounds.merged(self.now(), job)
        faults.reached("syncer.before_broadcast")
        following = self.rounds.next_merge()
        self._settle()
        if following is None:
          return
        job = following
    finally:
      self._wake.set()
