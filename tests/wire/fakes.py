"""A syncer for wire tests: the real server around rounds that only record."""

import asyncio
import threading
import time
from collections.abc import Callable

import numpy as np

from decoupled.errors import Refused
from decoupled.syncer.donors import Donors
from decoupled.syncer.membership import Membership
from decoupled.syncer.pool import Pool
from decoupled.syncer.service import Service
from decoupled.syncer.settings import Limits
from decoupled.types import (
  NO_VERSION,
  Announcement,
  Contribution,
  CopyHeader,
  CopyId,
  Heartbeat,
  Hello,
  Manifest,
  MergedFragment,
  Phase,
  Report,
  Role,
  Stage,
  TensorSpec,
  Unit,
  Version,
  Welcome,
)
from decoupled.wire import codecs
from decoupled.wire.address import Address

TOKEN = "a-token-for-tests-0123456789"
LIMIT_S = 20.0  # of every wait in these tests

TENSORS = (
  TensorSpec("embed", (500, 1000), "float32", Role.EMBEDDING),
  TensorSpec("blocks", (2, 700, 1000), "float32", stacked=True),
  TensorSpec("scale", (), "float32"),
)
MANIFEST = Manifest(
  tensors=TENSORS,
  fragments=(
    (Unit("embed"), Unit("scale")),
    (Unit("blocks", 0), Unit("blocks", 1)),
  ),
  owners=("", ""),
)


def wait_until(condition: Callable[[], bool], what: str) -> None:
  """Waits for a condition; fails naming what never came."""
  deadline = time.monotonic() + LIMIT_S
  while not condition():
    assert time.monotonic() < deadline, f"waited {LIMIT_S} s for {what}"
    time.sleep(0.005)


def arrays(fragment: int, seed: int = 0) -> tuple[np.ndarray, ...]:
  rng = np.random.default_rng(seed)
  return tuple(
    np.asarray(rng.standard_normal(MANIFEST.shape(unit)), np.float32)
    for unit in MANIFEST.fragments[fragment]
  )


def hello(learner_id: int = 0, **changes: object) -> Hello:
  values: dict[str, object] = {
    "learner_id": learner_id,
    "holder": "here:1",
    "run_id": "",
    "tensors": TENSORS,
    "contract": (("Exchange.H", "24"),),
  }
  return Hello(**{**values, **changes})


def header(fragment: int, base: Version = NO_VERSION) -> CopyHeader:
  copy = CopyId(incarnation=1, term=1, round=2, fragment=fragment, attempt=0)
  return CopyHeader(copy, base, steps=3, tokens=300, total_tokens=500)


def report(seq: int, incarnation: int = 1, **changes: object) -> Report:
  values: dict[str, object] = {
    "learner_id": 0,
    "incarnation": incarnation,
    "seq": seq,
    "stage": Stage.TRAINING,
    "step": seq,
    "tokens": 10 * seq,
    "schedule_step": seq,
    "copies": (),
    "versions": (NO_VERSION, NO_VERSION),
    "step_ends_s": (float(seq),),
  }
  return Report(**{**values, **changes})


class FakeJob:
  """A merge that waits until it is let go."""

  def __init__(self) -> None:
    self.go = threading.Event()
    self.thread = ""

  def run(self) -> None:
    self.thread = threading.current_thread().name
    assert self.go.wait(LIMIT_S)


class FakeRounds:
  """Records what the service tells it, and says what it is told to say."""

  def __init__(self, codec: str = "float32") -> None:
    self.generation = 0
    self.term = 1
    self.model = None
    self.pool = Pool(Limits(), Events())
    self.phase = Phase.TRAINING
    self.ended = False
    self.handed_over = False
    self.manifest = MANIFEST
    self.run_id = "run"
    self.contract = {"Exchange.H": "24", "run.seed": "7"}
    self.codec = codec
    self.calls: list[tuple[object, ...]] = []
    self.heartbeats: list[Heartbeat] = []
    self.reports: list[Report] = []
    self.contributions: list[Contribution] = []
    self.fenced = False
    self.members: dict[int, int] = {}
    self.incarnations = 0
    self.announced = 0
    self.jobs: list[FakeJob] = []
    self.merged_jobs: list[FakeJob] = []
    self.versions = [Version(1, 0), Version(1, 0)]
    self.current = {p: arrays(p) for p in range(2)}
    self.deltas: dict[int, tuple[Version, codecs.Payload]] = {}
    self.due = float("inf")
    self.ticks = 0
    self.refusal = ""
    self.padding = 0
    nobody = Membership(5.0, {})
    self.donors = Donors(nobody, Limits(), Events(), lambda member: None)

  def hello(self, now: float, hello: Hello) -> Welcome:
    self.calls.append(("hello", hello))
    if hello.learner_id in self.members and not hello.previous:
      raise Refused("claimed", f"learner {hello.learner_id} is held by here:1")
    learner_id = max(hello.learner_id, 0)
    self.incarnations += 1
    self.members[learner_id] = self.incarnations
    self.generation += 1
    return Welcome(
      learner_id=learner_id,
      incarnation=self.incarnations,
      run_id="run",
      term=1,
      manifest=MANIFEST,
      contract=(("Exchange.H", "24"), ("Exchange.codec", repr(self.codec))),
      lease_s=5.0,
      heartbeat_s=0.05,
      position=(3, 4),
      has_history=True,
    )

  def _member(self, learner_id: int, incarnation: int) -> None:
    if self.fenced or self.members.get(learner_id) != incarnation:
      raise Refused("fenced", f"learner {learner_id} has a newer incarnation")

  def disconnected(
    self, now: float, learner_id: int, incarnation: int, why: str
  ) -> None:
    self.calls.append(("disconnected", learner_id, incarnation))
    if self.members.get(learner_id) == incarnation:
      del self.members[learner_id]

  def leave(
    self, now: float, learner_id: int, incarnation: int, why: str = ""
  ) -> None:
    self._member(learner_id, incarnation)
    self.calls.append(("leave", learner_id, incarnation))
    del self.members[learner_id]

  def expect(self, now: float, learner_id: int, limit_s: float) -> None:
    self.calls.append(("expect", learner_id, limit_s))

  def heartbeat(self, now: float, beat: Heartbeat) -> None:
    self._member(beat.learner_id, beat.incarnation)
    self.heartbeats.append(beat)

  def report(self, now: float, report: Report) -> None:
    self._member(report.learner_id, report.incarnation)
    self.reports.append(report)

  def contribution(self, now: float, contribution: Contribution) -> str:
    self.contributions.append(contribution)
    return self.refusal

  def fetch(
    self, now: float, learner_id: int, incarnation: int, fragment: int
  ) -> MergedFragment:
    self._member(learner_id, incarnation)
    if not 0 <= fragment < 2:
      raise Refused("fragment", f"this run has no fragment {fragment}")
    return MergedFragment(
      fragment=fragment,
      version=self.versions[fragment],
      arrays=self.current[fragment],
      included=CopyId(1, 1, 2, fragment, 0) if fragment else None,
      common_step=7,
      restored=bool(fragment),
      base=Version(1, 0),
    )

  def delta(
    self, fragment: int, held: Version
  ) -> tuple[Version, codecs.Payload] | None:
    found = self.deltas.get(fragment)
    if found is None or found[0] != held:
      return None
    return self.versions[fragment], found[1]

  def published(
    self, fragment: int, version: Version
  ) -> tuple[np.ndarray, ...] | None:
    if self.versions[fragment] != version:
      return None
    return self.current[fragment]

  def advance(self, fragment: int, to: tuple[np.ndarray, ...]) -> None:
    """Publishes a new version, as a delta to those who hold the last."""
    old, version = self.current[fragment], self.versions[fragment]
    payload = codecs.encode(self.codec, to, old)
    self.current[fragment] = codecs.decode(self.codec, payload, old)
    self.versions[fragment] = Version(1, version.round + 1)
    self.deltas[fragment] = (version, payload)
    self.generation += 1

  def stamp(self, learner_id: int) -> tuple[int, int]:
    return self.generation, learner_id

  def announcement(self, now: float, learner_id: int) -> Announcement:
    self.members[learner_id]  # KeyError for nobody, like the real one
    self.announced += 1
    return Announcement(
      term=1,
      seq=self.announced,
      phase=self.phase,
      open=(),
      next_round=self.generation,
      next_open_in_s=0.5,
      pace_s=0.0,
      versions=tuple(self.versions),
      note="x" * self.padding,
    )

  def tick(self, now: float) -> None:
    self.ticks += 1
    if now >= self.due:
      self.due = float("inf")
      self.calls.append(("due",))
      self.generation += 1

  def wake_at(self, now: float) -> float:
    return self.due

  def next_merge(self) -> FakeJob | None:
    return self.jobs.pop(0) if self.jobs else None

  def merged(self, now: float, job: FakeJob) -> None:
    self.merged_jobs.append(job)
    self.generation += 1

  def drain(self, now: float, why: str, limit_s: float = float("inf")) -> None:
    self.calls.append(("drain", why))
    self.phase = Phase.DRAINING
    self.generation += 1

  def hand_over(self, now: float, limit_s: float = float("inf")) -> None:
    self.calls.append(("hand_over",))
    self.handed_over = True

  def did(self, name: str) -> list[tuple[object, ...]]:
    return [call for call in self.calls if call[0] == name]


class Events:
  """Keeps what was emitted."""

  def __init__(self) -> None:
    self.seen: list[tuple[str, dict[str, object]]] = []

  def emit(self, kind: str, **fields: object) -> None:
    self.seen.append((kind, fields))


class Server:
  """A real server on a thread of its own.

  Attributes:
    rounds: behind it.
    address: where it really listens.
    events: what the service reported.
  """

  def __init__(self, rounds: FakeRounds | None = None, bind: str = "127.0.0.1",
               port: int = 0, **options: object):  # fmt: skip
    self.rounds = rounds or FakeRounds()
    self.events = Events()
    self._bind = Address(bind, port)
    self._options = options
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever)
    self._thread.start()

  def __enter__(self) -> "Server":
    try:
      self.service = self.on_loop(self._make)
      self.address = self.run(self.service.start(self._bind))
    except BaseException:
      self._end()
      raise
    return self

  def __exit__(self, *_: object) -> None:
    self.run(self.service.stop(0))
    self._end()

  def _end(self) -> None:
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(LIMIT_S)
    assert not self._thread.is_alive()
    self._loop.close()

  async def _make(self) -> Service:
    return Service(self.rounds, TOKEN, events=self.events, **self._options)

  def run(self, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(
      LIMIT_S
    )

  def on_loop(self, function):
    """Runs an async function, or a plain one followed by the usual news."""
    if asyncio.iscoroutinefunction(function):
      return self.run(function())

    async def call():
      return self.service._driver.call(lambda now: function())

    return self.run(call())
