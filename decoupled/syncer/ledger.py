"""Which units of the corpus are done, held or free: pure, no clock, no wire.

A unit is named by its *place* in the endless sequence of epochs, so the ledger
knows no corpus: everything below `low` is done, beyond it lie a few places
that are done or held, and the rest is free. The lowest free place is handed
out first. What is consumed is therefore 0, 1, 2, ..., however many learners
there are.

Messages are whole state: a learner says which units it holds and which of them
it has finished (`report`), the ledger says which it holds (`claims`). Repeated,
reordered and lost messages change nothing: a finished unit stays finished, an
offset only grows, and who speaks under an old incarnation is not heard.

A learner that goes takes its units along (`park`) until it is back or given up
(`release`). What one did on a unit before it died is not known to the end, so
that unit is begun again where it had begun it; that repetition is counted. One
that left in order had said how far it came: the next one goes on right there.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from decoupled.types import Claim

MOST_HELD = 64  # unfinished units of one learner


@dataclasses.dataclass
class Held:
  """How far somebody is with a unit.

  Attributes:
    start: sequences of it that were trained on before it was claimed.
    offset: sequences that are known to have been trained on.
  """

  start: int = 0
  offset: int = 0

  @property
  def begun(self) -> bool:
    return self.offset > self.start


@dataclasses.dataclass
class Holder:
  """A learner id and what it has.

  Attributes:
    incarnation: whose word counts.
    seq: of its newest report.
    units: unfinished units by place.
    told: finished units that it still lists.
    void: units that it lists, but that are not its own (any more).
    died: it is away, and what it did since its last report is not known.
  """

  incarnation: int = 0
  seq: int = 0
  units: dict[int, Held] = dataclasses.field(default_factory=dict)
  told: set[int] = dataclasses.field(default_factory=set)
  void: set[int] = dataclasses.field(default_factory=set)
  died: bool = False


class Ledger:
  """The record of units claimed and consumed.

  Args:
    limit: number of units there are, 0 = endless.

  Attributes:
    low: every place below it is done.
  """

  def __init__(self, limit: int = 0):
    self.limit = limit
    self.low = 0
    self._done: set[int] = set()  # beyond `low`
    self._holders: dict[int, Holder] = {}
    self._owner: dict[int, int] = {}  # of every unit that is held
    self._left: dict[int, Held] = {}  # begun, and nobody's
    self._lost: dict[int, set[int]] = {}  # what others got of an absent one
    self._twice: set[int] = set()  # units that were repeated, in part at least
    self._next = 0  # no place below it is free

  # --- what happens to learners ---------------------------------------------

  def join(self, learner: int, incarnation: int, same_process: bool) -> None:
    """An incarnation is heard from now on; it has what the id had.

    Args:
      learner: id.
      incarnation: higher than any before.
      same_process: it knows itself how far it is.
    """
    holder = self._holders.setdefault(learner, Holder())
    if not same_process:
      for place, held in holder.units.items():
        if holder.died:
          self._begin_again(place, held)
        held.start = held.offset
    holder.incarnation, holder.seq, holder.died = incarnation, 0, False
    holder.told, holder.void = set(), set()

  def park(self, learner: int, died: bool) -> None:
    """The learner is away and keeps its units for now."""
    holder = self._holders.get(learner)
    if holder is not None:
      holder.incarnation, holder.died = 0, died

  def release(self, learner: int) -> None:
    """The learner is given up: others get its units."""
    holder = self._holders.pop(learner, None)
    if holder is None:
      return
    self._lost[learner] = set(holder.units)
    for place, held in holder.units.items():
      del self._owner[place]
      self._next = min(self._next, place)
      if held.offset > 0:
        start = held.start if holder.died else held.offset
        self._left[place] = Held(start, held.offset)

  # --- what learners say -----------------------------------------------------

  def report(
    self,
    learner: int,
    incarnation: int,
    seq: int,
    said: Iterable[Claim],
    wants: int,
  ) -> None:
    """Takes in what a learner holds and has finished; hands out more.

    Args:
      learner: id.
      incarnation: under which it speaks.
      seq: rises with each report of an incarnation.
      said: units that it holds, or has finished and still sees listed.
      wants: how many unfinished units it would like to hold; 0 takes none.
    """
    holder = self._holders.get(learner)
    if holder is None or holder.incarnation != incarnation:
      return
    if seq <= holder.seq:
      return
    holder.seq = seq
    listed = tuple(said)
    places = {claim.place for claim in listed}
    holder.told &= places
    holder.void &= places
    for claim in listed:
      self._hear(learner, holder, claim)
    self._hand_out(learner, holder, min(wants, MOST_HELD))

  def claims(self, learner: int) -> tuple[Claim, ...]:
    """The unfinished units of a learner, lowest first."""
    holder = self._holders.get(learner, Holder())
    return tuple(
      Claim(place, holder.units[place].offset) for place in sorted(holder.units)
    )

  def void(self, learner: int) -> frozenset[int]:
    """Units that a learner lists and does not hold (any more)."""
    return frozenset(self._holders.get(learner, Holder()).void)

  def _hear(self, learner: int, holder: Holder, claim: Claim) -> None:
    owner = self._owner.get(claim.place)
    if owner is None and self._is_free(claim.place):
      left = self._left.pop(claim.place, Held())
      # what it did there, it did as the one that held it before
      self._give(learner, holder, claim.place, Held(left.start, left.start))
      owner = learner
    if owner == learner:
      held = holder.units[claim.place]
      held.offset = max(held.offset, claim.offset)
      if claim.done:
        self._finish(holder, claim.place)
    elif claim.place not in holder.told:
      holder.void.add(claim.place)
      begun = claim.done or claim.offset > 0
      # of those that are done it may just be telling a second time
      other = owner is not None or claim.place in self._lost.get(learner, ())
      if begun and other:
        self._twice.add(claim.place)

  def _hand_out(self, learner: int, holder: Holder, wants: int) -> None:
    while len(holder.units) < wants:
      place = self._lowest_free()
      if place is None:
        return
      held = self._left.pop(place, Held())
      self._begin_again(place, held)
      self._give(learner, holder, place, held)

  def _begin_again(self, place: int, held: Held) -> None:
    """Back to where the last holder had begun; a repetition, if it had."""
    if held.begun:
      self._twice.add(place)
    held.offset = held.start

  def _give(self, learner: int, holder: Holder, place: int, held: Held) -> None:
    holder.units[place] = held
    self._owner[place] = learner

  def _finish(self, holder: Holder, place: int) -> None:
    del holder.units[place], self._owner[place]
    holder.told.add(place)
    self._done.add(place)
    while self.low in self._done:
      self._done.remove(self.low)
      self.low += 1

  def _is_free(self, place: int) -> bool:
    return (
      place >= self.low
      and place not in self._done
      and place not in self._owner
      and not 0 < self.limit <= place
    )

  def _lowest_free(self) -> int | None:
    self._next = max(self._next, self.low)
    while self._next in self._done or self._next in self._owner:
      self._next += 1
    return None if 0 < self.limit <= self._next else self._next

  # --- the whole -------------------------------------------------------------

  @property
  def finished(self) -> bool:
    """Every unit that there is has been consumed."""
    return 0 < self.limit <= self.low

  @property
  def exhausted(self) -> bool:
    """No unit is left that anybody could claim."""
    return self._lowest_free() is None

  @property
  def completed(self) -> int:
    """How many units are done."""
    return self.low + len(self._done)

  @property
  def repeated(self) -> int:
    """How many units were trained on twice, at least in part."""
    return len(self._twice)

  @property
  def claimed(self) -> int:
    """How many units are done or held."""
    return self.completed + len(self._owner)

  def holders(self) -> tuple[int, ...]:
    """Ids that have units."""
    return tuple(i for i, h in sorted(self._holders.items()) if h.units)

  def state(self) -> dict[str, Any]:
    """What a later ledger needs, in JSON's terms; small."""
    claims = {}
    for learner in self.holders():
      holder = self._holders[learner]
      claims[str(learner)] = [
        [place, held.start if holder.died else held.offset]
        for place, held in sorted(holder.units.items())
      ]
    return {
      "limit": self.limit,
      "low": self.low,
      "done": _ranges(self._done),
      "claims": claims,
      "left": [[p, h.start, h.offset] for p, h in sorted(self._left.items())],
      "lost": {str(i): _ranges(p) for i, p in sorted(self._lost.items())},
      "repeated": _ranges(self._twice),
    }

  @classmethod
  def of(cls, state: Mapping[str, Any]) -> "Ledger":
    """The ledger of a `state`; every holder is away, and has said all."""
    ledger = cls(state["limit"])
    ledger.low = state["low"]
    ledger._done = _places(state["done"])
    ledger._twice = _places(state["repeated"])
    for learner, ranges in state["lost"].items():
      ledger._lost[int(learner)] = _places(ranges)
    for learner, units in state["claims"].items():
      holder = ledger._holders.setdefault(int(learner), Holder())
      for place, offset in units:
        ledger._give(int(learner), holder, place, Held(offset, offset))
    for place, start, offset in state["left"]:
      ledger._left[place] = Held(start, offset)
    return ledger


def _ranges(places: Iterable[int]) -> list[list[int]]:
  """[first, last] of every unbroken stretch."""
  found: list[list[int]] = []
  for place in sorted(places):
    if found and found[-1][1] == place - 1:
      found[-1][1] = place
    else:
      found.append([place, place])
  return found


def _places(ranges: Iterable[Sequence[int]]) -> set[int]:
  return {place for first, last in ranges for place in range(first, last + 1)}
