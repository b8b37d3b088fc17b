"""Which learner gives a joiner its optimizer state; no network, no threads.

A joiner asks, a donor is chosen and asked through its announcement, and the
service relays what it sends (`syncer.relay`). A donor that goes, or stops
moving, ends that donation; the joiner asks again and gets another one. Each
donor is chosen once for one incarnation of a joiner, whatever came of it, so
that asking ends; then the joiner goes on with what it has saved.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable

from decoupled.errors import Refused
from decoupled.syncer.membership import Member, Membership
from decoupled.syncer.settings import Limits
from decoupled.types import EventSink, Stage

NOBODY = -1
_STALLED_LEASES = 2  # a donor that lives moves a chunk within so many leases


@dataclasses.dataclass(eq=False)
class Donation:
  """One donor's gift to one joiner, from asking to its end.

  Attributes:
    request: its number; rises, from 1.
    joiner: who asked.
    incarnation: of the joiner.
    asked_at: when.
    donor: who was chosen, NOBODY while those that could are busy.
    due: when the donor must have moved, or have been found.
    size: bytes that have come.
    over: None under way, "" once all was passed on, else why it failed.
    told: called when it is over.
  """

  request: int
  joiner: int
  incarnation: int
  asked_at: float
  due: float
  donor: int = NOBODY
  size: int = 0
  over: str | None = None
  told: Callable[[], None] = lambda: None


class Donors:
  """Donations under way.

  Args:
    membership: who is in the run.
    limits: how long a donor may take.
    events: told how each donation ended.
    changed: called when the announcement to a learner changes.
  """

  def __init__(
    self,
    membership: Membership,
    limits: Limits,
    events: EventSink,
    changed: Callable[[Member], None],
  ):
    self._membership = membership
    self._limits = limits
    self._events = events
    self._changed = changed
    self._numbers = itertools.count(1)
    self._open: dict[int, Donation] = {}
    self._tried: dict[tuple[int, int], set[int]] = collections.defaultdict(set)

  # --- the joiner ----------------------------------------------------------

  def ask(self, now: float, learner_id: int, incarnation: int) -> Donation:
    """A joiner wants optimizer state from a donor it has not had yet.

    Raises:
      Refused: `fenced`; `no_donor`: nobody is there who could give.
    """
    self._membership.get(learner_id, incarnation)
    for donation in list(self._open.values()):
      if donation.joiner == learner_id:
        self._end(donation, "its joiner has asked anew")
    donation = Donation(
      request=next(self._numbers),
      joiner=learner_id,
      incarnation=incarnation,
      asked_at=now,
      due=now + self._limits.transfer_s,
    )
    self._open[donation.request] = donation
    if not self._eligible(donation):
      del self._open[donation.request]
      raise Refused("no_donor", self._nobody(donation))
    self.tick(now)
    return donation

  def ask_itself(
    self, now: float, learner_id: int, incarnation: int
  ) -> Donation:
    """A standby that takes a learner's place wants the state of that one.

    Raises:
      Refused: `fenced`; `no_donor`: it cannot give any.
    """
    member = self._membership.get(learner_id, incarnation)
    if not (member.gives_state and (member.stepped or member.previous)):
      raise Refused(
        "no_donor", f"learner {learner_id} has no optimizer state to give yet"
      )
    step_s = 0.0 if math.isnan(member.step_s) else member.step_s
    donation = Donation(
      request=next(self._numbers),
      joiner=learner_id,
      incarnation=incarnation,
      asked_at=now,
      due=now + self._limits.transfer_s + 2 * step_s,
      donor=learner_id,
    )
    self._open[donation.request] = donation
    self._changed(member)
    return donation

  def done(self, now: float, request: int) -> None:
    """Everything has been passed on."""
    del now
    self._finish(request, "")

  def fail(self, now: float, request: int, why: str) -> None:
    """A donation that is under way has failed."""
    del now
    self._finish(request, why)

  def _finish(self, request: int, over: str) -> None:
    donation = self._open.get(request)
    if donation is not None:
      self._end(donation, over)

  # --- the donor -----------------------------------------------------------

  def asked_of(self, learner_id: int) -> int:
    """The request that a learner is to answer, 0 for none."""
    for donation in self._open.values():
      if donation.donor == learner_id:
        return donation.request
    return 0

  def moved(
    self, now: float, request: int, donor: int, incarnation: int, size: int
  ) -> None:
    """Bytes of a donation have come; none with its header.

    Raises:
      Refused: `fenced`; `late`: it is over, or another learner's to give.
    """
    self._membership.get(donor, incarnation)
    donation = self._open.get(request)
    if donation is None or donation.donor != donor:
      raise Refused("late", f"nobody waits for request {request} any more")
    donation.size += size
    donation.due = now + _STALLED_LEASES * self._limits.lease_s

  # --- whoever -------------------------------------------------------------

  def left(self, learner_id: int, why: str) -> None:
    """A learner is no longer a member: what it gave or took has ended."""
    for donation in list(self._open.values()):
      if donation.donor == learner_id:
        self._end(donation, f"learner {learner_id} has gone ({why})")
      elif donation.joiner == learner_id:
        self._end(donation, f"its joiner has gone ({why})")
    for key in [key for key in self._tried if key[0] == learner_id]:
      del self._tried[key]

  def tick(self, now: float) -> None:
    """Ends what has stalled, and finds donors for those who wait."""
    for donation in list(self._open.values()):
      if donation.due <= now:
        self._end(donation, self._stalled(now, donation))
    for donation in list(self._open.values()):
      if donation.donor == NOBODY:
        self._assign(now, donation)

  def wake_at(self) -> float:
    """When `tick` has something to do next, infinity for never."""
    return min((d.due for d in self._open.values()), default=math.inf)

  # --- pieces --------------------------------------------------------------

  def _eligible(self, donation: Donation) -> list[Member]:
    """Who could give, busy or not: has trained, and joins nothing itself."""
    joining = {d.joiner for d in self._open.values()}
    tried = self._tried.get((donation.joiner, donation.incarnation), set())
    return [
      m
      for m in self._membership.members()
      if m.gives_state
      and (m.stepped or m.previous)
      and (m.report is None or m.report.stage is Stage.TRAINING)
      and m.learner_id not in joining
      and m.learner_id not in tried
    ]

  def _assign(self, now: float, donation: Donation) -> None:
    """The one that has stepped longest; of those the lowest id."""
    eligible = self._eligible(donation)
    if not eligible:
      self._end(donation, self._nobody(donation))
      return
    busy = {d.donor for d in self._open.values()}
    free = [m for m in eligible if m.learner_id not in busy]
    if not free:
      return
    chosen = max(free, key=lambda m: (_steps(m), -m.learner_id))
    step_s = 0.0 if math.isnan(chosen.step_s) else chosen.step_s
    donation.donor = chosen.learner_id
    donation.due = now + self._limits.transfer_s + 2 * step_s
    key = (donation.joiner, donation.incarnation)
    self._tried[key].add(chosen.learner_id)
    self._changed(chosen)

  def _nobody(self, donation: Donation) -> str:
    tried = self._tried.get((donation.joiner, donation.incarnation), set())
    others = len(self._membership.live) - 1
    return (
      f"no learner can give its optimizer state: of {max(0, others)} others "
      f"{len(tried)} have been asked, the rest have not finished a step"
    )

  def _stalled(self, now: float, donation: Donation) -> str:
    waited_s = now - donation.asked_at
    if donation.donor == NOBODY:
      return f"every learner that could give was busy for {waited_s:.0f} s"
    return (
      f"learner {donation.donor} has moved nothing by its limit, "
      f"{waited_s:.0f} s after it was asked: {donation.size} bytes came"
    )

  def _end(self, donation: Donation, over: str) -> None:
    del self._open[donation.request]
    donation.over = over
    donor = self._membership.live.get(donation.donor)
    if donor is not None:
      self._changed(donor)
    self._events.emit(
      "donation",
      learner=donation.joiner,
      donor=None if donation.donor == NOBODY else donation.donor,
      ok=not over,
      bytes=donation.size,
      error=over,
    )
    donation.told()


def _steps(member: Member) -> int:
  return 0 if member.report is None else member.report.step
