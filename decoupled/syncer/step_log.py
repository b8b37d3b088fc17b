"""When steps ended and fragments were adopted, for the event log.

A run of many learners takes thousands of steps a second: they are logged in
batches of about a second a learner.
"""

from collections.abc import Callable

from decoupled.syncer.membership import Member
from decoupled.types import EventSink, Report, Version

_EVENT_S = 1.0
_HELD = 4096  # per learner between two events


class StepLog:
  """What learners report of their steps.

  Args:
    events: where it goes.
    since_start: a time of the syncer's clock as seconds from the job's start.
    opened_held: openings of rounds that are remembered.
  """

  def __init__(
    self,
    events: EventSink,
    since_start: Callable[[float], float],
    opened_held: int,
  ):
    self._events = events
    self._since_start = since_start
    self._opened_held = opened_held
    self._opened_at: dict[Version, float] = {}
    self._adopted_after: dict[int, list[float]] = {}
    self._ends: dict[int, list[float]] = {}
    self._said: dict[int, tuple[float, int]] = {}  # when, and which step

  def opened(self, now: float, version: Version) -> None:
    """A round has opened that will write `version`."""
    self._opened_at[version] = now
    while len(self._opened_at) > self._opened_held:
      del self._opened_at[next(iter(self._opened_at))]

  def adopted(self, now: float, before: Report, report: Report) -> None:
    """Notes how long after its opening a round's result was adopted."""
    waits = self._adopted_after.setdefault(report.learner_id, [])
    pairs = zip(before.versions, report.versions, strict=True)
    for old, new in pairs:
      opened = self._opened_at.get(new)
      if new != old and opened is not None:
        waits.append(round(now - opened, 6))
    del waits[:-_HELD]

  def reported(self, now: float, member: Member) -> None:
    """Takes the ends of steps in; logs them if the last time is long ago."""
    report = member.report
    assert report is not None
    ends = self._ends.setdefault(member.learner_id, [])
    # on the syncer's clock
    ends += [
      self._since_start(e + member.clock_offset_s) for e in report.step_ends_s
    ]
    del ends[:-_HELD]
    last = self._said.get(member.learner_id)
    if last is None or now - last[0] >= _EVENT_S:
      self._emit(member, report)
      self._said[member.learner_id] = (now, report.step)

  def gone(self, member: Member) -> None:
    """Logs what is left of an incarnation."""
    if member.report is not None:
      self._emit(member, member.report)
      self._said.pop(member.learner_id, None)

  def _emit(self, member: Member, report: Report) -> None:
    ends = self._ends.pop(member.learner_id, [])
    _, logged = self._said.get(member.learner_id, (0.0, 0))
    if not ends and report.step == logged:
      return
    self._events.emit(
      "steps",
      learner=member.learner_id,
      incarnation=member.incarnation,
      step=report.step,
      tokens=report.tokens + report.tokens_alone,
      schedule_step=report.schedule_step,
      ends=ends,
      loss=report.loss,
      position=list(report.position),
      adopted_after_s=self._adopted_after.pop(member.learner_id, []),
    )
