"""One order of units for all hosts of a learner.

Rank 0 claims units and says in which order they come, beside what the hosts
agree on at each boundary (`link.agreement.Passed`); every host appends what it
is told. So each knows the same sequence after the same boundary, and which
batches it makes: a host never decides by its own clock whether there is one.
"""

import collections
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from decoupled.data.claimed import (
  FIRST_S,
  ClaimedBatches,
  Claims,
)
from decoupled.data.corpus import Bytes
from decoupled.data.pipeline import Item, Order

_PER_BOUNDARY = 4  # units that are told at once
_SILENT = np.iinfo(np.int32).min
# In place of a unit: nothing more; the end of the data, for now; and below
# that the sequences of no unit, number 0 at _UNCLAIMED, counted downwards.
_NONE, _END, _UNCLAIMED = -1, -2, -3
_AHEAD = 8  # steps for which units are told beforehand
_LEAST = 4  # steps; with fewer left nobody waits for a claim
_POLL_S = 0.02
_REMEMBERED = 256

Entry = tuple[int, int]  # place and offset


class Shared:
  """The sequence of units, as this host knows it.

  Args:
    rank: of this host.
    unit_windows: sequences of a unit.
    sequences: of a step over all hosts.

  Attributes:
    size: see `link.agreement.Passed`.
    items: batches that the sequence makes so far, ends of the data included.
    rows: sequences in it so far.
  """

  size = 1 + 2 * _PER_BOUNDARY

  def __init__(self, rank: int, unit_windows: int, sequences: int):
    self.items = 0
    self.rows = 0
    self._sequence: collections.deque[Entry] = collections.deque(
      maxlen=_REMEMBERED
    )
    self._rank = rank
    self._unit_windows = unit_windows
    self._sequences = sequences
    self._rows = 0  # of the batch that the sequence ends in
    self._known = 0
    self._offered: collections.deque[Entry] = collections.deque()
    self._told: collections.deque[Entry] = collections.deque()
    self._news = threading.Condition()

  # --- at a boundary; never waits ---------------------------------------------

  def offer(self) -> np.ndarray:
    """int32[size]: how many units are known, and those that come next."""
    lanes = np.full(self.size, _SILENT, np.int32)
    if self._rank:
      return lanes
    lanes[0] = self._known
    lanes[1:] = _NONE
    for i, entry in zip(
      range(_PER_BOUNDARY), tuple(self._offered), strict=False
    ):
      lanes[1 + 2 * i : 3 + 2 * i] = entry
    return lanes

  def told(self, lanes: np.ndarray) -> None:
    """Appends what is new of it."""
    base, entries = int(lanes[0]), lanes[1:].reshape(-1, 2).tolist()
    for number, (place, offset) in enumerate(entries, base):
      if place in (_NONE, _SILENT):
        return
      if number == self._known:
        if not self._rank:
          self._offered.popleft()
        self._append((place, offset))

  def resume(self, entries: Iterable[Entry]) -> None:
    """Goes on with what was told before; the same on every host."""
    for entry in entries:
      self._append(entry)

  def remaining(self, position: Entry) -> tuple[Entry, ...]:
    """What is told and not trained on, where that is at `position`."""
    places = [place for place, _ in self._sequence]
    if position[0] not in places:
      return ()
    at = len(places) - 1 - places[::-1].index(position[0])
    rest = list(self._sequence)[at + 1 :]
    begun = position[1] < self._unit_windows
    return (*([position] if begun else []), *rest)

  def _append(self, entry: Entry) -> None:
    self._known += 1
    self._sequence.append(entry)
    if entry[0] == _END:
      self.items += 2 if self._rows else 1  # what there is of a batch
      self._rows = 0
    else:
      new = self._unit_windows - entry[1]
      self.rows += new
      self._rows += new
      self.items += self._rows // self._sequences
      self._rows %= self._sequences
    with self._news:
      self._told.append(entry)
      self._news.notify_all()

  # --- beside it --------------------------------------------------------------

  def put(self, entry: Entry) -> None:
    """Rank 0: what comes next."""
    self._offered.append(entry)

  @property
  def full(self) -> bool:
    """Whether more than one boundary can tell is on offer."""
    return len(self._offered) >= _PER_BOUNDARY

  def take(self, limit_s: float) -> Entry | None:
    """The next unit to read; None if none is told within the limit."""
    with self._news:
      self._news.wait_for(lambda: bool(self._told), limit_s)
      return self._told.popleft() if self._told else None


class Proposer:
  """Rank 0: claims units ahead of what is trained on, on a thread.

  Args:
    shared: where they go.
    claims: where they come from.
    taken: how many batches have been taken.
    sequences: of a step over all hosts.
    unit_windows: sequences of a unit.
    who: for messages.
  """

  def __init__(
    self,
    shared: Shared,
    claims: Claims,
    taken: Callable[[], int],
    sequences: int,
    unit_windows: int,
    who: str,
  ):
    self._shared, self._claims, self._taken = shared, claims, taken
    self._sequences, self._unit_windows = sequences, unit_windows
    self._who = who
    self._rows = shared.rows  # those of before are there already
    self._wait_until = time.monotonic() + (0.0 if self._rows else FIRST_S)
    self._ended = False
    self._closed = threading.Event()
    threading.Thread(target=self._run, name="units", daemon=True).start()

  def close(self) -> None:
    self._closed.set()

  def _run(self) -> None:
    while not self._closed.is_set():
      if self._shared.full or self._ahead() >= _AHEAD:
        self._closed.wait(_POLL_S)
        continue
      claim = self._claims.take(self._may_wait)
      if claim is not None:
        self._put(claim.place, claim.offset)
      elif self._claims.ended:
        if self._claims.exhausted and not self._ended:
          self._ended = True
          self._shared.put((_END, 0))
        self._claims.wait(_POLL_S)
      elif not self._closed.is_set():
        self._put(_UNCLAIMED - self._claims.go_without(self._who), 0)

  def _put(self, place: int, offset: int) -> None:
    self._ended = False
    self._wait_until = 0.0  # from now on nobody waits
    self._rows += self._unit_windows - offset
    self._shared.put((place, offset))

  def _ahead(self) -> float:
    """Steps for which units are on offer or told, and not yet trained on."""
    return self._rows / self._sequences - self._taken()

  def _may_wait(self) -> bool:
    if self._closed.is_set():
      return False
    return self._ahead() > _LEAST or time.monotonic() < self._wait_until


class SharedBatches(ClaimedBatches):
  """A host's rows of the batches that the shared sequence makes.

  Args:
    text: the training bytes.
    order: which window each row of a place is; of one learner alone.
    claims: of rank 0; the other hosts claim nothing.
    shared: the sequence.
    sequences: sequences per step over all hosts of the learner.
    learner: id, for its own shuffle and for messages.
    host: rank of this host.
    hosts: number of hosts of the learner.
  """

  def __init__(
    self,
    text: Bytes,
    order: Order,
    claims: Claims,
    shared: Shared,
    sequences: int,
    *,
    learner: int,
    host: int,
    hosts: int,
  ):
    self._shared = shared
    self._handed_out = 0
    super().__init__(
      text, order, claims, sequences, learner=learner, host=host, hosts=hosts
    )
    self._proposer: Proposer | None = None
    if host == 0:
      self._proposer = Proposer(
        shared,
        claims,
        lambda: self._handed_out,
        sequences,
        order.unit_windows,
        f"learner {learner}",
      )

  @property
  def exhausted(self) -> bool:
    """Whether it is not known (yet) what comes next; alike on every host."""
    return self._handed_out >= self._shared.items

  def __next__(self) -> Item | None:
    """The next batch; None where there is none, as far as the hosts know."""
    if self.exhausted:
      return None
    self._handed_out += 1
    return super().__next__()

  def close(self) -> None:
    if self._proposer is not None:
      self._proposer.close()
    super().close()

  def _pieces(self) -> Iterator[np.ndarray | None]:
    room = self._sequences
    while not self._closed.is_set():
      entry = self._shared.take(_POLL_S)
      if entry is None:
        continue
      if entry[0] == _END:
        yield None
        room = self._sequences
        continue
      place, offset = entry
      claimed = place >= 0
      if not claimed:
        place, offset = self._private(_UNCLAIMED - place)
      while offset < self._order.unit_windows:
        count = min(room, self._order.unit_windows - offset)
        starts = self._order.starts(self._order.row((place, offset)), count)
        offset += count
        room = room - count or self._sequences
        if claimed:
          self._last = (place, offset)
        yield starts
