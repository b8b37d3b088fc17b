"""From bytes to batches: index-based, so a position is two numbers.

The corpus is cut into windows of `context` bytes (plus the next one as the
last target), the windows into *units*: unit u of U holds windows u, u + U,
u + 2U, ..., so that every unit is a sample of the whole corpus and units share
nothing. Each epoch shifts all windows by a few bytes and shuffles the units;
within a unit the windows are shuffled. A unit is named by its *place* in the
endless sequence of epochs; the learners of a run claim places from the syncer
(`claimed`).

Without one (`Batches`) learner m of M takes the places m, m + M, m + 2M, ...
Row r of it is then a function of (seed, learner, learners, r), and its position
(r // unit_windows, r % unit_windows) is all there is to save.
"""

import functools
import queue
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, Self, TypeAlias

import grain
import jax
import numpy as np

from decoupled.data.corpus import Bytes
from decoupled.errors import ConfigError, DecoupledError

Position: TypeAlias = tuple[int, int]

_ENDLESS = 1 << 40  # steps; a source must have a length
_LEAST_UNITS = 16  # a small corpus gets smaller units rather than fewer
_POLL_S = 0.2


class Item(NamedTuple):
  """What the loop gets.

  Attributes:
    rows: int32[sequences of this host, context + 1].
    position: (unit, offset) after these rows.
  """

  rows: np.ndarray
  position: Position


class Order:
  """Which window each row of a learner is.

  Args:
    size: bytes of the text.
    context: tokens a sequence predicts.
    seed: of the shuffles.
    learner: which learner.
    learners: of how many.
    unit_windows: windows per unit, at most.

  Raises:
    ConfigError: the text is too short, or the learner does not exist.
  """

  def __init__(
    self,
    size: int,
    context: int,
    *,
    seed: int = 0,
    learner: int = 0,
    learners: int = 1,
    unit_windows: int = 256,
  ):
    if not 0 <= learner < learners:
      raise ConfigError(
        f"learner {learner} is not one of {learners} learners: ids go from 0 "
        f"to {learners - 1}"
      )
    windows = (size - context) // context  # room for the shift of an epoch
    if windows < 1:
      raise ConfigError(
        f"{size} bytes of text are too few for Corpus.context = {context}"
      )
    self.unit_windows = min(unit_windows, max(1, windows // _LEAST_UNITS))
    self.units = windows // self.unit_windows
    self.context = context
    self._seed = seed % 2**32
    self._learner, self._learners = learner, learners
    self._units_of = functools.lru_cache(maxsize=2)(self._shuffle_units)
    self._windows_of = functools.lru_cache(maxsize=2)(self._shuffle_windows)

  def starts(self, first_row: int, count: int) -> np.ndarray:
    """int64[count], the first byte of each row from `first_row` on."""
    return np.array(
      [self._start(row) for row in range(first_row, first_row + count)],
      np.int64,
    )

  def position(self, row: int) -> Position:
    """(unit, offset) of a row; units are counted per learner."""
    return divmod(row, self.unit_windows)

  def row(self, position: Position) -> int:
    """Inverse of `position`."""
    unit, offset = position
    return unit * self.unit_windows + offset

  def unit(self, nth: int) -> tuple[int, int]:
    """(epoch, unit of the corpus) of the n-th unit of this learner."""
    place = self._learner + nth * self._learners
    epoch, index = divmod(place, self.units)
    return epoch, int(self._units_of(epoch)[index])

  def _start(self, row: int) -> int:
    nth, offset = self.position(row)
    epoch, unit = self.unit(nth)
    shift, order = self._windows_of(epoch, unit)
    return int(shift + (order[offset] * self.units + unit) * self.context)

  def _shuffle_units(self, epoch: int) -> np.ndarray:
    return self._random(epoch, 0).permutation(self.units)

  def _shuffle_windows(self, epoch: int, unit: int) -> tuple[int, np.ndarray]:
    shift = int(self._random(epoch, 1).randint(self.context))
    return shift, self._random(epoch, 2 + unit).permutation(self.unit_windows)

  def _random(self, epoch: int, purpose: int) -> np.random.RandomState:
    """Its stream is frozen for good, unlike that of NumPy's generators."""
    return np.random.RandomState([self._seed, epoch, purpose])


class Steps:
  """A Grain source whose element k is the batch of the k-th step from here.

  Args:
    text: the training bytes.
    order: which window each row is.
    first_row: the row at which step 0 begins.
    sequences: rows of a step over all hosts.
    host: rank of this host in its learner.
    hosts: number of hosts of the learner.
  """

  def __init__(
    self,
    text: Bytes,
    order: Order,
    first_row: int,
    sequences: int,
    host: int = 0,
    hosts: int = 1,
  ):
    if sequences % hosts:
      raise ConfigError(
        f"Batch.sequences = {sequences} cannot be divided among {hosts} hosts"
      )
    self._text, self._order = text, order
    self._first_row, self._sequences = first_row, sequences
    self._per_host = sequences // hosts
    self._skip = host * self._per_host
    self._window = np.arange(order.context + 1)

  def __len__(self) -> int:
    return _ENDLESS

  def __getitem__(self, step: Any) -> Item:
    first = self._first_row + int(step) * self._sequences
    starts = self._order.starts(first + self._skip, self._per_host)
    rows = self._text[starts[:, None] + self._window].astype(np.int32)
    return Item(rows, self._order.position(first + self._sequences))


class ReadAhead:
  """Batches of one learner, read ahead by a thread of their own.

  Args:
    who: whose they are, for messages.
    position: (unit, offset) before the first one.
    prefetch: batches held ready.
    stall_s: longest wait for a batch.
  """

  def __init__(
    self, who: str, position: Position, prefetch: int, stall_s: float
  ):
    self._position = position
    self._who = who
    self._stall_s = stall_s
    self._ready: queue.Queue[Item | Exception | None] = queue.Queue(prefetch)
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._load, name="data", daemon=True)

  def _items(self) -> Iterator[Item | None]:
    """What to hand out, in order; None where the data is at its end."""
    raise NotImplementedError

  @property
  def position(self) -> Position:
    """(unit, offset) after the last batch handed out."""
    return self._position

  @property
  def exhausted(self) -> bool:
    """Whether the data is at its end."""
    return False

  def __iter__(self) -> Iterator[Item | None]:
    return self

  def __next__(self) -> Item | None:
    """The next batch; waits at most `stall_s`.

    Returns:
      None where the data is at its end, for now at least.

    Raises:
      DecoupledError: the loader stalled or failed.
    """
    if self._closed.is_set():
      raise StopIteration
    try:
      item = self._ready.get(timeout=self._stall_s)
    except queue.Empty:
      raise DecoupledError(
        f"data: no batch for {self._who} within {self._stall_s:g} s, after "
        f"(unit, offset) = {self._position}: the loader has stalled"
      ) from None
    if isinstance(item, Exception):
      self.close()
      raise DecoupledError(
        f"data: the loader of {self._who} failed after (unit, offset) = "
        f"{self._position}: {item}"
      ) from item
    if item is not None:
      self._position = item.position
    return item

  def close(self) -> None:
    """Stops the thread; the iteration then ends."""
    self._closed.set()
    if threading.current_thread() is not self._thread:
      self._thread.join(timeout=5.0)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _load(self) -> None:
    try:
      for item in self._items():
        if not self._hand_over(item):
          return
    except Exception as error:  # raised again where it is waited for
      self._hand_over(error)

  def _hand_over(self, item: Item | Exception | None) -> bool:
    """Waits for room; False once closed."""
    while not self._closed.is_set():
      try:
        self._ready.put(item, timeout=_POLL_S)
      except queue.Full:
        continue
      return True
    return False


class Batches(ReadAhead):
  """Endless batches of one learner of a fixed number, without a syncer.

  Iterating yields (rows, position after them); a new object at that position
  yields exactly the rows that would have followed.

  Args:
    text: the training bytes.
    context: tokens a sequence predicts.
    sequences: sequences per step over all hosts of the learner.
    seed: of the shuffles.
    learner: which learner.
    learners: of how many; the number is part of the order.
    position: where to begin.
    host: rank of this host, which gets its share of each batch.
    hosts: number of hosts of the learner.
    unit_windows: windows per unit.
    prefetch: batches held ready.
    stall_s: longest wait for a batch.

  Raises:
    ConfigError: too little text, or sizes that do not divide.
  """

  def __init__(
    self,
    text: Bytes,
    context: int,
    sequences: int,
    *,
    seed: int = 0,
    learner: int = 0,
    learners: int = 1,
    position: Position = (0, 0),
    host: int = 0,
    hosts: int = 1,
    unit_windows: int = 256,
    prefetch: int = 4,
    stall_s: float = 60.0,
  ):
    super().__init__(f"learner {learner}", position, prefetch, stall_s)
    self.order = Order(
      len(text),
      context,
      seed=seed,
      learner=learner,
      learners=learners,
      unit_windows=unit_windows,
    )
    steps = Steps(
      text, self.order, self.order.row(position), sequences, host, hosts
    )
    self._dataset = grain.MapDataset.source(steps)
    self._thread.start()

  def _items(self) -> Iterator[Item]:
    for step in range(_ENDLESS):
      yield self._dataset[step]


def batch_spec(context: int, sequences: int) -> jax.ShapeDtypeStruct:
  """What a learner's step is compiled for: int32[sequences, context + 1]."""
  return jax.ShapeDtypeStruct((sequences, context + 1), np.int32)


def heldout_batches(
  text: Bytes, context: int, sequences: int, count: int = 0
) -> Iterator[np.ndarray]:
  """Batches for evaluation, spread evenly over the text; always the same.

  Args:
    text: the held-out bytes.
    context: tokens a sequence predicts.
    sequences: rows of a batch.
    count: number of batches; 0, or more than there are, is all of them.

  Yields:
    int32[sequences, context + 1]; windows share no target.

  Raises:
    ConfigError: the text does not fill one batch.
  """
  windows = (len(text) - 1) // context
  available = windows // sequences
  if not available:
    raise ConfigError(
      f"the held-out text has {max(windows, 0)} windows of {context} tokens, a "
      f"batch takes {sequences}: give more text or evaluate smaller batches"
    )
  count = min(count or available, available)
  rows = count * sequences
  starts = np.arange(rows, dtype=np.int64) * windows // rows * context
  offsets = np.arange(context + 1)
  for batch in starts.reshape(count, sequences):
    yield text[batch[:, None] + offsets].astype(np.int32)
