"""How the hosts of a learner agree on what a boundary does (design 4.9).

Each host writes down what it could do (`Bits`); the answer is the minimum and
the maximum over the hosts, lane by lane. A learner of one host answers itself
at once. Several hosts feed the bits into the inner step, whose own collective
returns both, and read them one step late; where no step is taken, a small
program of the same collective answers at once. The boundary acts on the answer
and never knows where it came from.

Hosts must come to the same boundaries in the same order, or they would wait for
each other in different programs for ever. So whatever decides about the next
step is either counted alike on every host or said here (`every`, `some`), and
acted upon only as it is read here.
"""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

from decoupled.types import NO_VERSION, Version

# Said by each host beside its bits: begun: it holds the run's parameters;
# ready: it has what else it needs for the first step; ended: the run is over
# for it; leave: it must go.
_WORDS = ("begun", "ready", "ended", "leave")
_FIXED = 3  # incarnation, stop, swap

Now: TypeAlias = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class Bits(NamedTuple):
  """What one host is ready for.

  Attributes:
    staged: per fragment the version that lies ready for adoption, NO_VERSION
      if none.
    announced: per fragment the round that wants an extraction, NO_VERSION if
      none.
    stop: whether to stop stepping.
    swap: whether to hand the role over.
    held: versions held when this was written down; equal on all hosts, hence
      not fed.
    attempts: per fragment how often the announced round had been extracted
      then; likewise.
    carries: per fragment whether the staged version can be carried on: what
      that subtracts is here.
    incarnation: the newest one that this host has joined as.
  """

  staged: tuple[Version, ...]
  announced: tuple[Version, ...]
  stop: bool = False
  swap: bool = False
  held: tuple[Version, ...] = ()
  attempts: tuple[int, ...] = ()
  carries: tuple[bool, ...] = ()
  incarnation: int = 0

  def lanes(self) -> np.ndarray:
    """int32[5P + 3], what a host feeds into the step."""
    flat = [n for version in self.staged for n in version]
    flat += [n for version in self.announced for n in version]
    flat += self.carries or [False] * len(self.staged)
    return np.array([*flat, self.incarnation, self.stop, self.swap], np.int32)


class Agreed(NamedTuple):
  """What the boundary may do.

  Attributes:
    adopt: per fragment the version that every host holds ready, or
      NO_VERSION.
    extract: per fragment the round that every host wants an extraction for,
      or NO_VERSION.
    stop: some host must stop.
    swap: some host must hand over.
    held: versions held when the bits were written down: an extraction they
      ask for is void where the version has changed since.
    attempts: likewise; void where it has been made since.
    carries: per fragment whether every host can carry the version on.
    incarnation: the one that every host has joined as, 0 where they differ.
  """

  adopt: tuple[Version, ...]
  extract: tuple[Version, ...]
  stop: bool
  swap: bool
  held: tuple[Version, ...]
  attempts: tuple[int, ...]
  carries: tuple[bool, ...]
  incarnation: int


def agree(low: np.ndarray, high: np.ndarray, fed: Bits) -> Agreed:
  """Reads the minimum and the maximum over the hosts' lanes of `fed`.

  Adoption and extraction need minimum = maximum: all hosts must hold the same
  bytes, and a round that not every host has heard of waits a step. Stopping
  and swapping follow the maximum: one host's word is enough.
  """
  P = (len(low) - _FIXED) // 5
  incarnation = int(low[5 * P])
  return Agreed(
    adopt=_equal(low[: 2 * P], high[: 2 * P]),
    extract=_equal(low[2 * P : 4 * P], high[2 * P : 4 * P]),
    stop=bool(high[5 * P + 1]),
    swap=bool(high[5 * P + 2]),
    held=fed.held,
    attempts=fed.attempts,
    carries=tuple(bool(n) for n in low[4 * P : 5 * P]),
    incarnation=incarnation if incarnation == high[5 * P] else 0,
  )


def _equal(low: np.ndarray, high: np.ndarray) -> tuple[Version, ...]:
  """Per fragment the version on which minimum and maximum agree."""
  pairs = zip(low.reshape(-1, 2), high.reshape(-1, 2), strict=True)
  return tuple(
    Version(int(lo[0]), int(lo[1])) if (lo == hi).all() else NO_VERSION
    for lo, hi in pairs
  )


class Agreement(Protocol):
  """Turns the bits fed at a boundary into what this boundary may do."""

  def exchange(self, bits: Bits) -> Agreed:
    """Feeds `bits`; returns the newest answer there is."""
    ...

  def pinned(self) -> tuple[Bits, ...]:
    """Bits fed whose answer is still to come: keep what they name."""
    ...

  def joined(self, incarnation: int) -> int:
    """The incarnation that every host has joined as; 0: not known (yet).

    Args:
      incarnation: that of this host.
    """
    ...

  def every(self, word: str, mine: bool) -> bool:
    """Whether every host says a word, as of the newest answer.

    Args:
      word: begun, ready or ended.
      mine: whether this host does, from now on.
    """
    ...

  def some(self, word: str, mine: bool) -> bool:
    """Likewise, whether any host says it (leave)."""
    ...


class OneHost:
  """A learner of one host acts on its own bits at once."""

  def exchange(self, bits: Bits) -> Agreed:
    lanes = bits.lanes()
    return agree(lanes, lanes, bits)

  def pinned(self) -> tuple[Bits, ...]:
    return ()

  def joined(self, incarnation: int) -> int:
    return incarnation

  def every(self, word: str, mine: bool) -> bool:
    del word
    return mine

  def some(self, word: str, mine: bool) -> bool:
    del word
    return mine


class Passed(Protocol):
  """What rank 0 says to the others beside its bits; see `data.shared`.

  Attributes:
    size: int32 numbers of it.
  """

  size: int

  def offer(self) -> np.ndarray:
    """int32[size]: what this host feeds; the maximum is told to all."""
    ...

  def told(self, lanes: np.ndarray) -> None:
    """int32[size]: the maximum over the hosts; on every host alike."""
    ...


class Nothing:
  """Nothing to say, on lanes of any size."""

  def __init__(self, size: int = 0):
    self.size = size

  def offer(self) -> np.ndarray:
    return np.zeros(self.size, np.int32)

  def told(self, lanes: np.ndarray) -> None:
    del lanes


def size(fragments: int, passed: int = 0) -> int:
  """How many lanes a host feeds."""
  return 5 * fragments + _FIXED + len(_WORDS) + passed


class ByStep:
  """Several hosts: lanes go into the inner step, the answer comes from it.

  The loop takes `feed` as an input of the step it dispatches and hands the
  step's minimum and maximum to `carried`, without waiting for them; a boundary
  reads those of the step before, one step late. A boundary that no step has
  come before (nothing took `feed`) asks `now`, and what steps still have under
  way is forgotten: whatever it was about is asked for again.

  Args:
    fragments: of the run.
    now: the collective by itself; waits for every host.
    passed: what rank 0 says to the others.
  """

  def __init__(
    self,
    fragments: int,
    now: Now | None = None,
    passed: Passed | None = None,
  ):
    none = (NO_VERSION,) * fragments
    self._nothing = Bits(none, none, held=none, attempts=(0,) * fragments)
    self._now = now
    self._passed = passed or Nothing()
    self._fed = self._nothing
    self._taken = False
    self._under_way: collections.deque[tuple[Bits, Any, Any]] = (
      collections.deque()
    )
    self._words = dict.fromkeys(_WORDS, False)
    self._said: dict[str, tuple[bool, bool]] = {}
    self._joined = 0

  @property
  def feed(self) -> np.ndarray:
    """int32[size(P, passed.size)] for the step about to be dispatched."""
    self._taken = True
    return self._lanes()

  def carried(self, low: Any, high: Any) -> None:
    """What the step that took `feed` will return, once it has finished."""
    self._under_way.append((self._fed, low, high))

  def exchange(self, bits: Bits) -> Agreed:
    if self._taken:
      self._taken = False
      agreed = self._late()
      self._fed = bits
    else:
      assert self._now is not None, "a boundary without a step before it"
      self._under_way.clear()
      self._fed = bits
      agreed = self._read(bits, *self._now(self._lanes()))
    self._joined = agreed.incarnation or self._joined
    return agreed

  def pinned(self) -> tuple[Bits, ...]:
    return (*(bits for bits, _, _ in self._under_way), self._fed)

  def joined(self, incarnation: int) -> int:
    del incarnation
    return self._joined

  def every(self, word: str, mine: bool) -> bool:
    self._words[word] = mine
    return self._said.get(word, (False, False))[0]

  def some(self, word: str, mine: bool) -> bool:
    self._words[word] = mine
    return self._said.get(word, (False, False))[1]

  def _lanes(self) -> np.ndarray:
    words = np.array(list(self._words.values()), np.int32)
    return np.concatenate([self._fed.lanes(), words, self._passed.offer()])

  def _late(self) -> Agreed:
    """The answer of the step before the last one dispatched."""
    if len(self._under_way) < 2:
      self._said = {}
      lanes = self._nothing.lanes()
      return agree(lanes, lanes, self._nothing)
    bits, low, high = self._under_way.popleft()
    return self._read(bits, jax.device_get(low), jax.device_get(high))

  def _read(self, bits: Bits, low: np.ndarray, high: np.ndarray) -> Agreed:
    end = len(bits.lanes())
    words = range(end, end + len(_WORDS))
    self._said = {
      word: (bool(low[i]), bool(high[i]))
      for word, i in zip(_WORDS, words, strict=True)
    }
    self._passed.told(np.asarray(high[end + len(_WORDS) :]))
    return agree(np.asarray(low[:end]), np.asarray(high[:end]), bits)
