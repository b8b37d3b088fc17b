"""What became of every token: merged, or discarded for a named cause.

Tokens are counted per fragment and weighted with the fragment's share of the
parameters (design section 2, *goodput*). `Member.accounted[p]` is the token
count of its incarnation up to which fragment p is settled.
"""

from decoupled.syncer.membership import Member
from decoupled.types import EventSink, Report, Version


class Accounts:
  """Settles tokens as reports, merges and departures come in."""

  def __init__(
    self, shares: tuple[float, ...], adoption: str, events: EventSink
  ):
    self._shares = shares
    self._carries = adoption == "carry"
    self._events = events
    self.discarded: dict[str, float] = {}

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

  def adopted(self, member: Member, before: Report, now: Report) -> None:
    """Settles what the adoptions between two reports left behind."""
    lost: dict[str, float] = {}
    for p, share in enumerate(self._shares):
      old, new = before.versions[p], now.versions[p]
      if new == old:
        continue
      # versions may have been skipped, some of which included a copy
      waiting = member.merged.pop(p, {})
      merged = {v: tokens for v, tokens in waiting.items() if v <= new}
      member.merged[p] = {v: n for v, n in waiting.items() if v > new}
      settled = max([member.accounted.get(p, 0), *merged.values()])
      if self._carries and self._succeeds(old, new):
        member.accounted[p] = settled  # what came after it is kept
        continue
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
      return
    lost = 0.0
    for p, share in enumerate(self._shares):
      merged = member.merged.get(p, {}).values()
      settled = max([member.accounted.get(p, 0), *merged])
      lost += share * max(0, member.report.tokens - settled)
    self.discard(member.learner_id, cause, lost)

  def discard(self, learner_id: int, cause: str, tokens: float) -> None:
    if tokens <= 0:
      return
    self.discarded[cause] = self.discarded.get(cause, 0.0) + tokens
    self._events.emit(
      "discard", learner=learner_id, cause=cause, tokens=round(tokens, 1)
    )
