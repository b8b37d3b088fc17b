"""The ledger in a run: who is back in time, what is told, what is logged.

`ledger` knows no time. Here a learner that lost its connection keeps its units
for a lease, in which it may be back; those of a snapshot are kept until the
restarts that are owed have had their time. A syncer that has just taken over
hands nothing new out before all whose units it knows have said what they hold,
for a lease at most.
"""

import math
from collections.abc import Mapping
from typing import Any

from decoupled.syncer.ledger import Ledger
from decoupled.syncer.membership import Member
from decoupled.syncer.settings import Limits
from decoupled.types import Claim, EventSink, Hello, Report

_LOG_S = 1.0  # at most one event in that time, departures apart


class Units:
  """What `Rounds` knows of the corpus.

  Args:
    events: told of the ledger, in batches.
    limits: of the syncer.
    takes_over: an earlier syncer has handed out units that are not known here.

  Attributes:
    ledger: the record itself.
  """

  def __init__(self, events: EventSink, limits: Limits, takes_over: bool):
    self.ledger = Ledger()
    self._events = events
    self._limits = limits
    self._takes_over = takes_over
    self._settles_at: float | None = None
    self._unheard: set[int] = set()
    self._away: dict[int, float] = {}  # until when their units are kept
    self._told: dict[int, object] = {}
    self._unclaimed: dict[int, int] = {}
    self._before: dict[int, int] = {}  # unclaimed ones of earlier processes
    self._said_at = -math.inf
    self._said = dict.fromkeys(
      ("claimed", "completed", "repeated", "unclaimed"), 0
    )

  # --- restoring -----------------------------------------------------------

  def restore(self, state: Mapping[str, Any] | None) -> None:
    """Goes on from `state()` of an earlier syncer; None: it had none."""
    self._takes_over = True
    if state is not None:
      self.ledger = Ledger.of(state)
      for learner, (before, now) in state["unclaimed"].items():
        self._before[int(learner)] = before
        self._unclaimed[int(learner)] = now

  def state(self) -> dict[str, Any]:
    """What a later syncer needs, in JSON's terms."""
    unclaimed = {
      str(i): [self._before.get(i, 0), self._unclaimed.get(i, 0)]
      for i in sorted({*self._before, *self._unclaimed})
      if self._before.get(i) or self._unclaimed.get(i)
    }
    return {**self.ledger.state(), "unclaimed": unclaimed}

  @property
  def unclaimed(self) -> int:
    """Units begun without a claim."""
    return sum(self._before.values()) + sum(self._unclaimed.values())

  # --- learners ------------------------------------------------------------

  def joined(
    self, now: float, member: Member, hello: Hello, contract: Mapping[str, str]
  ) -> None:
    """A learner has its id, and with it the units of that id."""
    self.ledger.limit = _limit(contract)
    if self._settles_at is None:
      settling_s = self._limits.lease_s if self._takes_over else 0.0
      self._settles_at = now + settling_s
      self._unheard = set(self.ledger.holders())
      for learner in self._unheard:
        self._away.setdefault(learner, now + self._limits.restart_s)
    learner = member.learner_id
    same = hello.previous > 0
    self.ledger.join(learner, member.incarnation, same)
    self._away.pop(learner, None)
    if not same:
      old = self._unclaimed.pop(learner, 0)
      self._before[learner] = self._before.get(learner, 0) + old

  def gone(self, now: float, member: Member, why: str) -> None:
    """A learner is no longer a member.

    Args:
      now: the time.
      member: who.
      why: as in the event `leave`.
    """
    learner = member.learner_id
    if why == "left":
      self.ledger.release(learner)
    else:
      self.ledger.park(learner, died=why != "drained")
      self._away[learner] = now + self._limits.lease_s
    self.flush()

  def reported(self, now: float, report: Report) -> bool:
    """Takes in a report; True if its learner must be told something."""
    for learner in [i for i, until in self._away.items() if now >= until]:
      del self._away[learner]
      self.ledger.release(learner)
    if report.learner_id in self._unheard:
      self._unheard.remove(report.learner_id)
      if not self._unheard:  # all that are known have said what they hold
        self._settles_at = now
    settled = self._settles_at is not None and now >= self._settles_at
    self.ledger.report(
      report.learner_id,
      report.incarnation,
      report.seq,
      report.claims,
      # nothing new before all have said what they have
      report.wants if settled else 0,
    )
    self._unclaimed[report.learner_id] = report.unclaimed
    if now - self._said_at >= _LOG_S:
      self._said_at = now
      self.flush()
    if not report.wants and not report.claims:
      return False
    claims, ended = self.word(report.learner_id)
    places = tuple(claim.place for claim in claims)
    told = (
      report.incarnation, places, ended, self.ledger.void(report.learner_id)
    )  # fmt: skip
    before = self._told.get(report.learner_id)
    self._told[report.learner_id] = told
    return told != before

  def word(self, learner: int) -> tuple[tuple[Claim, ...], bool]:
    """(the units of a learner, whether nobody can claim more)."""
    return self.ledger.claims(learner), self.ledger.exhausted

  # --- the log -------------------------------------------------------------

  def flush(self) -> None:
    """Says how the ledger stands, if that is news."""
    ledger = self.ledger
    figures: dict[str, int] = {
      "claimed": ledger.claimed,
      "completed": ledger.completed,
      "repeated": ledger.repeated,
      "unclaimed": self.unclaimed,
    }
    if figures != self._said:
      self._said = figures
      self._events.emit("units", low=ledger.low, **figures)


def _limit(contract: Mapping[str, str]) -> int:
  """How many units there are: epochs times units of an epoch; 0 = endless."""
  try:
    epochs = int(contract.get("Corpus.epochs", "0"))
    return epochs * int(contract.get("Corpus.units", "0"))
  except ValueError:
    return 0
