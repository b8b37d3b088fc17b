"""The round clock: opens rounds, waits for quorum and grace, merges, drains.

A single-threaded state machine that never blocks. It is driven by what
arrives (`hello`, `report`, `contribution`, ...) and by `tick`; it answers with
`announcement`, whole state for one learner, and with merge jobs that somebody
else runs. The service drives it over gRPC, the in-memory network in tests and
sweeps; both are the same code from here on.

Life of a round (design section 4): opened -> fresh reports make the quorum ->
grace -> transfers under way finish or run out of the overlap budget -> merging
-> closed. Rounds may close out of order, but a fragment is never open twice.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import optax

from decoupled import faults
from decoupled.algorithm import (
  fragments,
  grace,
  outer,
  quorum,
  schedule,
  weights,
)
from decoupled.algorithm.policy import Exchange, Outer
from decoupled.errors import ConfigError, Refused
from decoupled.syncer import checks
from decoupled.syncer.accounts import Accounts
from decoupled.syncer.donors import Donors
from decoupled.syncer.handover import Handover
from decoupled.syncer.membership import Member, Membership
from decoupled.syncer.merging import MergeJob, Round
from decoupled.syncer.model import GlobalModel
from decoupled.syncer.pool import Pool
from decoupled.syncer.settings import Limits
from decoupled.syncer.step_log import StepLog
from decoupled.syncer.units import Units
from decoupled.types import (
  NO_VERSION,
  PROTOCOL_VERSION,
  Announcement,
  Arrays,
  Contribution,
  CopyHeader,
  CopyId,
  EventSink,
  Heartbeat,
  Hello,
  Manifest,
  MergedFragment,
  Phase,
  Report,
  Standing,
  TensorSpec,
  Version,
  Welcome,
)
from decoupled.wire.codecs import Payload

_DONE = "the rounds or tokens asked for are done"


@dataclasses.dataclass(frozen=True)
class Plan:
  """How this run starts and ends; belongs to no contract.

  Attributes:
    run_id: of the run.
    learners: how many an empty syncer waits for before it starts.
    rounds: rounds after which the run drains, 0 = no such end.
    tokens: tokens of all learners after which it drains, 0 = no such end.
    contract: `key -> value` lines of the run.
  """

  run_id: str
  learners: int = 1
  rounds: int = 0
  tokens: int = 0
  contract: tuple[tuple[str, str], ...] = ()


class Rounds:
  """The syncer's whole logic, without a network and without threads.

  Args:
    plan: how the run starts and ends.
    exchange: the contract's exchange policy.
    outer_rule: the contract's outer rule.
    limits: this syncer's time limits.
    term: raised at every syncer start.
    events: where notable facts go.
    started_at: the job's start on the same clock; times in events count
      from there.
    tape: records every finished merge job, if given.
  """

  def __init__(
    self,
    plan: Plan,
    exchange: Exchange,
    outer_rule: Outer,
    limits: Limits,
    term: int,
    events: EventSink,
    started_at: float = 0.0,
    tape: "TapeLike | None" = None,
  ):
    self._plan = plan
    self._exchange = exchange
    self._outer = outer_rule
    self._limits = limits
    self.term = term
    self._events = events
    self._job_started_at = started_at
    self._tape = tape
    self.phase = Phase.WAITING
    self.generation = 0
    self._common_changes = 0
    self.membership = Membership(limits.lease_s, {})
    self.donors = Donors(self.membership, limits, events, self._changed)
    self.pool = Pool(
      limits, events, self._t, self._pool_changed, self._relief_changed
    )
    self.contract = dict(plan.contract)
    self.model: GlobalModel | None = None
    self.accounts: Accounts | None = None
    self.rounds_closed = 0
    self.fullest = 0
    self.positions: dict[int, tuple[int, int]] = {}
    self.tokens: dict[int, int] = {}
    self.refused: dict[str, int] = {}
    self.sync_s = math.nan
    self.has_history = False
    self._open: dict[int, Round] = {}
    self._received: dict[tuple[int, int], Contribution] = {}
    self._included: dict[tuple[int, int], CopyId] = {}
    self._next_round = 1
    self._last_opened = -math.inf
    self._jobs: list[MergeJob] = []
    self._seeds: dict[int, Contribution] = {}
    self._seeder: int | None = None
    self._started_at: float | None = None
    self.drain_why = ""
    self._leaving = False
    self.handed_over = False  # to a successor: nothing is merged any more
    self._drain_s = limits.drain_s
    self._drain_by = math.inf
    self._ends_by = math.inf
    self._owed: dict[int, float] = {}
    self._away: dict[int, float] = {}  # lost in the drain: waited for until
    self._step_log = StepLog(events, self._t, opened_held=4 * exchange.P)
    self._note = ""
    self._floor_of: tuple[tuple[float, ...], float | None] = ((), None)
    self.units = Units(events, limits, takes_over=term > 1)

  # --- restoring ---------------------------------------------------------

  def restore(
    self,
    manifest: Manifest,
    fragments_: Iterable[tuple[Arrays, optax.OptState]],
    rounds: int,
    contract: dict[str, str],
    incarnations: dict[int, int],
    positions: dict[int, tuple[int, int]],
    fullest: int,
    tokens: dict[int, int],
    units: Mapping[str, Any] | None = None,
  ) -> None:
    """Continues a snapshot: every fragment is stamped (this term, rounds).

    The new term makes the snapshot win over whatever learners hold (design
    section 5, *Syncer restart*).
    """
    differing = [
      key
      for key, value in self.contract.items()
      if contract.get(key, value) != value
    ]
    if differing:
      key = differing[0]
      raise Refused(
        "contract",
        f"the snapshot was made with {key} = {contract[key]}, this "
        f"configuration says {self.contract[key]}",
      )
    self.contract = {**contract, **self.contract}
    self._use(manifest)
    assert self.model is not None
    step = schedule.common_step(rounds, self._exchange.H, self._exchange.P)
    for p, (arrays, state) in enumerate(fragments_):
      self.model.start(
        p, Version(self.term, rounds), arrays, step, state, restored=True
      )
    self.rounds_closed = rounds
    self._next_round = rounds + 1
    self.membership.incarnations = dict(incarnations)
    self.positions = dict(positions)
    self.fullest = fullest
    self.tokens = dict(tokens)
    self.units.restore(units)
    self.has_history = True

  def _use(self, manifest: Manifest) -> None:
    self.model = GlobalModel(manifest, self._exchange, self._outer)
    self.accounts = Accounts(
      manifest.shares(), self._exchange.adoption, self._events
    )

  @property
  def run_id(self) -> str:
    return self._plan.run_id

  @property
  def manifest(self) -> Manifest:
    if self.model is None:
      raise Refused("early", "the run has no learner yet, hence no manifest")
    return self.model.manifest

  # --- membership --------------------------------------------------------

  def hello(self, now: float, hello: Hello) -> Welcome:
    """Grants a learner id; raises Refused with both sides of a mismatch."""
    if hello.protocol != PROTOCOL_VERSION:
      raise Refused(
        "protocol",
        f"{hello.holder} speaks wire protocol {hello.protocol}, this syncer "
        f"{PROTOCOL_VERSION}: install the same release on both sides",
      )
    if hello.run_id and hello.run_id != self._plan.run_id:
      raise Refused(
        "run",
        f"{hello.holder} belongs to run {hello.run_id}, this syncer serves "
        f"run {self._plan.run_id}: check --syncer_address",
      )
    if not self._open_to(hello):
      raise Refused("ended", f"run {self._plan.run_id} is ending; nobody joins")
    self._check_contract(hello)
    self.pool.check(hello)
    if self.model is None:
      self._use(self._first_manifest(hello.tensors))
      self._started_at = now
    returning = self.membership.returning(hello)
    if returning is not None:
      self._remove(
        now, returning, "closed", "the same process has joined again"
      )
    owed = {i for i, until in self._owed.items() if until > now}
    member = self.membership.claim(now, hello, {*owed, *self.pool.reserved})
    self.pool.claimed(now, member, hello)
    self.units.joined(now, member, hello, self.contract)
    self._forget_copies(member.learner_id)
    self._owed.pop(member.learner_id, None)
    if self.phase is Phase.DRAINING:
      self._away.pop(member.learner_id, None)
      member.stepped = True  # the drain waits for its last steps
    if self._started_at is None:
      self._started_at = now
    self.fullest = max(self.fullest, len(self.membership.live))
    self._events.emit(
      "join",
      learner=member.learner_id,
      incarnation=member.incarnation,
      hosts=member.hosts,
      holder=member.holder,
      previous=hello.previous,
      term=self.term,
    )
    self._advance(now)
    self._changed()
    return Welcome(
      learner_id=member.learner_id,
      incarnation=member.incarnation,
      run_id=self._plan.run_id,
      term=self.term,
      manifest=self.manifest,
      contract=tuple(sorted(self.contract.items())),
      lease_s=self._limits.lease_s,
      heartbeat_s=self._limits.heartbeat_s,
      position=self.positions.get(member.learner_id, (0, 0)),
      has_history=self.has_history,
    )

  def _open_to(self, hello: Hello) -> bool:
    """A run that ends is still open to who has only lost its connection."""
    if self.phase is Phase.DRAINING:
      return hello.previous > 0
    return self.phase is not Phase.ENDED

  def _check_contract(self, hello: Hello) -> None:
    for key, value in hello.contract:
      known = self.contract.setdefault(key, value)
      if known != value:
        raise Refused(
          "contract",
          f"{key} = {value} at {hello.holder}, but this run has {key} = "
          f"{known}: use the run's configuration",
        )
    if self.model is None:
      return
    run, theirs = self.model.manifest.tensors, hello.tensors
    for ours, other in zip(run, theirs, strict=False):
      if ours != other:
        raise Refused(
          "contract",
          f"tensor {_describe(other)} at {hello.holder}, but this run has "
          f"{_describe(ours)}: use the run's model",
        )
    if len(run) != len(theirs):
      raise Refused(
        "contract",
        f"{hello.holder} has {len(theirs)} tensors, this run {len(run)}: use "
        "the run's model",
      )

  def enter_pool(self, now: float, standing: Standing) -> int:
    """Lets a standby into the pool; raises Refused with both sides.

    A run that ends is open to it: it hears so at once.
    """
    if standing.run_id not in ("", self._plan.run_id):
      raise Refused(
        "run",
        f"{standing.holder} belongs to run {standing.run_id}, this syncer "
        f"serves run {self._plan.run_id}: check --syncer_address",
      )
    for key, value in standing.contract:
      known = self.contract.get(key, value)
      if known != value:
        raise Refused(
          "contract",
          f"{key} = {value} at {standing.holder}, but this run has {key} = "
          f"{known}: use the run's configuration",
        )
    return self.pool.entered(now, standing)

  def follow(self, now: float, fragment: int) -> MergedFragment:
    """The newest version of a fragment, for a standby."""
    del now
    return self._newest(fragment)

  def _first_manifest(self, tensors: tuple[TensorSpec, ...]) -> Manifest:
    """Cuts the first learner's tensors; later learners must match them."""
    try:
      cut = fragments.fragment(
        tensors, self._exchange.P, self._exchange.fragmentation
      )
    except ConfigError as error:
      raise Refused("contract", str(error)) from None
    return Manifest(tensors=tensors, fragments=cut, owners=("",) * len(cut))

  def disconnected(
    self, now: float, learner_id: int, incarnation: int, why: str
  ) -> None:
    """The control connection of an incarnation is gone: its id is free."""
    member = self.membership.live.get(learner_id)
    if member is None or member.incarnation != incarnation:
      return
    self._remove(now, member, "closed", why)
    if self.phase is Phase.DRAINING:
      self._away[learner_id] = now + self._limits.lease_s
    self._advance(now)

  def leave(
    self, now: float, learner_id: int, incarnation: int, why: str = ""
  ) -> None:
    """A learner goes of its own will."""
    member = self.membership.get(learner_id, incarnation)
    done = self.phase in (Phase.DRAINING, Phase.ENDED)
    self._remove(now, member, "drained" if done else "left", why)
    self._advance(now)

  def expect(self, now: float, learner_id: int, limit_s: float) -> None:
    """Somebody restarts that learner: do not end before it is back."""
    self._owed[learner_id] = now + limit_s

  def swap(self, now: float, learner_id: int) -> Handover:
    """Has a standby take a learner's place; raises Refused with the reason."""
    if self.phase is not Phase.TRAINING or self.drain_why or self._leaving:
      raise Refused(
        "phase", f"the run is {self.phase}, and swaps nobody in this phase"
      )
    member = self.membership.live.get(learner_id)
    if member is None:
      known = ", ".join(map(str, sorted(self.membership.live)))
      raise Refused(
        "unknown",
        f"learner {learner_id} is not in the run; there are: {known or 'none'}",
      )
    return self.pool.swap(now, member)

  def _remove(self, now: float, member: Member, why: str, detail: str) -> None:
    if self.phase is Phase.ENDED:
      why = "drained"
    self._step_log.gone(member)
    if self.accounts is not None and why != "drained":
      self.accounts.left(member, "failure")
    self.units.gone(now, member, why)
    self.membership.remove(member.learner_id)
    self.donors.left(member.learner_id, why)
    ending = self.phase in (Phase.DRAINING, Phase.ENDED) or self.drain_why
    if not ending:
      self.pool.lost(now, member, why, detail)
    self._forget_copies(member.learner_id)
    if self._seeder == member.learner_id:
      self._seeder = None
      self._seeds.clear()
    self._events.emit(
      "leave",
      learner=member.learner_id,
      incarnation=member.incarnation,
      why=why,
      detail=detail,
    )
    self._changed()

  def _forget_copies(self, learner_id: int) -> None:
    self._received = {
      key: c for key, c in self._received.items() if key[1] != learner_id
    }
    for r in self._open.values():
      if not r.merging:
        r.fresh.pop(learner_id, None)

  # --- what learners say -------------------------------------------------

  def heartbeat(self, now: float, beat: Heartbeat) -> None:
    member = self.membership.get(beat.learner_id, beat.incarnation)
    self.membership.renew(now, member)
    member.clock_offset_s = min(member.clock_offset_s, now - beat.sent_at_s)

  def report(self, now: float, report: Report) -> None:
    """Takes in what a learner holds; late and repeated ones are dropped."""
    member = self.membership.get(report.learner_id, report.incarnation)
    self.membership.renew(now, member)
    before = member.report
    if before is not None and report.seq <= before.seq:
      return
    if len(report.versions) != self._exchange.P:
      raise Refused(
        "malformed",
        f"learner {report.learner_id} reports {len(report.versions)} "
        f"fragments, the run has {self._exchange.P}",
      )
    member.report = report
    member.clock_offset_s = min(member.clock_offset_s, now - report.sent_at_s)
    member.time_step(now, report.step, self._exchange.ema)
    if report.step > 0 and not member.stepped:
      member.stepped = True
      self._events.emit(
        "first_step",
        learner=member.learner_id,
        incarnation=member.incarnation,
      )
    new_tokens = report.tokens - (0 if before is None else before.tokens)
    if self.accounts is not None and before is None:
      new_tokens += self.accounts.began(member, report, self.term)
    elif self.accounts is not None and before is not None:
      self.accounts.adopted(member, before.versions, report)
      self._step_log.adopted(now, before, report)
    self.tokens[member.learner_id] = (
      self.tokens.get(member.learner_id, 0) + new_tokens
    )
    if report.step > 0:
      self.positions[member.learner_id] = report.position
    self._note_copies(now, member, report)
    if self.units.reported(now, report):
      self._changed(member)
    self._step_log.reported(now, member)
    self._advance(now)

  def _note_copies(self, now: float, member: Member, report: Report) -> None:
    member.copies = {
      Version(h.copy.term, h.copy.round): h
      for h in report.copies
      if h.copy.term == self.term and h.copy.incarnation == member.incarnation
    }
    for r in self._open.values():
      header = member.copies.get(r.version)
      if header is not None and self._usable(r, header) and not r.merging:
        r.fresh.setdefault(member.learner_id, now)
    held = {h.copy for h in report.copies}
    member.refused = {
      copy: why for copy, why in member.refused.items() if copy in held
    }
    before, member.wanted = member.wanted, self._wanted(member)
    if any(
      copy in before or copy.round not in self._open for copy in member.wanted
    ):
      # what an open round wants comes unasked; the rest must be asked for
      self._changed(member)

  def _usable(self, r: Round, header: CopyHeader) -> bool:
    """Whether a copy may enter a round: right base, at least one step."""
    return (
      header.copy.fragment == r.fragment
      and header.base == r.base
      and (header.steps >= 1 or not r.counted)
    )

  def contribution(self, now: float, contribution: Contribution) -> str:
    """Takes a transfer; returns "" or the reason why it is refused.

    A repetition of a copy that is here, or already merged, changes nothing:
    were it refused, the learner would drop a copy that `carry` still needs.
    """
    header = contribution.header
    if self._has(contribution.learner_id, header.copy):
      return ""
    reason = self._refusal(contribution)
    if reason:
      self._refuse(contribution, reason)
      return reason
    if header.copy.round == 0:
      self._seeds[header.copy.fragment] = contribution
    else:
      key = (header.copy.round, contribution.learner_id)
      self._received.setdefault(key, contribution)
    self._advance(now)
    return ""

  def _refuse(self, contribution: Contribution, reason: str) -> None:
    """Counts a refusal, and tells the learner to drop the copy."""
    header = contribution.header
    self.refused[reason] = self.refused.get(reason, 0) + 1
    self._events.emit(
      "refused",
      learner=contribution.learner_id,
      round=header.copy.round,
      fragment=header.copy.fragment,
      reason=reason,
      tokens=header.tokens,
    )
    member = self.membership.live.get(contribution.learner_id)
    if member is None or member.incarnation != header.copy.incarnation:
      return
    member.refused[header.copy] = reason
    version = Version(header.copy.term, header.copy.round)
    if reason in checks.FAULTS:
      member.spoilt[header.copy.fragment] = version
    if header.copy.round == 0 and self._seeder == member.learner_id:
      self._note = (
        f"waiting for version 0 from learner {member.learner_id}, whose "
        f"fragment {header.copy.fragment} was refused: {reason}"
      )
    self._changed(member)

  def _has(self, learner_id: int, copy: CopyId) -> bool:
    """Whether exactly that copy has been accepted before."""
    waiting = self._received.get((copy.round, learner_id))
    merged = self._included.get((copy.fragment, learner_id))
    return merged == copy or (
      waiting is not None and waiting.header.copy == copy
    )

  def _refusal(self, contribution: Contribution) -> str:
    copy = contribution.header.copy
    member = self.membership.live.get(contribution.learner_id)
    if member is None or member.incarnation != copy.incarnation:
      return "fenced"
    if copy.term != self.term:
      return "term"
    if self.model is None:
      return "early"
    if copy.round == 0:
      return self._seed_refusal(member, contribution)
    opened = self._open.get(copy.round)
    if opened is None and not self._may_come(copy):
      return "late"
    if opened is not None and opened.merging:
      return "late"
    if opened is not None and opened.fragment != copy.fragment:
      return "fragment"
    if 0 <= copy.fragment < self._exchange.P:
      base = self.model.versions[copy.fragment]
    else:
      return "fragment"
    header = contribution.header
    empty = header.steps < 1 or header.tokens < 1
    if empty and (opened is None or opened.counted):
      return "counters"
    return checks.counters_and_data(contribution, self.manifest, base)

  def _seed_refusal(self, member: Member, contribution: Contribution) -> str:
    if self.phase is not Phase.WAITING or member.learner_id != self._seeder:
      return "late"
    return checks.counters_and_data(contribution, self.manifest, NO_VERSION)

  def _may_come(self, copy: CopyId) -> bool:
    """Whether a copy belongs to a round that will open within a cycle."""
    P = self._exchange.P
    return (
      self.phase is Phase.TRAINING
      and self._next_round <= copy.round < self._next_round + P
      and schedule.fragment_of(copy.round, P) == copy.fragment
      and not self._is_open(copy.fragment)
    )

  def _is_open(self, fragment: int) -> bool:
    return any(r.fragment == fragment for r in self._open.values())

  # --- what learners get -------------------------------------------------

  def fetch(
    self, now: float, learner_id: int, incarnation: int, fragment: int
  ) -> MergedFragment:
    """The newest version of a fragment, for one learner."""
    self.membership.get(learner_id, incarnation)
    included = self._included.get((fragment, learner_id))
    return self._newest(fragment, included)

  def _newest(
    self, fragment: int, included: CopyId | None = None
  ) -> MergedFragment:
    if self.model is None or not 0 <= fragment < self._exchange.P:
      raise Refused("fragment", f"this run has no fragment {fragment}")
    found = self.model.fragments[fragment]
    if found is None:
      raise Refused("early", f"fragment {fragment} has no version yet")
    return MergedFragment(
      fragment=fragment,
      version=found.version,
      arrays=found.published,
      included=included,
      common_step=found.common_step,
      restored=found.restored,
      base=found.base,
    )

  def delta(
    self, fragment: int, held: Version
  ) -> tuple[Version, Payload] | None:
    """What takes a holder of `held` to the newest version, if it is short."""
    found = None if self.model is None else self.model.fragments[fragment]
    if found is None or found.delta is None or found.base != held:
      return None
    return found.version, found.delta

  def published(self, fragment: int, version: Version) -> Arrays | None:
    """A fragment as its holders decoded it; None unless it is the newest."""
    found = None if self.model is None else self.model.fragments[fragment]
    if found is None or found.version != version:
      return None
    return found.published

  def stamp(self, learner_id: int) -> tuple[int, int]:
    """Changes whenever the announcement to that learner may have."""
    member = self.membership.live.get(learner_id)
    return self._common_changes, -1 if member is None else member.changes

  def announcement(self, now: float, learner_id: int) -> Announcement:
    """Everything wanted of one learner, as of now."""
    member = self.membership.live[learner_id]
    member.announced += 1
    floor = self._floor()
    claims, data_ended = self.units.word(learner_id)
    return Announcement(
      term=self.term,
      seq=member.announced,
      phase=self.phase,
      open=tuple(r.announced() for r in self._open.values() if not r.merging),
      next_round=self._next_round,
      next_open_in_s=max(0.0, self._last_opened + (floor or 0.0) - now),
      pace_s=floor or 0.0,
      versions=() if self.model is None else self.model.versions,
      wanted=self._wanted(member),
      refused=tuple(member.refused.items()),
      common_step=self.common_step,
      note=self._note,
      donate=self.donors.asked_of(learner_id),
      claims=None if member.report is None else claims,
      data_ended=data_ended,
      relieved=self.pool.relieved(learner_id),
    )

  @property
  def common_step(self) -> int:
    return schedule.common_step(
      self.rounds_closed, self._exchange.H, self._exchange.P
    )

  def _wanted(self, member: Member) -> tuple[CopyId, ...]:
    if self._seeder == member.learner_id:
      return tuple(
        CopyId(member.incarnation, self.term, 0, p, 0)
        for p in range(self._exchange.P)
        if p not in self._seeds
      )
    wanted: list[CopyId] = []
    for version, header in member.copies.items():
      if (version.round, member.learner_id) in self._received:
        continue
      if header.copy in member.refused or header.steps < 1:
        continue
      r = self._open.get(version.round)
      if r is not None:
        if not r.merging and self._usable(r, header):
          wanted.append(header.copy)
      elif self._may_come(header.copy) and self._current(header):
        wanted.append(header.copy)
    return tuple(wanted)

  def _current(self, header: CopyHeader) -> bool:
    assert self.model is not None
    return header.base == self.model.versions[header.copy.fragment]

  # --- time --------------------------------------------------------------

  def tick(self, now: float) -> None:
    """Does what is due; call it at `wake_at` and whenever convenient."""
    for member in self.membership.lapsed(now):
      self._remove(
        now,
        member,
        "lease",
        f"learner {member.learner_id} ({member.holder}) was silent for "
        f"{self._limits.lease_s} s",
      )
    self._advance(now)

  def wake_at(self, now: float) -> float:
    """When `tick` has something to do next, infinity for never."""
    times = [m.lease_until for m in self.membership.members()]
    times += [
      m.joined_at + self._limits.restart_s
      for m in self.membership.members()
      if not m.stepped
    ]
    times += [*self._owed.values(), *self._away.values()]
    if self.phase is Phase.WAITING and self._started_at is not None:
      times.append(self._started_at + self._limits.start_s)
    if self.phase is Phase.TRAINING:
      times.append(self._opens_at())
    times += [self._drain_by, self._ends_by]
    times += [self.donors.wake_at(), self.pool.wake_at()]
    for r in self._open.values():
      if r.merging:
        continue
      decision = self._decide(r)
      times += [float(decision.close_at), r.opened + self._budget_s()]
    later = [t for t in times if t > now]
    return min(later, default=math.inf)

  def _advance(self, now: float) -> None:
    if self.handed_over:
      return
    self.donors.tick(now)
    self.pool.tick(now)
    self._start(now)
    self._close(now)
    self._open_rounds(now)
    self._end(now)

  def _changed(self, member: Member | None = None) -> None:
    """Announcements may have changed: one learner's, or everybody's."""
    self.generation += 1
    if member is None:
      self._common_changes += 1
    else:
      member.changes += 1

  def _pool_changed(self) -> None:
    """What standbys are told may have changed; learners hear nothing new."""
    self.generation += 1

  def _relief_changed(self, learner_id: int) -> None:
    """A learner is told to stop for a standby, or no longer is."""
    member = self.membership.live.get(learner_id)
    if member is not None:
      self._changed(member)

  # --- start -------------------------------------------------------------

  def _start(self, now: float) -> None:
    """WAITING: choose a seeder, commit version 0, begin."""
    if self.phase is not Phase.WAITING or self.model is None:
      return
    if self.has_history:
      self._enter(Phase.TRAINING, f"continuing at round {self._next_round}")
      return
    live = self.membership.members()
    assert self._started_at is not None
    overdue = now >= self._started_at + self._limits.start_s
    if len(live) < self._plan.learners and not overdue:
      missing = sorted(
        set(range(self._plan.learners)) - set(self.membership.live)
      )
      self._note = "waiting for learners " + ", ".join(map(str, missing))
      return
    if not live:
      return
    if self._seeder is None:
      self._seeder = self._choose_seeder(live)
      if self._seeder is None:
        self._note = "waiting for what the learners hold"
        return
      self._note = f"waiting for version 0 from learner {self._seeder}"
      self._changed()
    if len(self._seeds) < self._exchange.P:
      return
    for p, seed in self._seeds.items():
      # what another syncer merged before must not be carried on
      self.model.start(
        p, Version(self.term, 0), seed.arrays, 0, restored=self.term > 1
      )
    self._seeds, self._seeder = {}, None
    self.has_history = True
    self._enter(Phase.TRAINING, "every fragment has version 0")

  def _choose_seeder(self, live: list[Member]) -> int | None:
    """The lowest live id; after another syncer's death of those with history.

    That one may have died before it saved anything: its learners still hold
    the run, and fresh parameters must never win over theirs.

    Returns:
      None while it has yet to be heard what they hold.
    """
    if self.term > 1:
      if any(m.report is None for m in live):
        return None
      live = [m for m in live if self._ready(m)] or live
    return live[0].learner_id

  def _enter(self, phase: Phase, why: str) -> None:
    self.phase = phase
    self._note = ""
    self.units.flush()
    self._events.emit("phase", phase=str(phase), why=why)
    self._changed()

  # --- rounds ------------------------------------------------------------

  def _training(self) -> list[Member]:
    """Live learners that have finished a step since joining.

    Or that came back with steps nobody has merged: where all have paused for
    want of a syncer, nobody would ever finish another step.
    """
    return [m for m in self.membership.members() if m.stepped or m.has_work]

  def _floor(self) -> float | None:
    """Length of a round at the pace of the median live learner."""
    steps = tuple(m.step_s for m in self.membership.members())
    if steps != self._floor_of[0]:
      floor = schedule.round_floor_s(
        np.array(steps, np.float64),
        np.ones(len(steps), bool),
        self._exchange.H,
        self._exchange.P,
      )
      self._floor_of = (steps, floor)
    return self._floor_of[1]

  def _opens_at(self) -> float:
    return self._last_opened + (self._floor() or 0.0)

  def _open_rounds(self, now: float) -> None:
    """Opens the rounds that are due (design 4.1)."""
    if self.phase is not Phase.TRAINING or self.drain_why or self._leaving:
      return
    assert self.model is not None
    policy = self._exchange
    limit = schedule.max_open(policy.tau, policy.P, policy.H)
    while len(self._open) < limit and now >= self._opens_at():
      fragment = schedule.fragment_of(self._next_round, policy.P)
      if self._target_reached() or self._is_open(fragment):
        return
      if not any(self._ready(m) for m in self.membership.members()):
        return
      self._open_round(now, fragment, counted=True)

  def _open_round(self, now: float, fragment: int, counted: bool) -> None:
    assert self.model is not None
    version = Version(self.term, self._next_round)
    self._open[version.round] = Round(
      version=version,
      fragment=fragment,
      base=self.model.versions[fragment],
      opened=now,
      counted=counted,
    )
    self._step_log.opened(now, version)
    self._next_round += 1
    self._last_opened = now
    self._changed()

  def _ready(self, member: Member) -> bool:
    """Whether a learner holds some version of every fragment."""
    return member.report is not None and all(
      v != NO_VERSION for v in member.report.versions
    )

  def _target_reached(self) -> bool:
    """Whether the rounds asked for are all open or closed."""
    plan = self._plan
    if plan.rounds and self._next_round > plan.rounds:
      return True
    return bool(plan.tokens) and sum(self.tokens.values()) >= plan.tokens

  def _estimates(self) -> grace.Estimates:
    floor = self._floor()
    if floor is None:
      return grace.Estimates(math.nan, self.sync_s, math.nan)
    step_s = floor * self._exchange.P / self._exchange.H
    return grace.Estimates(step_s, self.sync_s, floor)

  def _budget_s(self) -> float:
    """Length of the overlap budget; the transfer limit while unknown."""
    policy, floor = self._exchange, self._floor()
    if floor is None or policy.tau == 0:
      return self._limits.transfer_s
    return policy.tau * floor * policy.P / policy.H

  def _decide(self, r: Round) -> quorum.Decision:
    """When a round closes, computed anew only if something has changed."""
    members = self._training()
    estimates = self._estimates()
    fresh = tuple(r.fresh.get(m.learner_id, math.inf) for m in members)
    basis = (fresh, estimates)
    if r.decided is None or r.decided[0] != basis:
      decision = quorum.close_time(
        r.opened,
        np.array(fresh, np.float64),
        np.ones(len(members), bool),
        estimates,
        self._exchange,
      )
      r.decided = (basis, decision)
    return r.decided[1]

  def _close(self, now: float) -> None:
    for r in list(self._open.values()):
      if r.merging or (self._leaving and not self.drain_why):
        continue
      if r.counted:
        self._close_round(now, r)
      else:
        self._close_drain_round(now, r)

  def _close_round(self, now: float, r: Round) -> None:
    members = self._training()
    if not members:
      return
    decision = self._decide(r)
    received = self._contributions(r)
    expected = [
      (header := m.copies.get(r.version)) is not None
      and header.copy not in m.refused
      and self._usable(r, header)
      for m in members
    ]
    merge = quorum.may_merge(
      now,
      r.opened,
      decision,
      np.array(expected, bool),
      np.array([m.learner_id in received for m in members], bool),
      self._budget_s(),
      self._exchange.quorum,
    )
    if bool(merge) and received:
      self._hand_out(now, r, decision, members, received)

  def _contributions(self, r: Round) -> dict[int, Contribution]:
    return {
      learner_id: c
      for (number, learner_id), c in sorted(self._received.items())
      if number == r.version.round and c.header.base == r.base
    }

  def _hand_out(
    self,
    now: float,
    r: Round,
    decision: quorum.Decision,
    members: list[Member],
    received: dict[int, Contribution],
  ) -> None:
    assert self.model is not None
    contributions = tuple(received[i] for i in sorted(received))
    token_weights = weights.token_weights(
      np.array([c.header.tokens for c in contributions], np.float64),
      np.array([c.header.steps for c in contributions], np.float64),
    )
    r.merging = True
    for c in contributions:
      # already here: its learner may die before the merge is done
      if self.accounts is not None:
        self.accounts.merged(
          self.membership.live[c.learner_id],
          r.fragment,
          r.version,
          c.header.total_tokens,
        )
    closed = self.rounds_closed + (1 if r.counted else 0)
    self._jobs.append(
      MergeJob(
        model=self.model,
        round=r,
        contributions=contributions,
        weights=tuple(float(w) for w in token_weights),
        rate_scale=outer.presence(
          max(1, len(contributions)),
          max(1, self.fullest),
          self._outer.presence_exponent,
        ),
        common_step=schedule.common_step(
          closed, self._exchange.H, self._exchange.P
        ),
        decision=decision,
        alive=tuple(m.learner_id for m in members),
        closed_at=now,
      )
    )

  def next_merge(self) -> MergeJob | None:
    """The next merge to run, or None; hand it back through `merged`."""
    return self._jobs.pop(0) if self._jobs else None

  def merged(self, now: float, job: MergeJob) -> None:
    """Commits a finished job: the fragment has a new version."""
    assert self.model is not None
    assert job.result is not None
    r = job.round
    if self._tape is not None:
      self._tape.record(job)
    self.model.commit(r.fragment, job.result)
    del self._open[r.version.round]
    if r.counted:
      self.rounds_closed += 1
      self.sync_s = float(
        grace.ema(self.sync_s, now - job.closed_at, self._exchange.ema)
      )
    self._included = {
      key: copy for key, copy in self._included.items() if key[0] != r.fragment
    }
    for c in job.contributions:
      self._included[(r.fragment, c.learner_id)] = c.header.copy
    for c in job.spoilt:
      self._refuse(c, "overflow")
      if self.accounts is not None:
        self.accounts.not_merged(
          self.membership.live.get(c.learner_id), r.fragment, r.version
        )
    self._received = {
      key: c
      for key, c in self._received.items()
      if c.header.copy.fragment != r.fragment
    }
    self._log_round(now, job)
    self._advance(now)
    self._changed()

  def _t(self, time_s: float) -> float:
    """A time of the syncer's clock as seconds from the job's start."""
    return round(time_s - self._job_started_at, 6)

  def _log_round(self, now: float, job: MergeJob) -> None:
    r, who = job.round, [c.learner_id for c in job.contributions]
    self._events.emit(
      "round",
      term=r.version.term,
      round=r.version.round,
      fragment=r.fragment,
      opened=self._t(r.opened),
      quorum_at=self._t(float(job.decision.quorum_at)),
      closed=self._t(job.closed_at),
      merged=self._t(now),
      participants=who,
      alive=list(job.alive),
      grace_s=float(job.decision.grace_s),
      weights=dict(zip(map(str, who), job.weights, strict=True)),
      tokens={str(c.learner_id): c.header.tokens for c in job.contributions},
      steps={str(c.learner_id): c.header.steps for c in job.contributions},
      share=self.manifest.shares()[r.fragment],
      counted=r.counted,
      why=quorum.explain(job.decision) if r.counted else "drain",
    )

  # --- end ---------------------------------------------------------------

  def drain(self, now: float, why: str, limit_s: float = math.inf) -> None:
    """Ends the run: open rounds finish, then everything merges once more.

    Args:
      now: the time.
      why: for the log; the first reason counts.
      limit_s: for all of it; also shortens a drain that is under way.
    """
    if self.handed_over:
      return  # its successor has to be asked
    self._drain_s = min(self._drain_s, limit_s / 3)
    self._drain_by = min(self._drain_by, now + self._drain_s)
    if self.phase is Phase.DRAINING:
      self._ends_by = min(self._ends_by, now + 2 * self._drain_s)
    if self.drain_why:
      return
    self.drain_why = why
    self.pool.close()
    self._advance(now)
    self._changed()

  def hand_over(self, now: float, limit_s: float = math.inf) -> None:
    """Stops merging, so that a successor can go on from here.

    Merges under way are committed, since learners may have been told that
    their copies are in; no round is opened or closed any more. A run that is
    at its end is brought to it instead: its learners wait for nothing else.

    Args:
      now: the time.
      limit_s: for a drain, as in `drain`.
    """
    if self.drain_why or (self._target_reached() and not self._open):
      self.drain(now, _DONE, limit_s)
      return
    self._leaving = True
    self._drain_s = min(self._drain_s, limit_s / 3)  # should one begin yet
    self._advance(now)

  def _end(self, now: float) -> None:
    if self.phase is Phase.TRAINING:
      done = self._target_reached() and not self._open
      if done and (self._leaving or not self._owes(now)):
        self.drain(now, _DONE)
      out_of_data = self.units.ledger.finished
      if out_of_data:  # nobody steps any more: no open round is waited for
        self.drain(now, "the data is at its end")
      over = out_of_data or not self.membership.live or not self._open
      over = over or now >= self._drain_by
      if self.drain_why and over and self.phase is Phase.TRAINING:
        self._begin_drain(now)
    elif self.phase is Phase.WAITING and self.drain_why:
      self._enter(Phase.ENDED, self.drain_why)
    elif self.phase is Phase.DRAINING and not self._open:
      members = self.membership.members()
      assert self.model is not None
      versions = self.model.versions
      behind = [
        m.learner_id
        for m in members
        if m.report is None or m.report.versions != versions
      ]
      behind += sorted(i for i, until in self._away.items() if until > now)
      self._note = "waiting for learners " + ", ".join(map(str, behind))
      if not behind or now >= self._ends_by:
        self._enter(Phase.ENDED, self.drain_why)
        self._drain_by = self._ends_by = math.inf
    merging = any(r.merging for r in self._open.values())
    self.handed_over = self._leaving and not self.drain_why and not merging

  def _owes(self, now: float) -> bool:
    """Whether a restarting learner is still waited for before the end."""
    owed = [limit for limit in self._owed.values() if limit > now]
    joining = [
      m
      for m in self.membership.members()
      if not m.stepped
      and m.incarnation > 1
      and now < m.joined_at + self._limits.restart_s
    ]
    return bool(owed or joining or self.pool.owes(now))

  def _begin_drain(self, now: float) -> None:
    """Opens one uncounted round per fragment; learners stop stepping."""
    for number in [n for n, r in self._open.items() if not r.merging]:
      del self._open[number]  # the limit passed: its quorum never came
    if self._open:
      return  # a merge is running; `merged` comes back here
    self._received.clear()
    # Copies extracted ahead carry the next numbers, but not the last steps.
    self._next_round += self._exchange.P
    faults.reached("syncer.draining")
    self._enter(Phase.DRAINING, self.drain_why)
    self._drain_by = now + self._drain_s
    self._ends_by = now + 2 * self._drain_s
    for _ in range(self._exchange.P):
      fragment = schedule.fragment_of(self._next_round, self._exchange.P)
      self._open_round(now, fragment, counted=False)
    self._close(now)

  def _close_drain_round(self, now: float, r: Round) -> None:
    """Readiness is the acknowledgement; possibly nobody is left (4.8)."""
    members = self._training()
    received = self._contributions(r)
    if now < self._drain_by:
      if any(until > now for until in self._away.values()):
        return
      for m in members:
        header = m.copies.get(r.version)
        if not m.drained or header is None:
          return
        idle = header.steps < 1 or header.copy in m.refused
        if not idle and m.learner_id not in received:
          return
    decision = self._decide(r)
    self._hand_out(now, r, decision, members, received)

  @property
  def ended(self) -> bool:
    """Whether the run has ended."""
    return self.phase is Phase.ENDED


class TapeLike(Protocol):
  """What `Rounds` asks of a recorder (see `syncer.tape`)."""

  def record(self, job: MergeJob) -> None: ...


def _describe(spec: TensorSpec) -> str:
  stacked = " stacked" if spec.stacked else ""
  shape = ",".join(map(str, spec.shape))
  return f"{spec.name} {spec.dtype}[{shape}] {spec.role}{stacked}"
