"""What became of every token: merged, or discarded for a named cause.

Tokens are counted per fragment and weighted with the fragment's share of the
parameters (design section 2, *goodput*). `Member.accounted[p]` is the token
count of its incarnation up to which fragment p is settled.

A learner whose connection is lost counts as dead, what it has not merged as
lost. Should it come back, that is taken back: its counts go on below zero, for
what it did before it was back. Where a fragment was merged without it
meanwhile, its own is overwritten: all that is then lost as `absence`. Where
nobody merged, its base is still the run's, and so is what it did alone.
"""

import dataclasses

from decoupled.syncer.membership import Member
from decoupled.types import NO_VERSION, EventSink, Report, Version


@dataclasses.dataclass
class _Gone:
  """A member that may be back, and what was then counted as lost."""

  incarnation: int
  member: Member
  lost: float


class Accounts:
  """Settles tokens as reports, merges and departures come in."""

  def __init__(
    self, shares: tuple[float, ...], adoption: str, events: EventSink
  ):
    self._shares = shares
    self._carries = adoption == "carry"
    self._events = events
    self.discarded: dict[str, float] = {}
    self._gone: dict[int, _Gone] = {}

  def merged(
    self, member: Member, fragment: int, version: Version, tokens: int
  ) -> None:
    """A copy that held `tokens` in total goes into `version`."""
    member.merged.setdefault(fragment, {})[version] = tokens

  def not_merged(
    self, member: Member | None, fragment: int, version: Version
  ) -> None:
    """The merge into `version` had to be given up."""
    if member is not None:
      member.merged.get(fragment, {}).pop(version, None)

  def began(self, member: Member, report: Report, term: int) -> int:
    """Takes in the first report of an incarnation.

    Args:
      member: whose.
      report: its first.
      term: of this syncer.

    Returns:
      Tokens that its process did before, and that no report told of.
    """
    gone = self._gone.pop(member.learner_id, None)
    if not member.previous:
      return 0
    if gone is None or gone.incarnation != member.previous:
      # an earlier syncer's: whatever is of this term it adopted just now
      member.accounted = dict.fromkeys(
        range(len(self._shares)), -report.tokens_alone
      )
      held = tuple(NO_VERSION if v.term == term else v for v in report.versions)
      self.adopted(member, held, report)
      return report.tokens_alone
    old = gone.member
    assert old.report is not None
    self.discard(member.learner_id, "failure", -gone.lost)
    shift = old.report.tokens_before - report.tokens_before
    member.accounted = {
      p: old.accounted.get(p, 0) + shift for p in range(len(self._shares))
    }
    member.merged = {
      p: {version: tokens + shift for version, tokens in merged.items()}
      for p, merged in old.merged.items()
    }
    self.adopted(member, old.report.versions, report)
    return max(0, -shift - old.report.tokens)

  def adopted(
    self, member: Member, before: tuple[Version, ...], now: Report
  ) -> None:
    """Settles what the adoptions since `before` was held left behind."""
    lost: dict[str, float] = {}
    for p, share in enumerate(self._shares):
      old, new = before[p], now.versions[p]
      if new == old:
        continue
      # versions may have been skipped, some of which included a copy
      waiting = member.merged.pop(p, {})
      merged = {v: tokens for v, tokens in waiting.items() if v <= new}
      member.merged[p] = {v: n for v, n in waiting.items() if v > new}
      settled = max([member.accounted.get(p, 0), *merged.values()])
      # the copies of a lost connection are gone: nothing is carried past them
      gone = merged.get(new, 1) <= 0
      if self._carries and self._succeeds(old, new) and not gone:
        member.accounted[p] = settled  # what came after it is kept
        continue
      if settled < 0:
        lost["absence"] = lost.get("absence", 0.0) - share * settled
        settled = 0
      if new in merged:
        cause = "overlap"
      else:
        cause = "refusal" if member.spoilt.get(p) == new else "left_out"
      lost[cause] = lost.get(cause, 0.0) + share * (now.tokens - settled)
      member.accounted[p] = now.tokens
    for cause, tokens in lost.items():
      self.discard(member.learner_id, cause, tokens)

  def _succeeds(self, old: Version, new: Version) -> bool:
    """Whether `new` was computed from `old`; else even `carry` overwrites.

    A fragment is visited every P rounds; the rounds of a drain, which are
    adopted by overwriting, lie further ahead.
    """
    return old.term == new.term and new.round - old.round <= len(self._shares)

  def left(self, member: Member, cause: str) -> None:
    """Settles an incarnation that is gone: unmerged tokens are lost."""
    if member.report is None:
      gone = self._gone.get(member.learner_id)
      if gone is not None and gone.incarnation == member.previous:
        gone.incarnation = member.incarnation  # it has not said a word
      return
    lost = 0.0
    for p, share in enumerate(self._shares):
      merged = member.merged.get(p, {}).values()
      settled = max([member.accounted.get(p, 0), *merged])
      lost += share * max(0, member.report.tokens - settled)
    self._gone[member.learner_id] = _Gone(member.incarnation, member, lost)
    self.discard(member.learner_id, cause, lost)

  def discard(self, learner_id: int, cause: str, tokens: float) -> None:
    """Counts tokens as lost; a negative number takes some back."""
    if not tokens:
      return
    self.discarded[cause] = self.discarded.get(cause, 0.0) + tokens
    self._events.emit(
      "discard", learner=learner_id, cause=cause, tokens=round(tokens, 1)
    )
