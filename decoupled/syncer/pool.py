"""Which standby takes the id of a dead learner; no network, no threads.

An id becomes vacant when a learner's claim ends and nobody has said that it
shall stay so. It is offered to the standby that has been ready longest and has
the same program; that one claims it as any learner does, by saying hello. So
there is one owner, whoever comes first: another standby, a restart, or the
original, whose claim then is refused. A standby that is not there any more, or
says nothing, loses the offer to the next one. What nobody can take waits.

A swap that is planned begins while the learner trains (`swap`): its
standby prepares, then the learner is told to leave, and its id is vacant for
that standby.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection

from decoupled.errors import Refused
from decoupled.syncer import handover
from decoupled.syncer.handover import Handover
from decoupled.syncer.membership import Member
from decoupled.syncer.settings import Limits
from decoupled.types import (
  HANDED_OVER,
  EventSink,
  Hello,
  Lines,
  Offer,
  Standing,
)
from decoupled.wire.status import StandbyStatus

Key = tuple[int, int]  # learner, and rank of the host or -1 for all of it

# By SIGTERM a machine is taken away, which is what standbys are for. Told to
# stop in any other way, by a person at its terminal, it goes for good.
_REPLACED = ("stopped by SIGTERM", HANDED_OVER)


@dataclasses.dataclass(eq=False)
class Standby:
  """A process in the pool.

  Attributes:
    number: of its stream; rises.
    standing: what it said last.
    since: when it became ready, or ceased to be.
    heard_at: when it last said anything.
    offer: what it is to claim.
  """

  number: int
  standing: Standing
  since: float
  heard_at: float
  offer: Offer | None = None

  @property
  def ready(self) -> bool:
    return not self.standing.missing


@dataclasses.dataclass(eq=False)
class Vacancy:
  """An id that has lost its learner.

  Attributes:
    learner_id: which.
    incarnation: the one that was lost.
    since: when it was.
    program: of the one that was lost.
    standby: the one it is offered to, None while nobody can take it.
    planned: the handover that it comes from, if it does.
    due: when that one must have claimed it.
    note: why nobody can take it, as last said.
    rank: of the host whose seat it is; None for a whole learner.
  """

  learner_id: int
  incarnation: int
  since: float
  program: Lines
  standby: Standby | None = None
  planned: Handover | None = None
  due: float = math.inf
  note: str = ""
  rank: int | None = None

  @property
  def role(self) -> str:
    host = "" if self.rank is None else f" (host {self.rank})"
    return f"learner {self.learner_id}{host}"


class Pool:
  """Standbys and vacancies.

  Args:
    limits: how long a standby may take.
    events: told what is decided.
    t: a time as events have it.
    changed: called when the word to a standby changes.
    relieve: called when a learner's relief has changed.
  """

  def __init__(
    self,
    limits: Limits,
    events: EventSink,
    t: Callable[[float], float] = lambda now: now,
    changed: Callable[[], None] = lambda: None,
    relieve: Callable[[int], None] = lambda learner_id: None,
  ):
    self._limits = limits
    self._events = events
    self._t = t
    self._changed = changed
    self._relieve = relieve
    self._numbers = itertools.count(1)
    self._offers = itertools.count(1)
    self._standbys: dict[int, Standby] = {}
    self._vacant: dict[Key, Vacancy] = {}
    self._handovers: dict[int, Handover] = {}
    self._any = False  # a run that has never had a standby decides nothing
    self._programs: dict[int, Lines] = {}
    # per learner the incarnation that a standby has succeeded
    self._replaced: dict[int, int] = {}
    self._newest: dict[int, int] = {}  # per learner its last incarnation

  @property
  def heartbeat_s(self) -> float:
    """How often a standby has to say something."""
    return self._limits.heartbeat_s

  # --- standbys ------------------------------------------------------------

  def entered(self, now: float, standing: Standing) -> int:
    """A standby has opened its stream; returns the number that it goes by."""
    standby = Standby(next(self._numbers), standing, now, now)
    self._standbys[standby.number] = standby
    self._any = True
    self._say(now, standby)
    self.tick(now)
    return standby.number

  def said(self, now: float, number: int, standing: Standing) -> None:
    """What a standby says; it replaces what it said before.

    Raises:
      Refused: `fenced`: it is no longer in the pool.
    """
    standby = self._standbys.get(number)
    if standby is None:
      raise Refused(
        "fenced",
        f"{standing.name} ({standing.holder}) was silent for "
        f"{self._limits.lease_s:g} s and is no longer in the pool",
      )
    before, standby.standing = standby.standing, standing
    standby.heard_at = now
    if before.missing != standing.missing:
      if bool(before.missing) != bool(standing.missing):
        standby.since = now
      self._say(now, standby)
    offer = standby.offer
    if offer is not None and standing.declined >= offer.number:
      self._withdraw(standby, f"{_name(standby)} could not take it")
    elif offer is not None and standing.prepared >= offer.number:
      self._prepared(now, offer.learner_id)
    self.tick(now)

  def gone(self, now: float, number: int, why: str) -> None:
    """A standby's stream has ended; what it was offered is another one's."""
    standby = self._standbys.pop(number, None)
    if standby is None:
      return
    self._withdraw(standby, f"{_name(standby)} has gone: {why}")
    self._say(now, standby, why or "gone")
    self.tick(now)

  def offer(self, number: int) -> Offer | None:
    """What a standby is to claim.

    Raises:
      Refused: `fenced`: it is no longer in the pool.
    """
    standby = self._standbys.get(number)
    if standby is None:
      raise Refused(
        "fenced",
        f"it was silent for {self._limits.lease_s:g} s and is no longer in "
        "the pool",
      )
    return standby.offer

  def status(self, now: float) -> tuple[StandbyStatus, ...]:
    return tuple(
      StandbyStatus(
        name=each.standing.name,
        holder=each.standing.holder,
        fingerprint=each.standing.fingerprint,
        missing=each.standing.missing,
        since_s=now - each.since,
      )
      for each in self._standbys.values()
    )

  # --- ids -----------------------------------------------------------------

  def lost(self, now: float, member: Member, why: str, detail: str) -> None:
    """A learner's claim has ended: `closed`, `lease`, `left` or `drained`."""
    planned = self._handovers.pop(member.learner_id, None)
    for_good = why == "drained" or (
      why == "left" and not detail.startswith(_REPLACED)
    )
    if for_good and planned is not None:
      self._give_up(planned, f"the learner has left for good: {detail or why}")
    if for_good or member.hosts > 1:  # of several, each seat is vacant itself
      return
    vacancy = self._vacant[member.learner_id, -1] = Vacancy(
      member.learner_id,
      member.incarnation,
      now,
      self._programs.get(member.learner_id, ()),
    )
    if planned is not None:
      standby, vacancy.planned = planned.standby, planned
      assert standby.offer is not None
      standby.offer = standby.offer._replace(prepare=0)
      vacancy.standby, vacancy.due = standby, now + self._limits.lease_s
      self._decide(vacancy, standby, "as planned")
      self._changed()

  # --- planned swaps -------------------------------------------------------

  def swap(self, now: float, member: Member) -> Handover:
    """Begins to replace a learner that trains.

    Raises:
      Refused: it is being replaced already, or nobody can; it trains on.
    """
    handover.check(member)
    learner_id = member.learner_id
    known = self._handovers.get(learner_id)
    if known is not None:
      raise Refused(
        "swapping",
        f"learner {learner_id} is already being swapped: {known.name} takes "
        f"its place, {known.stage}",
      )
    wanted = Vacancy(
      learner_id,
      member.incarnation,
      now,
      self._programs.get(learner_id, ()),
    )
    free = [s for s in self._standbys.values() if s.ready and s.offer is None]
    fit = [s for s in free if not _differs(s, wanted)]
    if not fit:
      raise Refused(
        "no_standby",
        f"learner {learner_id} trains on: {self._nobody(free, wanted)}",
      )
    chosen = min(fit, key=lambda s: (s.since, s.number))
    chosen.offer = Offer(next(self._offers), learner_id, member.incarnation)
    begun = Handover(
      learner_id,
      member.incarnation,
      chosen,
      _name(chosen),
      now + self._limits.transfer_s + self._limits.lease_s,
    )
    self._handovers[learner_id] = begun
    self._plan(begun, "preparing")
    self._changed()
    return begun

  def relieved(self, learner_id: int) -> bool:
    """Whether a learner is to stop now, since its place is taken."""
    known = self._handovers.get(learner_id)
    return known is not None and known.prepared

  def _prepared(self, now: float, learner_id: int) -> None:
    known = self._handovers.get(learner_id)
    if known is None or known.prepared:
      return
    known.prepared = True
    known.due = now + self._limits.transfer_s
    self._plan(known, "prepared")
    self._relieve(learner_id)

  def _give_up(self, known: Handover, why: str) -> None:
    """The learner trains on, if it is there."""
    self._handovers.pop(known.learner_id, None)
    self._plan(known, "given_up", why)
    known.end(f"learner {known.learner_id} is not swapped: {why}")
    if known.standby.offer is not None:
      self._withdraw(known.standby)
    self._relieve(known.learner_id)

  def _plan(self, known: Handover, state: str, why: str = "") -> None:
    self._events.emit(
      "handover",
      learner=known.learner_id,
      incarnation=known.incarnation,
      standby=known.standby.standing.name,
      state=state,
      why=why,
    )

  def seats(self, now: float, learner_id: int, empty: Collection[int]) -> None:
    """The seats of a learner's hosts that nobody has."""
    mine = {k for k in self._vacant if k[0] == learner_id and k[1] >= 0}
    wanted = {(learner_id, rank) for rank in empty}
    for key in mine - wanted:
      vacancy = self._vacant.pop(key)
      if vacancy.standby is not None:
        self._withdraw(vacancy.standby)
    for key in sorted(wanted - mine):
      self._vacant[key] = Vacancy(
        learner_id,
        self._newest.get(learner_id, 0),
        now,
        self._programs.get(learner_id, ()),
        rank=key[1],
      )
    if wanted - mine:
      self.tick(now)

  def seated(self, now: float, learner_id: int, rank: int, holder: str) -> None:
    """A host has taken a seat: it was a standby, or it was not."""
    del now
    vacancy = self._vacant.pop((learner_id, rank), None)
    if vacancy is not None and vacancy.standby is not None:
      self._withdraw(vacancy.standby)
    standby = self._held_by(holder)
    if standby is None:
      return
    del self._standbys[standby.number]
    self._withdraw(standby)
    self._events.emit(
      "promoted",
      learner=learner_id,
      incarnation=self._newest.get(learner_id, 0) + 1,
      standby=standby.standing.name,
      holder=holder,
      fingerprint=standby.standing.fingerprint,
      host=rank,
    )

  def _held_by(self, holder: str) -> Standby | None:
    return next(
      (s for s in self._standbys.values() if s.standing.holder == holder), None
    )

  def check(self, hello: Hello) -> None:
    """Whether somebody comes back whose id a standby has taken meanwhile.

    Raises:
      Refused: `replaced`.
    """
    by = self._replaced.get(hello.learner_id, 0)
    if 0 < hello.previous <= by:
      raise Refused(
        "replaced",
        f"a standby took learner {hello.learner_id} over from incarnation "
        f"{hello.previous} ({hello.holder}), which was thought dead",
      )

  def claimed(self, now: float, member: Member, hello: Hello) -> None:
    """Somebody has claimed an id: it is vacant no more."""
    self._programs[member.learner_id] = hello.program
    self._newest[member.learner_id] = member.incarnation
    vacancy = self._vacant.pop((member.learner_id, -1), None)
    standby = self._held_by(hello.holder)
    if vacancy is not None and vacancy.planned is not None:
      planned = vacancy.planned
      taken = hello.holder == planned.standby.standing.holder
      self._plan(planned, "done" if taken else "given_up")
      planned.end("" if taken else f"{hello.holder} has claimed the id")
    if vacancy is not None and vacancy.standby is not None:
      self._withdraw(vacancy.standby)
    if standby is None:
      return
    del self._standbys[standby.number]
    self._withdraw(standby)
    if vacancy is not None:
      self._replaced[member.learner_id] = vacancy.incarnation
    self._events.emit(
      "promoted",
      learner=member.learner_id,
      incarnation=member.incarnation,
      standby=standby.standing.name,
      holder=hello.holder,
      fingerprint=standby.standing.fingerprint,
    )

  @property
  def reserved(self) -> Collection[int]:
    """Ids that are not free, since a standby is about to claim them."""
    return {
      v.learner_id for v in self._vacant.values() if v.standby is not None
    }

  def owes(self, now: float) -> bool:
    """Whether the end of a run waits for a standby that is about to claim."""
    return any(
      v.standby is not None and now < v.since + self._limits.restart_s
      for v in self._vacant.values()
    )

  def vacancies(self, now: float) -> tuple[str, ...]:
    """A sentence for each id that has no learner."""
    return tuple(
      f"{v.role} has been vacant for {now - v.since:.1f} s: "
      + (v.note if v.standby is None else f"{_name(v.standby)} takes it over")
      for _, v in sorted(self._vacant.items())
    ) + tuple(
      f"learner {h.learner_id} is handed over to {h.name}: {h.stage}"
      for _, h in sorted(self._handovers.items())
    )

  # --- time ----------------------------------------------------------------

  def close(self) -> None:
    """The run ends: nobody is promoted any more."""
    for known in list(self._handovers.values()):
      self._give_up(known, "the run ends")
    for standby in self._standbys.values():
      self._withdraw(standby)
    self._vacant.clear()

  def tick(self, now: float) -> None:
    """Drops who is silent, and offers what is vacant."""
    for standby in list(self._standbys.values()):
      if standby.heard_at + self._limits.lease_s <= now:
        del self._standbys[standby.number]
        self._withdraw(standby, f"{_name(standby)} fell silent")
        self._say(now, standby, f"silent for {self._limits.lease_s:g} s")
        self._changed()
    for vacancy in self._vacant.values():
      if vacancy.standby is not None and vacancy.due <= now:
        # it may still come, and then be the first; but it is not waited for
        late = vacancy.standby
        self._withdraw(late)
        late.since = now
    for known in list(self._handovers.values()):
      if known.due <= now:
        self._give_up(known, f"it took too long; {known.stage}")
    for _, vacancy in sorted(self._vacant.items()):
      if vacancy.standby is None:
        self._assign(now, vacancy)

  def wake_at(self) -> float:
    """When `tick` has something to do next, infinity for never."""
    times = [s.heard_at + self._limits.lease_s for s in self._standbys.values()]
    times += [v.due for v in self._vacant.values()]
    times += [h.due for h in self._handovers.values()]
    return min(times, default=math.inf)

  # --- pieces --------------------------------------------------------------

  def _assign(self, now: float, vacancy: Vacancy) -> None:
    """Offers an id to the one that has been ready longest, if one fits."""
    free = [s for s in self._standbys.values() if s.ready and s.offer is None]
    fit = [s for s in free if not _differs(s, vacancy)]
    if not fit and self._preempt(vacancy):
      self._assign(now, vacancy)
      return
    if not fit:
      note = self._nobody(free, vacancy)
      if note != vacancy.note:
        vacancy.note = note
        if self._any:
          self._decide(vacancy, None, note)
      return
    chosen = min(fit, key=lambda s: (s.since, s.number))
    chosen.offer = Offer(
      next(self._offers), vacancy.learner_id, rank=vacancy.rank or 0
    )
    vacancy.standby, vacancy.note = chosen, ""
    vacancy.due = now + self._limits.lease_s
    self._decide(vacancy, chosen, f"ready for {now - chosen.since:.1f} s")
    self._changed()

  def _preempt(self, vacancy: Vacancy) -> bool:
    """Takes a standby from a plan: a learner that died needs it more."""
    for known in self._handovers.values():
      if not (known.prepared or _differs(known.standby, vacancy)):
        lost = vacancy.learner_id
        self._give_up(known, f"learner {lost} has died and needs its standby")
        return True
    return False

  def _decide(
    self, vacancy: Vacancy, standby: Standby | None, why: str
  ) -> None:
    self._events.emit(
      "decided",
      learner=vacancy.learner_id,
      lost=vacancy.incarnation,
      standby=None if standby is None else standby.standing.name,
      why=why,
      **({} if vacancy.rank is None else {"host": vacancy.rank}),
    )

  def _nobody(self, free: list[Standby], vacancy: Vacancy) -> str:
    if free:
      return f"no standby fits: {_differs(free[0], vacancy)}"
    if not self._standbys:
      return "there is no standby"
    busy = [s for s in self._standbys.values() if s.offer is not None]
    missing = [s for s in self._standbys.values() if not s.ready]
    said = [f"{_name(s)} takes over another learner" for s in busy]
    said += [f"{_name(s)} is not ready: {s.standing.missing}" for s in missing]
    return "no standby is free: " + "; ".join(said)

  def _withdraw(self, standby: Standby, why: str = "") -> None:
    """A standby has no offer any more; the id of it is nobody's."""
    offer, standby.offer = standby.offer, None
    if offer is None:
      return
    for vacancy in self._vacant.values():
      if vacancy.standby is not standby:
        continue
      vacancy.standby, vacancy.due = None, math.inf
      if vacancy.planned is not None:
        planned, vacancy.planned = vacancy.planned, None
        planned.end(
          f"{why or planned.name + ' did not come in time'}: learner "
          f"{vacancy.learner_id} has left, and waits for the next standby"
        )
    known = self._handovers.get(offer.learner_id)
    if known is not None and known.standby is standby:
      self._give_up(known, why or "its standby is needed elsewhere")
    self._changed()

  def _say(self, now: float, standby: Standby, gone: str = "") -> None:
    state = "ready" if standby.ready else "warming"
    self._events.emit(
      "standby",
      standby=standby.standing.name,
      holder=standby.standing.holder,
      state="gone" if gone else state,
      why=gone or standby.standing.missing,
      fingerprint=standby.standing.fingerprint,
      since=self._t(standby.since),
    )


def _name(standby: Standby) -> str:
  return f"{standby.standing.name} ({standby.standing.holder})"


def _differs(standby: Standby, vacancy: Vacancy) -> str:
  """How a standby's program differs from the one that is wanted, if it does."""
  own, wanted = dict(standby.standing.program), dict(vacancy.program)
  for key in sorted({*own, *wanted}):
    if own.get(key) != wanted.get(key):
      return (
        f"{_name(standby)} has {key} = {own.get(key, 'nothing')}, "
        f"{vacancy.role} had {wanted.get(key, 'nothing')}"
      )
  return ""
