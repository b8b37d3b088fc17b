"""How the hosts of a learner agree on what a boundary does (design 4.9).

Each host writes down what it could do (`Bits`); the answer is the minimum and
the maximum over the hosts, lane by lane. A learner of one host answers itself
at once. Several hosts feed the bits into the inner step, whose own collective
returns both, and read them one step late. The boundary acts on the answer and
never knows where it came from.
"""

import collections
from typing import NamedTuple, Protocol

import numpy as np

from decoupled.types import NO_VERSION, Version

_CONTROL = 2  # stop, swap


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
  """

  staged: tuple[Version, ...]
  announced: tuple[Version, ...]
  stop: bool = False
  swap: bool = False
  held: tuple[Version, ...] = ()
  attempts: tuple[int, ...] = ()

  def lanes(self) -> np.ndarray:
    """int32[4P + 2], what a host feeds into the step."""
    flat = [n for version in self.staged for n in version]
    flat += [n for version in self.announced for n in version]
    return np.array([*flat, self.stop, self.swap], np.int32)


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
  """

  adopt: tuple[Version, ...]
  extract: tuple[Version, ...]
  stop: bool
  swap: bool
  held: tuple[Version, ...]
  attempts: tuple[int, ...]


def agree(low: np.ndarray, high: np.ndarray, fed: Bits) -> Agreed:
  """Reads the minimum and the maximum over the hosts' lanes of `fed`.

  Adoption and extraction need minimum = maximum: all hosts must hold the same
  bytes, and a round that not every host has heard of waits a step. Stopping
  and swapping follow the maximum: one host's word is enough.
  """
  half = (len(low) - _CONTROL) // 2
  return Agreed(
    adopt=_equal(low[:half], high[:half]),
    extract=_equal(low[half:-_CONTROL], high[half:-_CONTROL]),
    stop=bool(high[-2]),
    swap=bool(high[-1]),
    held=fed.held,
    attempts=fed.attempts,
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


class OneHost:
  """A learner of one host acts on its own bits at once."""

  def exchange(self, bits: Bits) -> Agreed:
    lanes = bits.lanes()
    return agree(lanes, lanes, bits)

  def pinned(self) -> tuple[Bits, ...]:
    return ()


class ByStep:
  """Several hosts: lanes go into the inner step, the answer comes from it.

  The loop takes `feed` as an input of the step it dispatches and hands the
  step's (minimum, maximum) to `answer` once the step has finished; the next
  boundary acts on it, one step late. Every host must hand in the same answers
  before the same boundary, however early it happens to have them.
  """

  def __init__(self, fragments: int):
    none = (NO_VERSION,) * fragments
    self._nothing = Bits(none, none, held=none, attempts=(0,) * fragments)
    self._fed: collections.deque[Bits] = collections.deque([self._nothing])
    self._agreed = self._no_answer()

  @property
  def feed(self) -> np.ndarray:
    """int32[4P + 2] for the step about to be dispatched."""
    return self._fed[-1].lanes()

  def answer(self, low: np.ndarray, high: np.ndarray) -> None:
    """The collective's result for the oldest bits not yet answered."""
    fed = self._fed.popleft() if self._fed else self._nothing
    self._agreed = agree(np.asarray(low), np.asarray(high), fed)

  def exchange(self, bits: Bits) -> Agreed:
    agreed, self._agreed = self._agreed, self._no_answer()
    self._fed.append(bits)
    return agreed

  def pinned(self) -> tuple[Bits, ...]:
    return tuple(self._fed)

  def _no_answer(self) -> Agreed:
    lanes = self._nothing.lanes()
    return agree(lanes, lanes, self._nothing)
