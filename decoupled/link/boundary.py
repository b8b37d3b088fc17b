"""What a learner does between two inner steps; owned by the loop's thread.

Order matters (design 4.2): adopt what has arrived, then extract what is
wanted, so that an extraction is always based on the newest version held, and
both before the next step donates the parameters. Nothing here waits: what the
background threads have for the boundary lies in deques, and what it has for
them goes out through `landing` and `progress`.
"""

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax

from decoupled import faults
from decoupled.algorithm import adoption, schedule
from decoupled.algorithm.policy import Exchange
from decoupled.clock import Clock
from decoupled.link.agreement import Agreed, Agreement, Bits
from decoupled.link.copies import HostCopy
from decoupled.link.ops import DeviceArrays, FragmentOps
from decoupled.types import (
  NO_VERSION,
  Announcement,
  CopyHeader,
  CopyId,
  Phase,
  Stage,
  Version,
)

_STEP_EMA = 0.2
_STEP_ENDS_HELD = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class Extraction:
  """A fragment on its way to the host."""

  header: CopyHeader
  device: DeviceArrays
  step: int
  tokens: int


@dataclasses.dataclass(frozen=True, eq=False)
class Staged:
  """A merged fragment that lies on the devices, ready for adoption.

  Attributes:
    fragment: which.
    version: its version.
    base: the version it replaced.
    merged: float32 units next to their leaves.
    included: this learner's copy that the merge used, if any.
    own_base: the units of `base`, where `carry` needs them.
    common_step: the run's schedule step at this version.
    restored: adopt by overwriting.
  """

  fragment: int
  version: Version
  base: Version
  merged: DeviceArrays
  included: HostCopy | None
  own_base: DeviceArrays | None
  common_step: int
  restored: bool


class Session(NamedTuple):
  """What one accepted claim gave."""

  incarnation: int
  term: int


@dataclasses.dataclass(frozen=True)
class Resumed:
  """Where a learner's hosts go on from a copy of their state.

  Attributes:
    step: inner steps.
    tokens: tokens trained on.
    held: per fragment the version that the parameters hold.
    step_at: per fragment the step at which it was adopted.
    tokens_at: likewise.
    common_step: of the learning-rate schedule.
  """

  step: int
  tokens: int
  held: tuple[Version, ...]
  step_at: tuple[int, ...]
  tokens_at: tuple[int, ...]
  common_step: int


class Progress(NamedTuple):
  """What a report says about the loop; replaced as a whole.

  `incarnation` is the one whose counters these are: they may speak for no
  other, however soon the connection is back. `tokens_before` are those of this
  process before that incarnation.
  """

  incarnation: int
  step: int
  tokens: int
  versions: tuple[Version, ...]
  schedule_step: int
  position: tuple[int, int]
  stage: Stage
  tokens_before: int
  loss: float


class Boundary:
  """Counters, versions held, and the two device operations.

  Args:
    policy: the contract's exchange.
    ops: device operations on the parameter tree.
    agreement: how the hosts of this learner agree.
    clock: for the running step time.
    landing: takes each extraction; must not block.
  """

  def __init__(
    self,
    policy: Exchange,
    ops: FragmentOps,
    agreement: Agreement,
    clock: Clock,
    landing: Callable[[Extraction], None],
  ):
    self._policy = policy
    self._ops = ops
    self._agreement = agreement
    self._clock = clock
    self._landing = landing
    P = policy.P
    self.held: list[Version] = [NO_VERSION] * P
    self.common_step = 0
    self.announcement: Announcement | None = None
    self.announced_at = 0.0
    self.arrived: collections.deque[Staged] = collections.deque()
    self.refusals: collections.deque[CopyId] = collections.deque()
    self.step_ends: collections.deque[float] = collections.deque(
      maxlen=_STEP_ENDS_HELD
    )
    self.session: Session | None = None
    self.over = False
    self._sessions: dict[int, Session] = {}
    self.step_s = math.nan
    self.unsynced_since = 0
    self._session: Session | None = None
    self._session_tokens = 0
    self._session_step = 0
    self._staged: list[dict[Version, Staged]] = [{} for _ in range(P)]
    self._step_at = [0] * P
    self._tokens_at = [0] * P
    self._extracted: dict[Version, CopyId] = {}
    self._attempts: dict[Version, int] = {}
    self._last: tuple[float, int] | None = None
    self._old: set[int] = set()  # fragments of a timeline that broke off

  def resume(self, at: Resumed) -> None:
    """Goes on from a copy; the first adoption of each fragment overwrites."""
    self.held = list(at.held)
    self.common_step, self.unsynced_since = at.common_step, at.step
    self._step_at, self._tokens_at = list(at.step_at), list(at.tokens_at)
    self._old = set(range(len(at.held)))

  def resumable(self, step: int, tokens: int) -> Resumed:
    """What belongs to a copy of the parameters at this boundary."""
    return Resumed(
      step,
      tokens,
      tuple(self.held),
      tuple(self._step_at),
      tuple(self._tokens_at),
      self.common_step,
    )

  def visit(self, leaves: list[jax.Array], step: int, tokens: int) -> Agreed:
    """Adopts, then extracts; changes `leaves` in place.

    Args:
      leaves: the parameter tree's leaves after inner step `step`.
      step: inner steps so far.
      tokens: tokens so far.

    Returns:
      What the hosts agreed on.
    """
    self._rejoin(step, tokens)
    self._time(step)
    while self.arrived:
      staged = self.arrived.popleft()
      self._staged[staged.fragment][staged.version] = staged
    while self.refusals:
      self._refused(self.refusals.popleft())
    announcement = self.announcement
    bits = self._bits(announcement, self._due(announcement, step))
    agreed = self._agreement.exchange(bits)
    for p, version in enumerate(agreed.adopt):
      if version > self.held[p]:
        staged = self._staged[p][version]
        self._adopt(leaves, staged, agreed.carries[p], step, tokens)
    self._prune()
    for p, version in enumerate(agreed.extract):
      asked = agreed.held[p], agreed.attempts[p]
      if version == NO_VERSION or agreed.incarnation != self._incarnation:
        continue
      if asked == (self.held[p], self._attempts.get(_key(p, version), 0)):
        self._extract(leaves, p, version, step, tokens)
    return agreed

  def progress(
    self,
    step: int,
    tokens: int,
    schedule_step: int,
    position: tuple[int, int],
    stage: Stage,
    loss: float,
  ) -> Progress:
    """What a report may say now; counted from the start of the session."""
    return Progress(
      0 if self._session is None else self._session.incarnation,
      step - self._session_step,
      tokens - self._session_tokens,
      tuple(self.held),
      schedule_step,
      position,
      stage,
      self._session_tokens,
      loss,
    )

  @property
  def complete(self) -> bool:
    """Whether some version of every fragment has been adopted."""
    return all(v != NO_VERSION for v in self.held)

  @property
  def current(self) -> bool:
    """Whether the newest announced version of every fragment is held."""
    a = self.announcement
    return a is not None and a.versions == tuple(self.held)

  @property
  def pending(self) -> bool:
    """Whether some extraction's round has not come back yet."""
    return any(
      version > self.held[copy.fragment]
      for version, copy in self._extracted.items()
    )

  # --- pieces, in the order of `visit` ------------------------------------

  @property
  def _incarnation(self) -> int:
    """The one under which every host of this learner acts; 0: none yet."""
    return 0 if self._session is None else self._session.incarnation

  def _rejoin(self, step: int, tokens: int) -> None:
    """A new incarnation, once every host has joined as it.

    Earlier copies are void, counters go on.
    """
    session = self.session
    if session is None:
      return
    self._sessions[session.incarnation] = session
    joined = self._agreement.joined(session.incarnation)
    if joined in (0, self._incarnation) or joined not in self._sessions:
      return
    self._session = self._sessions[joined]
    self._sessions = {i: s for i, s in self._sessions.items() if i >= joined}
    self._session_step, self._session_tokens = step, tokens
    self._extracted.clear()
    self._attempts.clear()

  def _time(self, step: int) -> None:
    now = self._clock.now()
    if self._last is not None and step > self._last[1]:
      sample = (now - self._last[0]) / (step - self._last[1])
      self.step_ends.append(now)
      if math.isnan(self.step_s):
        self.step_s = sample
      else:
        self.step_s += _STEP_EMA * (sample - self.step_s)
    if self._last is None or step > self._last[1]:
      self._last = (now, step)

  def _refused(self, copy: CopyId) -> None:
    version = _key(copy.fragment, Version(copy.term, copy.round))
    if self._extracted.get(version) == copy:
      del self._extracted[version]

  def _due(
    self, announcement: Announcement | None, step: int
  ) -> dict[int, Version]:
    """Per fragment the round to extract for: open ones, and those ahead.

    Round 0 hands the parameters themselves over: at the start, or to a syncer
    whose predecessor died before it had saved anything.
    """
    if announcement is None or self._session is None:
      return {}
    seeds = {
      copy.fragment: Version(copy.term, 0)
      for copy in announcement.wanted
      if copy.round == 0
      and copy.incarnation == self._incarnation
      and _key(copy.fragment, Version(copy.term, 0)) not in self._extracted
    }
    draining = announcement.phase is Phase.DRAINING
    rounds = [(r.version, r.fragment, r.base) for r in announcement.open]
    rounds += self._ahead(announcement)
    return seeds | {
      p: version
      for version, p, base in rounds
      if version not in self._extracted
      and self.held[p] == base
      and (draining or step > self._step_at[p])
    }

  def _ahead(
    self, announcement: Announcement
  ) -> list[tuple[Version, int, Version]]:
    """Rounds that open before this (slow) learner's next boundary."""
    if announcement.phase is not Phase.TRAINING or not self._policy.tau:
      return []  # in lock-step a learner would wait for whatever is ahead
    busy = {r.fragment for r in announcement.open}
    waited = self._clock.now() - self.announced_at
    count = schedule.rounds_ahead(
      self.step_s,
      announcement.pace_s,
      announcement.next_open_in_s - waited,
      self._policy.P - len(busy),
    )
    ahead = []
    for number in range(
      announcement.next_round, announcement.next_round + count
    ):
      p = schedule.fragment_of(number, self._policy.P)
      base = announcement.versions[p]
      # its last round may be merging: neither open any more nor written yet
      if p not in busy and base.round >= number - self._policy.P:
        ahead.append((Version(announcement.term, number), p, base))
    return ahead

  def _bits(
    self, announcement: Announcement | None, due: dict[int, Version]
  ) -> Bits:
    P = self._policy.P
    return Bits(
      staged=tuple(max(self._staged[p], default=NO_VERSION) for p in range(P)),
      announced=tuple(due.get(p, NO_VERSION) for p in range(P)),
      stop=self.over
      or (
        announcement is not None
        and announcement.phase in (Phase.DRAINING, Phase.ENDED)
      ),
      held=tuple(self.held),
      attempts=tuple(
        self._attempts.get(_key(p, due[p]), 0) if p in due else 0
        for p in range(P)
      ),
      carries=tuple(
        self._carries(staged[max(staged)]) if staged else False
        for staged in self._staged
      ),
      incarnation=0 if self.session is None else self.session.incarnation,
    )

  def _carries(self, staged: Staged) -> bool:
    """Whether what `carry` subtracts is here."""
    return staged.included is not None or staged.own_base is not None

  def _adopt(
    self,
    leaves: list[jax.Array],
    staged: Staged,
    carries: bool,
    step: int,
    tokens: int,
  ) -> None:
    p = staged.fragment
    rule = adoption.adoption_rule(
      self._policy.adoption,
      self.held[p],
      staged.base,
      staged.restored or self.held[p] == NO_VERSION or p in self._old,
    )
    self._old.discard(p)
    reference = staged.merged
    included = None
    if rule == "carry" and not carries:
      rule = "overwrite"
    elif rule == "carry":
      if staged.included is not None:
        reference = staged.included.device
        included = (
          staged.included.step - self._step_at[p],
          staged.included.tokens - self._tokens_at[p],
        )
      elif staged.own_base is not None:
        reference = staged.own_base
    self._ops.adopt(
      p, leaves, rule, self._policy.blend, staged.merged, reference
    )
    faults.reached("link.adopting")
    left_steps, left_tokens = adoption.counters_after(
      rule, step - self._step_at[p], tokens - self._tokens_at[p], included
    )
    self._step_at[p] = step - left_steps
    self._tokens_at[p] = tokens - left_tokens
    self.held[p] = staged.version
    self._forget_stale(p, staged.version)
    self.unsynced_since = step
    self.common_step = max(self.common_step, staged.common_step)

  def _forget_stale(self, fragment: int, held: Version) -> None:
    """Copies extracted ahead of the adopted version have lost their base.

    A round that is being merged is not announced as open, so its fragment may
    already have been extracted for the round after it; it is extracted anew.
    """
    for version, copy in list(self._extracted.items()):
      if copy.fragment == fragment and copy.round > 0 and version > held:
        del self._extracted[version]

  def _prune(self) -> None:
    """Keeps staged versions that are newer, or fed and not yet answered."""
    fed = [bits.staged for bits in self._agreement.pinned()]
    for p, staged in enumerate(self._staged):
      pinned = {versions[p] for versions in fed}
      newest = max(staged, default=NO_VERSION)
      self._staged[p] = {
        version: s
        for version, s in staged.items()
        if version > self.held[p] and (version == newest or version in pinned)
      }

  def _extract(
    self,
    leaves: list[jax.Array],
    p: int,
    version: Version,
    step: int,
    tokens: int,
  ) -> None:
    key = _key(p, version)
    attempt = self._attempts.get(key, 0)
    self._attempts[key] = attempt + 1
    if version.round == 0:
      attempt = 0  # the syncer names it so
    copy = CopyId(self._incarnation, version.term, version.round, p, attempt)
    self._extracted[key] = copy
    units = self._ops.extract(p, leaves)
    if version.round == 0:
      header = CopyHeader(copy, NO_VERSION, steps=0, tokens=0, total_tokens=0)
      self._landing(Extraction(header, units, step=0, tokens=0))
      return
    self._forget_extractions(version)
    header = CopyHeader(
      copy=copy,
      base=self.held[p],
      steps=step - self._step_at[p],
      tokens=tokens - self._tokens_at[p],
      total_tokens=tokens - self._session_tokens,
    )
    faults.reached("link.extracting")
    self._landing(Extraction(header, units, step, tokens))

  def _forget_extractions(self, newest: Version) -> None:
    """Keeps the memory of past extractions within two cycles."""
    oldest = newest.round - 2 * self._policy.P
    for known in (self._extracted, self._attempts):
      for version in [v for v in known if 0 <= v.round < oldest]:
        del known[version]


def _key(fragment: int, version: Version) -> Version:
  """Round 0 seeds every fragment: one key for each, apart from the rounds."""
  return version if version.round else Version(version.term, -1 - fragment)
