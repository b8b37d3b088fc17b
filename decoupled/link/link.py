"""The library door: a learner's connection to the run.

    link = connect(address, params, learner_id=0, token_file=...)
    params = link.begin(params)
    while not link.done:
      params, ... = train_step(params, ...)
      params = link.boundary(params, step=..., tokens=...)
    link.close()

`begin` joins: it uploads version 0 if the run is empty and this learner is
asked for it, else it fetches every fragment. `boundary` never waits while
training goes on; it waits only where there is nothing to train for: at the
end of the run (it then returns the final parameters and sets `done`), after
`max_unsynced_steps` without a syncer, and in the lock-step test mode tau = 0.

Threads, beside the wire's own: *lander* waits for host copies, *sender* sends
contributions, *fetcher* brings merged fragments to the devices, *reporter*
reports, *rejoiner* reconnects. They and the loop share only deques, immutable
snapshots and the `Copies` table, which the loop's thread never touches.
"""

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

from decoupled import faults
from decoupled.algorithm.policy import Exchange, exchange_of
from decoupled.clock import Clock, MonotonicClock
from decoupled.errors import ConfigError, DecoupledError, Refused, Unreachable
from decoupled.link import digests, tree, workers
from decoupled.link.agreement import Agreement, OneHost
from decoupled.link.boundary import (
  Boundary,
  Extraction,
  Progress,
  Resumed,
  Session,
  Staged,
)
from decoupled.link.claims import DataClaims, NoClaims
from decoupled.link.copies import Copies, HostCopy
from decoupled.link.ops import FragmentOps, Kernels, Tree
from decoupled.link.wire import LearnerWire
from decoupled.types import (
  NO_VERSION,
  Announcement,
  Arrays,
  Contribution,
  CopyId,
  Hello,
  Manifest,
  MergedFragment,
  Phase,
  Report,
  Stage,
  TensorSpec,
  Version,
  Welcome,
)

_LOG = logging.getLogger("decoupled.link")
_RESEND_S = 2.0  # a copy still wanted this long after it was sent goes again
_REPEAT_S = 0.5  # an unchanged report is repeated, should one have been lost
_SAY_S = 10.0  # how often a wait says what it waits for
_BACKOFF_S = (0.1, 0.2, 0.5, 1.0)
_UNHEARD_S = 3.0  # what a syncer heard so long before its death may be lost
# An own old claim; or, at the address of a dead syncer, somebody else's.
# Or the learner's other hosts have not joined again yet.
_PASSING = ("claimed", "unauthenticated", "incomplete")
# A part that came to harm is sent again: other hosts hold the same copy.
_HARMED = ("checksum", "incomplete", "timeout", "busy")
_CLAIM_TRIES = 60  # an own old claim lapses with its lease, well before that

WorkerFactory = Callable[
  [str, workers.Handler, Callable[[BaseException], None]], workers.Worker
]


@dataclasses.dataclass(frozen=True)
class Patience:
  """How long a link waits where it must; seconds.

  Attributes:
    join_s: for version 0 or for every fragment, at the start.
    end_s: for the drain to finish.
    rejoin_say_s: how often a lost connection is mentioned.
  """

  join_s: float = 300.0
  end_s: float = 120.0
  rejoin_say_s: float = 30.0


class Link:
  """One learner's side of the exchange; see the module docstring.

  Args:
    wire: to the syncer.
    params: the parameter tree, for its structure, dtypes and shardings.
    tensors: its leaves as the wire knows them, in tree order.
    sent: per leaf whether it is sent.
    hello: the claim to make.
    agreement: how this learner's hosts agree; alone by default.
    clock: for intervals only.
    worker: makes background workers; threads by default.
    patience: limits of waits.
    leaving: whether to give up a wait, in the middle of training or, if it is
      told True, at the end of the run; never by default.
    claims: the units that the loop trains on, if it claims any.
    kernels: device operations that are compiled already.
    resumed: go on from there, instead of from step 0 without a fragment.

  Attributes:
    done: the run has ended.
    leaves: this learner leaves before that: one of its hosts must.
    earlier: steps that earlier incarnations of this process have reported, and
      its tokens up to their last report.
  """

  def __init__(
    self,
    wire: LearnerWire,
    params: Tree,
    hello: Hello,
    *,
    agreement: Callable[[int], Agreement] | None = None,
    clock: Clock | None = None,
    worker: WorkerFactory | None = None,
    patience: Patience | None = None,
    leaving: Callable[[bool], bool] = lambda ending: False,
    claims: DataClaims | None = None,
    kernels: Kernels | None = None,
    resumed: Resumed | None = None,
  ):
    self._kernels = kernels
    self._resumed = resumed
    self._leaving = leaving
    self._wire = wire
    self._claims = claims or NoClaims()
    self._hello = hello
    self._patience = patience or Patience()
    self._clock = clock or MonotonicClock()
    self._agreement_of = agreement or (lambda fragments: OneHost())
    self._agreement: Agreement = OneHost()
    leaves = jax.tree.leaves(params)
    self._treedef: Any = jax.tree.structure(params)
    self._leaf_index = _leaf_index(params, hello.tensors)
    self._shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    make = worker or workers.Threaded
    self._workers = {
      name: make(f"link-{name}", handler, self._failed)
      for name, handler in (
        ("lander", self._land),
        ("sender", self._send),
        ("fetcher", self._fetch),
        ("reporter", self._report),
        ("rejoiner", self._rejoin),
      )
    }
    self._wake = threading.Event()
    self._closing = threading.Event()
    self._landing: collections.deque[Extraction] = collections.deque()
    self._copies = Copies()
    self._bases: dict[tuple[int, Version], Arrays] = {}
    self._staged_versions: dict[int, Version] = {}
    self._sent: dict[CopyId, float] = {}
    self._seq = 0
    self._said_ends: collections.deque[float] = collections.deque()
    self._said_counts = (0, 0)
    self._from = (0, 0)  # step and tokens
    if resumed is not None:
      self._from = (resumed.step, resumed.tokens)
    self.earlier = self._from
    self._told_before = 0  # tokens before the incarnation last spoken for
    self._progress: Progress | None = None
    self._published_at = 0.0
    self._fatal: DecoupledError | None = None
    self._over = ""
    self._lost_at: float | None = None
    self._said_at = 0.0
    self._gave_up = False
    self.done = False
    self.leaves = False
    self._joined = False
    self._followed: tuple[MergedFragment, ...] = ()
    self._newest_then: tuple[Session, tuple[Version, ...]] | None = None
    self._warm_for: tuple[Manifest, str] | None = None
    self.welcome: Welcome
    self.policy: Exchange
    self._ops: FragmentOps
    self._boundary: Boundary

  # --- the loop's side -----------------------------------------------------

  def warm(
    self,
    params: Tree,
    manifest: Manifest,
    contract: tuple[tuple[str, str], ...],
  ) -> None:
    """Compiles the device operations before anything is claimed.

    Args:
      params: the parameter tree; left as it is.
      manifest: how the run cuts it.
      contract: the run's `key -> value` lines.
    """
    policy = exchange_of(dict(contract))
    rule, leaves = policy.adoption, jax.tree.leaves(params)
    self._ops = FragmentOps(manifest, self._leaf_index, leaves, self._kernels)
    self._ops.warm(leaves, ("overwrite", rule), policy.blend)
    self._warm_for = (manifest, rule)

  def hold(self, fragments: Iterable[MergedFragment]) -> None:
    """Takes versions that were fetched before the claim: `begin` fetches only
    what is newer."""
    self._followed = tuple(fragments)

  def join(self, params: Tree, learner_id: int | None = None) -> Welcome:
    """Claims the id and warms up the device operations; does not wait.

    Args:
      params: the parameter tree.
      learner_id: the id to claim; None for that of the hello.

    Raises:
      Refused: the syncer declined, and says why.
      Unreachable: it did not answer within its limit.
    """
    if learner_id is not None:
      self._hello = dataclasses.replace(self._hello, learner_id=learner_id)
    welcome = self._wire.hello(self._hello)
    self.welcome = welcome
    self.policy = exchange_of(dict(welcome.contract))
    if self._hello.hosts > 1 and not self.policy.tau:
      raise ConfigError(
        "Exchange.tau = 0 is a lock-step mode of learners of one host, this "
        f"one has {self._hello.hosts}: choose Exchange.tau = 4"
      )
    self._agreement = self._agreement_of(self.policy.P)
    if self._resumed is not None:  # each program is loaded when it is needed
      leaves = jax.tree.leaves(params)
      self._ops = FragmentOps(
        welcome.manifest, self._leaf_index, leaves, self._kernels
      )
    elif self._warm_for != (welcome.manifest, self.policy.adoption):
      self.warm(params, welcome.manifest, welcome.contract)
    self._boundary = Boundary(
      self.policy,
      self._ops,
      self._agreement,
      self._clock,
      self._extracted,
    )
    self._boundary.session = Session(welcome.incarnation, welcome.term)
    if self._resumed is not None:
      self._boundary.resume(self._resumed)
      self._staged_versions = dict(enumerate(self._resumed.held))
    self._joined = True
    for merged in self._followed:
      self._stage(merged, included=None)
    self._followed = ()
    self._listen()
    return welcome

  def begin(
    self, params: Tree, until: Callable[[], bool] = lambda: True
  ) -> Tree:
    """Joins, unless it has, and waits until every fragment is adopted.

    Args:
      params: the initial parameters; they become version 0 only if the run
        has none and this learner is asked for it.
      until: what else to wait for, with a limit of its own; newer fragments
        are adopted meanwhile. `wake` makes the wait look again.

    Returns:
      The run's parameters; `params` is consumed.
    """
    if not self._joined:
      self.join(params)
    leaves = self._flatten(params)
    self._wait_for(
      lambda: self.visit_start(leaves),
      self._patience.join_s,
      "the parameters of every fragment",
    )

    def ready() -> bool:
      return self._agreement.every("ready", until())

    if not ready():
      self._wait_for(
        lambda: self._keep_up(leaves) and ready(),
        float("inf"),
        "optimizer state and data to begin with",
      )
    return jax.tree.unflatten(self._treedef, leaves)

  def _keep_up(self, leaves: list[jax.Array]) -> bool:
    """Adopts what is newer; True as long as there are parameters to train on.

    Not to be behind at one moment is enough: a learner that trains may be, too.
    """
    self.visit_start(leaves)
    return self._boundary.complete

  def wake(self) -> None:
    """Whatever waits in this link looks at once; for any thread."""
    self._wake.set()

  def visit_start(self, leaves: list[jax.Array]) -> bool:
    """One look before the first step; True once it may be taken.

    Raises:
      Refused: the run ended while it had no parameters to train on.
    """
    boundary = self._boundary
    announcement = boundary.announcement
    over = announcement is not None and announcement.phase is Phase.ENDED
    if (over or self._over) and not boundary.complete:
      raise Refused(
        "ended",
        self._over
        or f"run {self.welcome.run_id} at {self._wire.peer} has "
        "ended before this learner had its parameters",
      )
    step, tokens = self._from
    boundary.visit(leaves, step, tokens)
    position = self.welcome.position
    self._publish(step, tokens, 0, position, Stage.JOINING, float("nan"))
    # one that goes on from a copy has caught up: the rest comes on the way
    caught_up = self._resumed is not None or self._caught_up(announcement)
    begun = boundary.complete and caught_up
    return self._agreement.every("begun", begun)

  def _caught_up(self, now: Announcement | None) -> bool:
    """Whether what was newest when this learner joined is held.

    What is merged while that comes may follow at boundaries, as it does for
    those that train: to run after the very newest might never end.
    """
    session = self._boundary.session
    if now is None or session is None:
      return False
    if self._newest_then is None or self._newest_then[0] is not session:
      self._newest_then = (session, now.versions)
    wanted, held = self._newest_then[1], self._boundary.held
    return all(h >= w for h, w in zip(held, wanted, strict=False))

  def boundary(
    self,
    params: Tree,
    *,
    step: int,
    tokens: int,
    schedule_step: int = 0,
    position: tuple[int, int] = (0, 0),
    loss: float = float("nan"),
    idle: Callable[[], bool] = lambda: False,
  ) -> Tree:
    """Exchanges fragments between two inner steps.

    Args:
      params: the parameter tree after inner step `step`; consumed.
      step: inner steps this process has taken, counted from 1.
      tokens: tokens this process has trained on.
      schedule_step: step of the learning-rate schedule, for the record.
      position: data position (unit, offset) after this step.
      loss: last training loss known, for the record.
      idle: whether there is nothing to train on; waits as long as it says so.

    Returns:
      The parameters to go on with.
    """
    leaves = self._flatten(params)
    stop = self.visit(leaves, step, tokens, schedule_step, position, loss)
    if stop or self.waits(step) or idle():
      self._stand_by(leaves, step, tokens, schedule_step, position, loss, idle)
    return jax.tree.unflatten(self._treedef, leaves)

  def visit(
    self,
    leaves: list[jax.Array],
    step: int,
    tokens: int,
    schedule_step: int,
    position: tuple[int, int],
    loss: float,
    stage: Stage = Stage.TRAINING,
  ) -> bool:
    """One boundary without any wait; True if stepping must stop."""
    if self._fatal is not None:
      raise self._fatal
    self._boundary.over = bool(self._over)
    agreed = self._boundary.visit(leaves, step, tokens)
    must_leave = self._gave_up or self._leaving(agreed.stop)
    self.leaves = self._agreement.some("leave", must_leave)
    if agreed.stop:
      stage = Stage.DRAINED
      faults.reached("link.drained")
    self._publish(step, tokens, schedule_step, position, stage, loss)
    if self._agreement.every("ended", self._ended()):
      self.done = True
    return agreed.stop

  def waits(self, step: int) -> bool:
    """Whether the next inner step must wait (see the module docstring)."""
    return self._paused(step) or (self.policy.tau == 0 and self._pending())

  @property
  def common_step(self) -> int:
    """The run's step of the learning-rate schedule, as last adopted."""
    return self._boundary.common_step

  @property
  def donation(self) -> tuple[int, int] | None:
    """(incarnation, request) if the optimizer state of this one is wanted."""
    a, session = self._boundary.announcement, self._boundary.session
    if a is None or session is None or not a.donate:
      return None
    return session.incarnation, a.donate

  @property
  def relieved(self) -> bool:
    """Whether a standby is prepared to take this learner's place."""
    a = self._boundary.announcement
    return a is not None and a.relieved

  def leave(self, why: str) -> None:
    """Leaves the run at once; `close` is still to be called."""
    self._closing.set()
    self._wake.set()
    self._wire.leave(why)

  @property
  def versions(self) -> tuple[Version, ...]:
    """The version of each fragment that the parameters hold."""
    return tuple(self._boundary.held)

  def digest(self, params: Tree) -> str:
    """Of what is sent of the parameters; waits for the devices.

    Of parameters sharded over hosts it is that of this host's part.
    """
    leaves, every = self._flatten(params), range(self.policy.P)
    units = (self._ops.extract(p, leaves) for p in every)
    return digests.of(self._ops.here(taken) for taken in units)

  def resumable(self, step: int, tokens: int) -> Resumed:
    """What belongs to a copy of the parameters after this boundary."""
    return self._boundary.resumable(step, tokens)

  def abandon(self, limit_s: float) -> None:
    """Ends the threads and lets go of the devices; the wire stays open.

    Args:
      limit_s: for each thread: one may wait for a device that has failed, or
        for the syncer; it ends by itself.
    """
    self._closing.set()
    self._wake.set()
    for worker in self._workers.values():
      worker.close(limit_s)
    self._landing.clear()
    self._copies.clear()
    self._followed = ()
    # whatever else still knows this link holds no array by it
    for name in ("_ops", "_boundary", "_kernels", "_agreement"):
      self.__dict__.pop(name, None)

  def close(self, why: str = "") -> None:
    """Leaves the run, saying why, and ends the background threads."""
    self._closing.set()
    self._wake.set()
    self._wire.leave(why)
    self._wire.close()
    for worker in self._workers.values():
      worker.close(limit_s=5.0)

  def _stand_by(
    self,
    leaves: list[jax.Array],
    step: int,
    tokens: int,
    schedule_step: int,
    position: tuple[int, int],
    loss: float,
    idle: Callable[[], bool],
  ) -> None:
    """Visits boundaries without steps until there is a reason to go on."""

    give_up_at = float("inf")

    def visit() -> bool:
      self._gave_up = self._clock.now() > give_up_at
      paused = self._paused(step) or idle()
      stage = Stage.PAUSED if paused else Stage.TRAINING
      stop = self.visit(
        leaves, step, tokens, schedule_step, position, loss, stage
      )
      if self.leaves:
        return True
      if stop:
        return self.done
      return not (self.waits(step) or idle())

    ending = self._over or self._draining()
    limit = self._patience.end_s if ending else float("inf")
    if self._hello.hosts > 1:
      # no host goes alone: one that has waited enough says so to the others
      give_up_at = self._clock.now() + limit
      limit = float("inf")
    what = "the end of the run" if ending else "merged fragments"
    try:
      self._wait_for(visit, limit, what)
    except Unreachable as error:
      _LOG.warning("%s; stopping with the parameters at hand", error)
      self.done = True

  def _wait_for(
    self, visit: Callable[[], bool], limit_s: float, what: str
  ) -> None:
    began = said = self._clock.now()
    while not visit():
      self._wake.wait(timeout=0.5)
      self._wake.clear()
      self.serve()  # what failed before is tried again
      now = self._clock.now()
      if self._fatal is not None:
        raise self._fatal
      if now - began > limit_s:
        raise Unreachable(
          f"waited {limit_s:.0f} s for {what} from {self._wire.peer}"
          f"{self._note()}"
        )
      if now - said > _SAY_S:
        said = now
        _LOG.warning(
          "waiting for %s from %s since %.0f s%s",
          what, self._wire.peer, now - began, self._note(),
        )  # fmt: skip

  def _note(self) -> str:
    if self._lost_at is not None:
      return ": connection lost"
    a = self._boundary.announcement
    return f": {a.note}" if a is not None and a.note else ""

  def _draining(self) -> bool:
    a = self._boundary.announcement
    return a is not None and a.phase in (Phase.DRAINING, Phase.ENDED)

  def _ended(self) -> bool:
    if self._over:
      return True
    a = self._boundary.announcement
    ended = a is not None and a.phase is Phase.ENDED
    return ended and self._boundary.current

  def _paused(self, step: int) -> bool:
    """Whether this learner has drifted too far without a syncer (4, §3)."""
    limit = self.policy.unsynced_limit
    return limit > 0 and step - self._boundary.unsynced_since >= limit

  def _pending(self) -> bool:
    """Lock-step mode: something extracted or merged is not adopted yet."""
    a = self._boundary.announcement
    if a is None or self._lost_at is not None:
      return False
    return self._boundary.pending or a.versions != self.versions

  def _flatten(self, params: Tree) -> list[jax.Array]:
    leaves, treedef = jax.tree.flatten(params)
    if treedef != self._treedef:
      raise DecoupledError(
        f"the parameter tree changed: {treedef} was handed in, this link was "
        f"made for {self._treedef}"
      )
    for leaf, (shape, dtype) in zip(leaves, self._shapes, strict=True):
      if leaf.shape != shape or leaf.dtype != dtype:
        raise DecoupledError(
          f"a parameter changed: {leaf.dtype}{leaf.shape} was handed in, this "
          f"link was made for {dtype}{shape}"
        )
    return leaves

  def _publish(
    self,
    step: int,
    tokens: int,
    schedule_step: int,
    position: tuple[int, int],
    stage: Stage,
    loss: float,
  ) -> None:
    now, before = self._clock.now(), self._progress
    progress = self._boundary.progress(
      step, tokens, schedule_step, position, stage, loss
    )
    same = before is not None and before[:-1] == progress[:-1]
    if same and now - self._published_at < _REPEAT_S:
      return
    self._progress, self._published_at = progress, now
    if not self._landing:  # else the landing reports, a moment from now
      self._workers["reporter"].put("report")

  def _extracted(self, extraction: Extraction) -> None:
    self._landing.append(extraction)
    self._workers["lander"].put("land")

  # --- behind the loop -----------------------------------------------------

  def _listen(self) -> None:
    faults.reached("link.joined")
    self._lost_at = None
    session = self._boundary.session
    self._wire.listen(
      lambda a: self._announced(a, session), lambda why: self._lost(why)
    )

  def _announced(self, a: Announcement, session: Session | None) -> None:
    """Takes in what the syncer wants; called on the wire's thread."""
    if self._closing.is_set():
      return
    boundary = self._boundary
    if session is not boundary.session:
      return
    known = boundary.announcement
    if known is not None and (a.term, a.seq) <= (known.term, known.seq):
      return
    boundary.announced_at = self._clock.now()
    boundary.announcement = a
    for copy, _ in a.refused:
      self._drop(copy)
    if a.claims is not None:
      self._claims.word(a.claims, a.data_ended)
    self.serve()
    self._wake.set()

  def serve(self) -> None:
    """Starts whatever the newest announcement asks for; repeats do no harm."""
    a = self._boundary.announcement
    if a is None:
      return
    for p, version in enumerate(a.versions):
      if version > self._staged_versions.get(p, NO_VERSION):
        self._workers["fetcher"].put(p)
    for copy in a.wanted:
      self._workers["sender"].put(copy)

  def _drop(self, copy: CopyId) -> None:
    """A refused copy: forget it, so that the boundary extracts anew."""
    if self._copies.get(copy) is None:
      return
    self._copies.drop(copy)
    self._boundary.refusals.append(copy)

  def _land(self, key: Hashable) -> None:
    """Waits for extracted units on the host, then says they are there."""
    del key
    while self._landing:
      extraction = self._landing.popleft()
      self._copies.add(
        HostCopy(
          extraction.header,
          self._ops.host(extraction.device),
          extraction.device,
          extraction.step,
          extraction.tokens,
          self._ops.slices(extraction.device),
        )
      )
      faults.reached("link.landed")
      self._workers["reporter"].put("report")
      self._offer(extraction.header.copy)

  def _offer(self, copy: CopyId) -> None:
    """Sends what an open round, or the seeding, has asked for beforehand.

    The announcement of the round is the pull: waiting for the copy to be
    wanted by name would cost a round trip of the overlap budget.
    """
    a = self._boundary.announcement
    if a is None:
      return
    asked = any(
      (r.version.term, r.version.round) == (copy.term, copy.round)
      for r in a.open
    )
    if asked or copy in a.wanted:
      self._workers["sender"].put(copy)

  def _send(self, key: Hashable) -> None:
    """Sends one wanted copy; a repetition sends the same bytes."""
    assert isinstance(key, CopyId)
    copy = self._copies.get(key)
    now = self._clock.now()
    if copy is None or now - self._sent.get(key, -_RESEND_S) < _RESEND_S:
      return
    if self._ops.spans and not copy.slices:
      return  # other hosts send all of it
    faults.reached("link.pull_received")
    base = None
    if self.policy.codec != "float32":
      base = self._bases.get((key.fragment, copy.header.base))
    reason = self._wire.contribute(
      Contribution(
        self.welcome.learner_id,
        copy.header,
        copy.arrays,
        self._hello.host,
        copy.slices,
      ),
      base,
    )
    self._sent[key] = self._clock.now()
    if len(self._sent) > 4 * self.policy.P:
      self._sent.pop(next(iter(self._sent)))
    if reason in _HARMED and copy.slices:
      _LOG.info("a part of %s was refused: %s; again", key, reason)
    elif reason:
      _LOG.info("contribution %s was refused: %s", key, reason)
      self._drop(key)
      self._workers["reporter"].put("report")

  def _fetch(self, key: Hashable) -> None:
    """Brings the newest version of a fragment next to the parameters."""
    assert isinstance(key, int)
    a = self._boundary.announcement
    held = self._staged_versions.get(key, NO_VERSION)
    if a is None or not a.versions or a.versions[key] <= held:
      return
    base = self._bases.get((key, held))
    merged = self._wire.fetch(key, held, base)
    if merged.version <= held:
      return
    included = None
    if merged.included is not None:
      included = self._copies.get(merged.included)
    self._stage(merged, included)
    faults.reached("link.staged")
    self._wake.set()

  def _stage(self, merged: MergedFragment, included: HostCopy | None) -> None:
    """Puts a version next to the parameters, for the next boundary."""
    key = merged.fragment
    held = self._staged_versions.get(key, NO_VERSION)
    if self._keeps_bases:
      self._bases[(key, merged.version)] = merged.arrays
      for old in [v for p, v in self._bases if p == key and v < held]:
        del self._bases[(key, old)]
    own_base = None
    # A merge that included a copy of a lost connection already holds what the
    # own base would carry on once more: such a version overwrites.
    if self.policy.adoption == "carry" and merged.included is None:
      own = self._bases.get((key, merged.base))
      own_base = None if own is None else self._ops.stage(key, own)
    self._boundary.arrived.append(
      Staged(
        fragment=key,
        version=merged.version,
        base=merged.base,
        merged=self._ops.stage(key, merged.arrays),
        included=included,
        own_base=own_base,
        common_step=merged.common_step,
        restored=merged.restored,
      )
    )
    self._staged_versions[key] = merged.version

  @property
  def _keeps_bases(self) -> bool:
    return self.policy.adoption == "carry" or self.policy.codec != "float32"

  def _report(self, key: Hashable) -> None:
    """Sends whole state: progress, copies and versions held."""
    del key
    progress, session = self._progress, self._boundary.session
    if progress is None or session is None or self._lost_at is not None:
      return
    if progress.incarnation != session.incarnation:
      return  # counters of a lost connection; the next boundary has new ones
    self._copies.drop_older(session.term, progress.versions)
    # while it joins, the position is that of its predecessor
    joining = progress.stage is Stage.JOINING
    claims = self._claims.held((0, 0) if joining else progress.position)
    ends = []
    while self._boundary.step_ends:
      ends.append(self._boundary.step_ends.popleft())
    self._seq += 1
    faults.reached("link.before_report")
    self._wire.report(
      Report(
        learner_id=self.welcome.learner_id,
        incarnation=session.incarnation,
        seq=self._seq,
        stage=progress.stage,
        step=progress.step,
        tokens=progress.tokens,
        schedule_step=progress.schedule_step,
        copies=tuple(
          h
          for h in self._copies.headers()
          if h.copy.incarnation == session.incarnation
        ),
        versions=progress.versions,
        position=progress.position,
        sent_at_s=self._clock.now(),
        step_ends_s=tuple(ends),
        loss=progress.loss,
        claims=claims,
        wants=self._claims.wants,
        unclaimed=self._claims.unclaimed,
        tokens_before=progress.tokens_before,
        tokens_alone=max(0, progress.tokens_before - self.earlier[1]),
        host=self._hello.host,
      )
    )
    faults.reached("link.after_report")
    self._said_counts = (progress.step, progress.tokens)
    self._told_before = progress.tokens_before
    self._said_ends.extend(ends)
    while (
      self._said_ends and self._said_ends[0] < self._clock.now() - _UNHEARD_S
    ):
      self._said_ends.popleft()

  # --- when the connection is lost ------------------------------------------

  def _lost(self, why: str) -> None:
    if self._closing.is_set() or self._lost_at is not None:
      return
    _LOG.warning(
      "lost the syncer at %s: %s; training goes on", self._wire.peer, why
    )
    self._lost_at = self._clock.now()
    self._said_at = self._lost_at
    self._wake.set()
    self._workers["rejoiner"].put(0)

  def _rejoin(self, key: Hashable) -> None:
    """Tries once to claim the id again; a failure queues the next try."""
    assert isinstance(key, int)
    if self._closing.is_set():
      return
    hello = dataclasses.replace(
      self._hello,
      learner_id=self.welcome.learner_id,
      run_id=self.welcome.run_id,
      previous=self.welcome.incarnation,
    )
    try:
      self._rejoined(self._wire.hello(hello))
      return
    except Refused as error:
      if error.reason == "ended":
        self._over = str(error)
      elif error.reason not in _PASSING or key > _CLAIM_TRIES:
        self._fatal = error
      if self._over or self._fatal is not None:
        self._wake.set()
        return
    except Unreachable as error:
      now = self._clock.now()
      if now - self._said_at > self._patience.rejoin_say_s:
        self._said_at = now
        _LOG.warning("still no syncer: %s; training goes on", error)
    backoff_s = _BACKOFF_S[min(key, len(_BACKOFF_S) - 1)]
    self._workers["rejoiner"].put(key + 1, backoff_s)

  def _rejoined(self, welcome: Welcome) -> None:
    if welcome.manifest != self.welcome.manifest:
      self._fatal = Refused(
        "contract",
        f"the syncer at {self._wire.peer} now cuts the model into other "
        "fragments: start this learner again",
      )
      self._wake.set()
      return
    self.welcome = welcome
    self._copies.clear()
    self._sent.clear()
    steps, tokens = self._said_counts
    told = max(self.earlier[1], self._told_before + tokens)
    self.earlier = (self.earlier[0] + steps, told)
    self._said_counts = (0, 0)
    self._claims.rejoined()
    # told once more: a syncer that died may not have logged them
    self._boundary.step_ends.extendleft(reversed(self._said_ends))
    self._said_ends.clear()
    self._boundary.announcement = None
    self._boundary.session = Session(welcome.incarnation, welcome.term)
    self._listen()
    self._workers["reporter"].put("report")
    _LOG.warning("joined the run again as incarnation %d", welcome.incarnation)

  def _failed(self, error: BaseException) -> None:
    """A background task failed; the loop goes on, the next try may not."""
    if self._closing.is_set():  # the wire is closed under what is under way
      _LOG.info("given up at the end: %s", error)
    elif isinstance(error, DecoupledError):
      _LOG.info("%s", error)
    else:
      _LOG.exception("background task failed", exc_info=error)


def _leaf_index(
  params: Tree, tensors: tuple[TensorSpec, ...]
) -> dict[str, int]:
  """Position among the tree's leaves of every tensor that is sent."""
  index = {name: i for i, name in enumerate(tree.names(params))}
  missing = [t.name for t in tensors if t.name not in index]
  if missing:
    raise DecoupledError(
      f"no leaf of the parameter tree is called {missing[0]}"
    )
  return index


def connect(
  address: str,
  params: Any,
  *,
  learner_id: int = -1,
  roles: Any = None,
  stacked: tuple[str, ...] = (),
  token_file: str = "",
  tls_ca: str = "",
  contract: tuple[tuple[str, str], ...] = (),
) -> Link:
  """A link to the syncer at `address` for any pytree of JAX arrays.

  Args:
    address: `host:port`, IPv6 as `[::1]:port`.
    params: the parameter tree; it defines names, shapes and dtypes.
    learner_id: the id to claim, -1 for any free one.
    roles: a tree of roles like `params`, or a function from a leaf's name to
      its role; None makes every float a weight and leaves the rest alone.
    stacked: names of leaves whose axis 0 enumerates layers.
    token_file: file with the run token.
    tls_ca: PEM file of the authority that signed the syncer's certificate; ""
      is plain text, which goes no further than this machine.
    contract: further `key, value` lines that all learners must agree on.
  """
  import os
  import socket

  from decoupled.wire import client, credentials, tls

  token = credentials.read_token(token_file) if token_file else ""
  hello = Hello(
    learner_id=learner_id,
    holder=f"{socket.gethostname()}:{os.getpid()}",
    run_id="",
    tensors=tree.tensor_specs(params, roles, stacked),
    contract=contract,
  )
  believed = tls.client(tls_ca) if tls_ca else None
  wire = client.GrpcLearnerWire(address, token, tls=believed)
  return Link(wire, params, hello)
