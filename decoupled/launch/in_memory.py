"""Whole jobs in one thread on a manual clock: sweeps, storms and exact tests.

The rounds, the links and the train step are the real ones; only the network
and the time are not. A job of many learners is therefore repeatable to the
bit, and an hour of simulated failures takes as long as its arithmetic.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import jax

from decoupled.algorithm.policy import Exchange, Outer, exchange_lines
from decoupled.clock import ManualClock
from decoupled.errors import DecoupledError
from decoupled.launch.memory import Fault, MemoryNetwork, MemoryWire
from decoupled.link import tree, workers
from decoupled.link.claims import DataClaims
from decoupled.link.link import Link
from decoupled.link.wire import LearnerWire
from decoupled.syncer.rounds import Plan, Rounds, TapeLike
from decoupled.syncer.settings import Limits
from decoupled.types import EventSink, Hello, TensorSpec

_LOOK_S = 0.5


class Trainer(Protocol):
  """One learner's training, as the job sees it.

  `params` is replaced after each boundary; everything else is the trainer's.
  """

  params: Any

  def step(self, step: int, schedule_step: int) -> tuple[int, float]:
    """Takes inner step `step` (from 1) at the rate of `schedule_step`.

    Returns:
      (tokens, loss).
    """
    ...


class Data(DataClaims, Protocol):
  """Units that a trainer claims, and how far it is with them."""

  @property
  def position(self) -> tuple[int, int]:
    """(unit, offset) after the last step."""
    ...

  @property
  def exhausted(self) -> bool:
    """Whether there is nothing to train on."""
    ...


class Recorder:
  """An event sink that keeps everything in memory."""

  def __init__(self) -> None:
    self.events: list[dict[str, object]] = []

  def emit(self, kind: str, **fields: object) -> None:
    self.events.append({"kind": kind, **fields})

  def of(self, kind: str) -> list[dict[str, Any]]:
    return [e for e in self.events if e["kind"] == kind]


@dataclasses.dataclass
class SimulatedLearner:
  """A learner of the in-memory job.

  Attributes:
    learner_id: its id.
    trainer: its training.
    step_s: seconds of its inner step k (k counts from 1).
    link: its link; None before it joins and after it died.
    wire: its wire.
    step: inner steps of this process.
    tokens: tokens of this process.
    schedule_step: step of the learning-rate schedule.
    losses: loss of each step.
    data: units that it claims, if it does.
  """

  learner_id: int
  trainer: Trainer
  step_s: Callable[[int], float]
  data: Data | None = None
  link: Link | None = None
  wire: MemoryWire | None = None
  step: int = 0
  tokens: int = 0
  schedule_step: int = 0
  stepping: bool = False
  losses: list[float] = dataclasses.field(default_factory=list)
  life: int = 0
  look_at: float = 0.0
  work: list[workers.Inline] = dataclasses.field(default_factory=list)


class InMemoryJob:
  """A syncer and its learners on one manual clock.

  Args:
    exchange: the contract's exchange.
    outer: the contract's outer rule.
    learners: how many the syncer waits for at the start.
    rounds: rounds after which the job drains.
    limits: of the syncer.
    events: sink; a `Recorder` by default.
    fault: what happens to messages.
    latency_s, transfer_s, merge_s: of the network.
    tape: recorder of contributions.
    tokens: tokens after which it drains.
    contract: further lines of the contract.
  """

  def __init__(
    self,
    exchange: Exchange,
    outer: Outer,
    learners: int,
    rounds: int,
    *,
    limits: Limits | None = None,
    events: EventSink | None = None,
    fault: Fault | None = None,
    latency_s: float = 1e-3,
    transfer_s: float = 1e-3,
    merge_s: float = 1e-3,
    tape: TapeLike | None = None,
    tokens: int = 0,
    contract: tuple[tuple[str, str], ...] = (),
  ):
    self.clock = ManualClock()
    self.events = events or Recorder()
    plan = Plan(
      run_id="memory",
      learners=learners,
      rounds=rounds,
      tokens=tokens,
      contract=(*exchange_lines(exchange), *contract),
    )
    self.rounds = Rounds(
      plan,
      exchange,
      outer,
      limits or Limits(),
      term=1,
      events=self.events,
      tape=tape,
    )
    self.network = MemoryNetwork(
      self.rounds,
      self.clock,
      latency_s=latency_s,
      transfer_s=transfer_s,
      merge_s=merge_s,
      fault=fault,
      settled=self._settled,
    )
    self._exchange = exchange
    self.learners: dict[int, SimulatedLearner] = {}
    self._names = itertools.count()

  # --- what a test or a sweep does -------------------------------------------

  def add(
    self,
    learner_id: int,
    trainer: Trainer,
    step_s: float | Callable[[int], float],
    *,
    roles: tree.Roles = None,
    stacked: tuple[str, ...] = (),
    tensors: tuple[TensorSpec, ...] = (),
    delay_s: float = 0.0,
    data: Data | None = None,
  ) -> SimulatedLearner:
    """A learner that joins `delay_s` from now and trains until the end."""
    pace = step_s if callable(step_s) else (lambda _step: float(step_s))
    learner = SimulatedLearner(learner_id, trainer, pace, data)
    if not tensors:
      tensors = tree.tensor_specs(trainer.params, roles, stacked)
    before = self.learners.get(learner_id)
    learner.life = 0 if before is None else before.life + 1
    self.learners[learner_id] = learner
    self.network.after(delay_s, lambda: self._join(learner, tensors))
    return learner

  def kill(self, learner_id: int) -> None:
    """SIGKILL: the connection closes, nothing more is heard."""
    learner = self.learners[learner_id]
    if learner.wire is not None:
      learner.wire.kill()
    learner.link = None

  def freeze(self, learner_id: int, for_s: float) -> None:
    """SIGSTOP, and SIGCONT later: silent, but its connection stays open."""
    learner = self.learners[learner_id]
    assert learner.wire is not None
    learner.wire.frozen = True
    self.network.after(for_s, lambda: self._thaw(learner))

  def run(self, limit_s: float = 1e6) -> None:
    """Runs to the end of the job; raises if the clock passes `limit_s`."""
    if not self.network.run_until(self._over, limit_s):
      raise TimeoutError(
        f"the job did not end by {limit_s} s of simulated time: phase "
        f"{self.rounds.phase}, {self.rounds.rounds_closed} rounds closed"
      )

  def run_until(self, stop: Callable[[], bool], limit_s: float = 1e6) -> None:
    if not self.network.run_until(stop, limit_s):
      raise TimeoutError(f"not reached by {limit_s} s of simulated time")

  # --- pieces ---------------------------------------------------------------

  def _over(self) -> bool:
    alive = [x for x in self.learners.values() if x.link is not None]
    return self.rounds.ended and all(
      x.link is not None and x.link.done for x in alive
    )

  def _join(
    self, learner: SimulatedLearner, tensors: tuple[TensorSpec, ...]
  ) -> None:
    learner.wire = self.network.wire()
    wire: LearnerWire = learner.wire
    hello = Hello(
      learner_id=learner.learner_id,
      holder=f"memory:{learner.learner_id}.{learner.life}",
      run_id="",
      tensors=tensors,
    )

    def inline(
      name: str,
      handler: workers.Handler,
      on_error: Callable[[BaseException], None],
    ) -> workers.Worker:
      del name

      def attempt(key: Hashable) -> None:
        try:
          handler(key)
        except DecoupledError as error:
          on_error(error)  # whatever else is raised is a bug: let it out

      work = workers.Inline(attempt)
      learner.work.append(work)
      return work

    learner.link = Link(
      wire,
      learner.trainer.params,
      hello,
      clock=self.clock,
      worker=inline,
      claims=learner.data,
    )
    learner.link.join(learner.trainer.params)

  def _settled(self) -> None:
    """Runs the links' background work and whatever it makes possible."""
    for learner in self.learners.values():
      frozen = learner.wire is not None and learner.wire.frozen
      if learner.link is None or frozen:
        continue
      while sum(work.run() for work in learner.work):
        if learner.wire is not None and learner.wire.cut:
          break  # the rejoiner tries for ever
      if not learner.stepping and not learner.link.done:
        self._stand(learner)

  def _stand(self, learner: SimulatedLearner) -> None:
    """A learner that is not stepping looks whether it may, or must end."""
    link = learner.link
    assert link is not None
    leaves = jax.tree.leaves(learner.trainer.params)
    if learner.step == 0:
      ready = link.visit_start(leaves)
    else:
      ready = not self._visit(learner, leaves)
    self._put(learner, leaves)
    if ready and not self._idle(learner):
      self._adopt_step(learner)
      self._next_step(learner)
    elif self.clock.now() >= learner.look_at:
      # unchanged reports are repeated, so look again in a while
      link.serve()
      learner.look_at = self.clock.now() + _LOOK_S
      self.network.after(_LOOK_S, lambda: None)

  def _adopt_step(self, learner: SimulatedLearner) -> None:
    """Takes over the run's schedule step where that is ahead (4.10)."""
    link = learner.link
    if link is not None and link.policy.adopt_step:
      learner.schedule_step = max(learner.schedule_step, link.common_step)

  def _next_step(self, learner: SimulatedLearner) -> None:
    learner.stepping = True
    life = learner.life
    delay = learner.step_s(learner.step + 1)
    self.network.after(delay, lambda: self._step(learner, life))

  def _step(self, learner: SimulatedLearner, life: int) -> None:
    """The inner step that began a step time ago ends now."""
    link = learner.link
    if link is None or learner.life != life or link.done:
      return
    if learner.wire is not None and learner.wire.frozen:
      self.network.after(0.01, lambda: self._step(learner, life))
      return
    learner.step += 1
    tokens, loss = learner.trainer.step(learner.step, learner.schedule_step)
    learner.schedule_step += 1
    learner.tokens += tokens
    learner.losses.append(loss)
    leaves = jax.tree.leaves(learner.trainer.params)
    stop = self._visit(learner, leaves)
    self._put(learner, leaves)
    self._adopt_step(learner)
    if stop or link.waits(learner.step) or self._idle(learner):
      learner.stepping = False
      return
    self._next_step(learner)

  def _idle(self, learner: SimulatedLearner) -> bool:
    return learner.data is not None and learner.data.exhausted

  def _visit(self, learner: SimulatedLearner, leaves: list[jax.Array]) -> bool:
    link = learner.link
    assert link is not None
    loss = learner.losses[-1] if learner.losses else float("nan")
    stop = link.visit(
      leaves,
      learner.step,
      learner.tokens,
      learner.schedule_step,
      learner.data.position if learner.data else (0, learner.step),
      loss,
    )
    return stop or link.waits(learner.step)

  def _put(self, learner: SimulatedLearner, leaves: list[jax.Array]) -> None:
    learner.trainer.params = jax.tree.unflatten(
      jax.tree.structure(learner.trainer.params), leaves
    )

  def _thaw(self, learner: SimulatedLearner) -> None:
    if learner.wire is not None:
      learner.wire.frozen = False
