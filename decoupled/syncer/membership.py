"""Who is in the run: claims, leases, incarnations and running step times."""

import dataclasses
import itertools
import math
from collections.abc import Collection

from decoupled.errors import Refused
from decoupled.types import (
  NO_VERSION,
  CopyHeader,
  CopyId,
  Hello,
  Report,
  Stage,
  Version,
)

_TIMED_STEPS = 2  # design 4.1: no estimate before two timed steps
_MAX_GROWTH = 2.0  # one stall must not multiply the running step time


@dataclasses.dataclass
class Member:
  """A live learner, as the syncer knows it.

  Attributes:
    learner_id: who.
    incarnation: its fencing number.
    holder: `host:pid`, for messages.
    hosts: number of hosts.
    lease_until: when silence ends the claim.
    joined_at: when it joined.
    gives_state: whether it can give its optimizer state to a joiner.
    report: its newest report.
    stepped: whether it has finished a step since joining.
    step_s: running step time, NaN before two timed steps.
    copies: host copies it reported, by (term, round).
    refused: copies it must drop, with the reason.
    accounted: per fragment, tokens that are merged or counted as discarded.
    merged: per fragment, total tokens of the copies merged into versions that
      it has not been seen to adopt yet.
    spoilt: per fragment, the version that a faulty copy was meant for.
    clock_offset_s: syncer's clock minus the learner's, the least seen.
    announced: announcements made to it.
    changes: rises when what is wanted of it changes.
    wanted: copies wanted when it last reported.
    previous: incarnation that the same process had before, 0 if none.
  """

  learner_id: int
  incarnation: int
  holder: str
  hosts: int
  lease_until: float
  joined_at: float
  gives_state: bool = False
  report: Report | None = None
  stepped: bool = False
  step_s: float = math.nan
  copies: dict[Version, CopyHeader] = dataclasses.field(default_factory=dict)
  refused: dict[CopyId, str] = dataclasses.field(default_factory=dict)
  accounted: dict[int, int] = dataclasses.field(default_factory=dict)
  merged: dict[int, dict[Version, int]] = dataclasses.field(
    default_factory=dict
  )
  spoilt: dict[int, Version] = dataclasses.field(default_factory=dict)
  clock_offset_s: float = math.inf
  announced: int = 0
  changes: int = 0
  wanted: tuple[CopyId, ...] = ()
  previous: int = 0
  _timed: int = 0
  _timed_from: tuple[float, int] | None = None

  def holds(self, fragment: int) -> Version:
    if self.report is None:
      return NO_VERSION
    return self.report.versions[fragment]

  @property
  def heard(self) -> bool:
    """Whether it has said anything since it was let in."""
    return math.isfinite(self.clock_offset_s)

  @property
  def has_work(self) -> bool:
    """Whether a copy with steps in it exists."""
    return any(header.steps >= 1 for header in self.copies.values())

  @property
  def drained(self) -> bool:
    return self.report is not None and self.report.stage is Stage.DRAINED

  def time_step(self, now: float, step: int, ema: float) -> None:
    """Folds the arrival of a report of `step` into the running step time."""
    if self._timed_from is None or step < self._timed_from[1]:
      self._timed_from = (now, step)
      return
    since, before = self._timed_from
    if step == before:
      return
    sample = (now - since) / (step - before)
    self._timed_from = (now, step)
    self._timed += step - before
    if self._timed < _TIMED_STEPS:
      return
    if math.isnan(self.step_s):
      self.step_s = sample
    else:
      sample = min(sample, _MAX_GROWTH * self.step_s)
      self.step_s += ema * (sample - self.step_s)


class Membership:
  """Claims of learner ids; a claim lives as long as its lease."""

  def __init__(self, lease_s: float, incarnations: dict[int, int]):
    self._lease_s = lease_s
    self.incarnations = dict(incarnations)
    self.live: dict[int, Member] = {}

  def returning(self, hello: Hello) -> Member | None:
    """The member that claims its own id again, its connection being lost.

    Or the answer to its claim: then it does not know its incarnation, but
    nobody has ever spoken under that one.
    """
    holder = self.live.get(hello.learner_id)
    if holder is None or holder.holder != hello.holder:
      return None
    known = holder.incarnation == hello.previous
    unheard = not holder.heard and hello.previous < holder.incarnation
    return holder if known or unheard else None

  def claim(
    self, now: float, hello: Hello, reserved: Collection[int] = ()
  ) -> Member:
    """Grants an id; raises Refused naming the holder of a taken one.

    Args:
      now: the time.
      hello: the claim; -1 takes the lowest id that is free.
      reserved: ids that are not free, since their holders are being restarted.
    """
    learner_id = hello.learner_id
    if learner_id < 0:
      taken = {*self.live, *reserved}
      learner_id = next(i for i in itertools.count() if i not in taken)
    holder = self.live.get(learner_id)
    if holder is not None and self.returning(hello) is None:
      raise Refused(
        "claimed",
        f"learner id {learner_id} is held by {holder.holder} (incarnation "
        f"{holder.incarnation}, lease ends in "
        f"{max(0.0, holder.lease_until - now):.1f} s); {hello.holder} must "
        "take another --learner_id or wait",
      )
    incarnation = max(self.incarnations.get(learner_id, 0), hello.previous) + 1
    self.incarnations[learner_id] = incarnation
    member = Member(
      learner_id=learner_id,
      incarnation=incarnation,
      holder=hello.holder,
      hosts=hello.hosts,
      lease_until=now + self._lease_s,
      joined_at=now,
      gives_state=hello.gives_state,
      previous=hello.previous,
    )
    self.live[learner_id] = member
    return member

  def get(self, learner_id: int, incarnation: int) -> Member:
    """The live member of that incarnation; raises Refused('fenced')."""
    member = self.live.get(learner_id)
    if member is None or member.incarnation != incarnation:
      current = "nobody" if member is None else f"{member.incarnation}"
      raise Refused(
        "fenced",
        f"learner {learner_id} speaks as incarnation {incarnation}, the run "
        f"knows {current}: join again",
      )
    return member

  def renew(self, now: float, member: Member) -> None:
    member.lease_until = now + self._lease_s

  def remove(self, learner_id: int) -> None:
    self.live.pop(learner_id, None)

  def lapsed(self, now: float) -> list[Member]:
    return [m for m in self.members() if m.lease_until <= now]

  def members(self) -> list[Member]:
    """Live members in the order of their ids."""
    return [self.live[i] for i in sorted(self.live)]
