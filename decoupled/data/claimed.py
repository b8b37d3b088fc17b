"""Batches of units that a learner claims through the syncer.

Three parties share a `Claims`: the link's threads bring the syncer's word and
take what is to be reported, the thread that reads ahead takes units. The
training loop touches it never. A few units are held ahead, so that nobody
waits for an answer; where they run out all the same (the syncer is away for
long), the learner goes on with sequences that belong to no claim: a shuffle of
the corpus that no place of the ledger has and that is the learner's own. They
are counted (`unclaimed`), and no unit is lost or repeated by them.
"""

import collections
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from decoupled.data.corpus import Bytes
from decoupled.data.pipeline import Item, Order, Position, ReadAhead
from decoupled.errors import ConfigError
from decoupled.types import Claim

_LOG = logging.getLogger("decoupled.data")

_STEPS_AHEAD = 24  # what is held beside the unit in use lasts so many steps
_LEAST_AHEAD = 2
_MOST_AHEAD = 32
_REMEMBERED = 64  # finished units that a new syncer is told of
_POLL_S = 0.02
FIRST_S = 30.0  # how long the first unit is waited for: longer than a lease
_PRIVATE_EPOCH = 1 << 31  # epochs from here on are in no ledger
_PRIVATE_LEARNERS = 1 << 16
_PRIVATE_EPOCHS = 1 << 15  # an epoch has to stay below 1 << 32


class Claims:
  """The units that a learner holds, as it knows it.

  Args:
    unit_windows: sequences of a unit.
    sequences: of a step over all hosts.

  Attributes:
    wants: how many unfinished units to hold.
    unclaimed: units begun without a claim.
    ended: nobody can claim more, as far as is known.
    exhausted: nor is anything left of what was claimed.
  """

  def __init__(self, unit_windows: int, sequences: int):
    ahead = -(-_STEPS_AHEAD * sequences // unit_windows)
    self.wants = 1 + min(max(ahead, _LEAST_AHEAD), _MOST_AHEAD)
    self.unclaimed = 0
    self.exhausted = False
    self._unit_windows = unit_windows
    self._changed = threading.Condition()
    self._waiting: list[Claim] = []  # held, and not begun
    self._taken: list[Claim] = []  # begun, or about to be, in their order
    self._done: list[int] = []  # finished, and still listed by the syncer
    self._lately: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
    self.ended = False
    self._said = False

  @property
  def ready(self) -> bool:
    """Whether there is a unit to begin with, or none left for anybody."""
    return bool(self._waiting or self._taken) or self.ended

  def resume(self, claims: Iterable[Claim]) -> None:
    """These were begun before, and are gone on with from their offsets."""
    with self._changed:
      self._taken = list(claims)

  # --- for the link -----------------------------------------------------------

  def word(self, claims: tuple[Claim, ...], ended: bool) -> None:
    """Takes the syncer's word: these units, and none but these.

    What was begun is finished even if somebody else has it by now; what was
    not begun is given up.
    """
    with self._changed:
      listed = {claim.place for claim in claims}
      self._done = [place for place in self._done if place in listed]
      mine = {*self._done, *(claim.place for claim in self._taken)}
      self._waiting = [claim for claim in claims if claim.place not in mine]
      self.ended = ended
      self._look()
      self._changed.notify_all()

  def held(self, position: Position) -> tuple[Claim, ...]:
    """What to report of a loop that has come to `position`."""
    with self._changed:
      self._advance(*position)
      finished = [Claim(p, self._unit_windows, done=True) for p in self._done]
      return (*finished, *self._taken, *self._waiting)

  def rejoined(self) -> None:
    """Another syncer may not know what the last one was told lately."""
    with self._changed:
      self._done = list(self._lately)

  def _advance(self, place: int, offset: int) -> None:
    """Units are used up in the order in which they were taken."""
    places = [claim.place for claim in self._taken]
    if place not in places:
      return
    at = places.index(place)
    if offset <= self._taken[at].offset:
      return  # no news: the loop has not come so far yet
    used = self._taken[:at]
    now, rest = self._taken[at], self._taken[at + 1 :]
    if offset >= self._unit_windows:
      used.append(now)
    else:
      rest.insert(0, now._replace(offset=max(now.offset, offset)))
    self._done += [claim.place for claim in used]
    self._lately += [claim.place for claim in used]
    self._taken = rest

  def _look(self) -> None:
    self.exhausted = self.ended and not self._waiting

  # --- for the thread that reads ahead --------------------------------------

  def take(self, may_wait: Callable[[], bool]) -> Claim | None:
    """The next unit to read; None where there is none.

    Args:
      may_wait: whether an answer may still be waited for; asked again and
        again.
    """
    with self._changed:
      while not self._waiting:
        if self.ended or not may_wait():
          return None
        self._changed.wait(_POLL_S)
      claim = self._waiting.pop(0)
      self._taken.append(claim)
      self._look()
      self._said = False
      return claim

  def wait(self, limit_s: float) -> None:
    """Returns when the syncer has spoken, or after the limit."""
    with self._changed:
      self._changed.wait(limit_s)

  def go_without(self, who: str) -> int:
    """Counts a unit that nobody has claimed; returns its number from 0."""
    self.unclaimed += 1
    if not self._said:
      self._said = True
      _LOG.warning(
        "%s has used up the units it had claimed, and no syncer has given it "
        "more: it goes on with sequences of no unit (data.units_unclaimed)",
        who,
      )
    return self.unclaimed - 1


class ClaimedBatches(ReadAhead):
  """Batches of whatever units are claimed; see the module docstring.

  Args:
    text: the training bytes.
    order: which window each row of a place is; of one learner alone.
    claims: where units come from.
    sequences: sequences per step over all hosts of the learner.
    learner: id, for its own shuffle and for messages.
    host: rank of this host, which gets its share of each batch.
    hosts: number of hosts of the learner.
    prefetch: batches held ready.
    stall_s: longest wait for a batch.
    first_s: how long the first unit is waited for.

  Raises:
    ConfigError: sizes that do not divide.
  """

  def __init__(
    self,
    text: Bytes,
    order: Order,
    claims: Claims,
    sequences: int,
    *,
    learner: int = 0,
    host: int = 0,
    hosts: int = 1,
    prefetch: int = 4,
    stall_s: float = 60.0,
    first_s: float = FIRST_S,
  ):
    super().__init__(f"learner {learner}", (0, 0), prefetch, stall_s)
    if sequences % hosts:
      raise ConfigError(
        f"Batch.sequences = {sequences} cannot be divided among {hosts} hosts"
      )
    self._text, self._order, self._claims = text, order, claims
    self._sequences, self._learner = sequences, learner
    share = sequences // hosts
    self._mine = slice(host * share, (host + 1) * share)
    self._window = np.arange(order.context + 1)
    self._wait_until = time.monotonic() + first_s
    self._at_end = False
    self._last = (0, 0)  # where reading ahead is
    self._thread.start()

  @property
  def exhausted(self) -> bool:
    """Whether the data is at its end; asked after a batch that was None."""
    return self._at_end and self._ready.empty()

  def _items(self) -> Iterator[Item | None]:
    pieces = self._pieces()
    parts: list[np.ndarray] = []
    for piece in pieces:
      if piece is not None:
        parts.append(piece)
        if sum(map(len, parts)) < self._sequences:
          continue
      if parts:
        # the very last batch is filled up with its own rows
        starts = np.resize(np.concatenate(parts), self._sequences)
        parts = []
        yield self._item(starts)
      if piece is None:
        yield None

  def _pieces(self) -> Iterator[np.ndarray | None]:
    """First bytes of rows, never beyond a batch; None at the end of data."""
    room = self._sequences
    while not self._closed.is_set():
      claim = self._claims.take(self._may_wait)
      if claim is None and self._claims.ended:
        if self._claims.exhausted:
          self._at_end = True
          yield None  # what there was of a batch has been handed out
          room = self._sequences
        while self._claims.exhausted and not self._closed.is_set():
          self._claims.wait(_POLL_S)
        continue
      self._at_end = False
      if self._closed.is_set():
        return
      self._wait_until = 0.0  # from now on nobody waits
      place, offset = self._unclaimed() if claim is None else claim[:2]
      while offset < self._order.unit_windows:
        count = min(room, self._order.unit_windows - offset)
        starts = self._order.starts(self._order.row((place, offset)), count)
        offset += count
        room = room - count or self._sequences
        if claim is not None:
          self._last = (place, offset)
        yield starts

  def _may_wait(self) -> bool:
    """Whether the loop has batches enough while an answer is waited for."""
    if self._closed.is_set():
      return False
    return self._ready.qsize() > 1 or time.monotonic() < self._wait_until

  def _unclaimed(self) -> Position:
    """The next unit of this learner's own shuffle, as a place."""
    return self._private(self._claims.go_without(self._who))

  def _private(self, nth: int) -> Position:
    """The n-th unit of this learner's own shuffle."""
    epoch, index = divmod(nth, self._order.units)
    own = self._learner % _PRIVATE_LEARNERS
    epoch = _PRIVATE_EPOCH + epoch % _PRIVATE_EPOCHS * _PRIVATE_LEARNERS + own
    return epoch * self._order.units + index, 0

  def _item(self, starts: np.ndarray) -> Item:
    rows = self._text[starts[self._mine, None] + self._window]
    return Item(rows.astype(np.int32), self._last)
