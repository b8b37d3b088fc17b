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
    """A copy that held `tokens` in total went into `version`."""
    member.merged[fragment] = (version, tokens)

  def adopted(self, member: Member, before: Report, now: Report) -> None:
    """Settles what the adoptions between two reports left behind."""
    lost: dict[str, float] = {}
    for p, share in enumerate(self._shares):
      if now.versions[p] == before.versions[p]:
        continue
      version, merged = member.merged.get(p, (None, 0))
      settled = member.accounted.get(p, 0)
      if version == now.versions[p]:
        # what the overlap produced after the copy is overwritten or carried
        cause, start = "overlap", merged
      else:
        cause, start = "left_out", settled
      if self._carries and cause == "overlap":
        member.accounted[p] = merged
        continue
      if self._carries and before.versions[p].term == now.versions[p].term:
        continue  # the learner's own base: nothing is given up
      lost[cause] = lost.get(cause, 0.0) + share * (now.tokens - start)
      member.accounted[p] = now.tokens
    for cause, tokens in lost.items():
      self.discard(member.learner_id, cause, tokens)

  def left(self, member: Member, cause: str) -> None:
    """Settles an incarnation that is gone: unmerged tokens are lost."""
    if member.report is None:
      return
    lost = 0.0
    for p, share in enumerate(self._shares):
      settled = max(
        member.accounted.get(p, 0), member.merged.get(p, (None, 0))[1]
      )
      lost += share * max(0, member.report.tokens - settled)
    self.discard(member.learner_id, cause, lost)

  def discard(self, learner_id: int, cause: str, tokens: float) -> None:
    if tokens <= 0:
      return
    self.discarded[cause] = self.discarded.get(cause, 0.0) + tokens
    self._events.emit(
      "discard", learner=learner_id, cause=cause, tokens=round(tokens, 1)
    )
