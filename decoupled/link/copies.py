"""Host copies of extracted fragments, kept until their round is over.

Shared by the background threads of a link; the loop's own thread never
touches it.
"""

import dataclasses
import threading

from decoupled.link.ops import DeviceArrays
from decoupled.types import Arrays, CopyHeader, CopyId, Slice, Version


@dataclasses.dataclass(frozen=True)
class HostCopy:
  """One extraction that has landed.

  Attributes:
    header: id, base and counters.
    arrays: float32 host arrays; repeated pulls send these same bytes.
    device: the extracted units on the device (`carry` needs them).
    step: the learner's step at the extraction.
    tokens: its tokens then.
    slices: what `arrays` are of a learner of several hosts; () is the whole.
  """

  header: CopyHeader
  arrays: Arrays
  device: DeviceArrays
  step: int
  tokens: int
  slices: tuple[Slice, ...] = ()


class Copies:
  """At most one copy for each round, hence at most P at a time."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._by_round: dict[tuple[int, int], HostCopy] = {}

  def add(self, copy: HostCopy) -> None:
    key = copy.header.copy
    with self._lock:
      # round 0 seeds every fragment; other rounds visit just one
      self._by_round[(key.round, key.fragment)] = copy

  def get(self, copy: CopyId) -> HostCopy | None:
    with self._lock:
      found = self._by_round.get((copy.round, copy.fragment))
    return found if found is not None and found.header.copy == copy else None

  def headers(self) -> tuple[CopyHeader, ...]:
    with self._lock:
      return tuple(self._by_round[key].header for key in sorted(self._by_round))

  def drop(self, copy: CopyId) -> None:
    with self._lock:
      found = self._by_round.get((copy.round, copy.fragment))
      if found is not None and found.header.copy == copy:
        del self._by_round[(copy.round, copy.fragment)]

  def drop_older(self, term: int, versions: tuple[Version, ...]) -> None:
    """Forgets copies whose fragment has moved on, or of another term.

    A copy stays until its own round's version is known to be *held*, since
    `carry` subtracts it at the adoption.
    """
    with self._lock:
      self._by_round = {
        key: c
        for key, c in self._by_round.items()
        if c.header.copy.term == term
        and versions[c.header.copy.fragment]
        < Version(term, c.header.copy.round)
      }

  def clear(self) -> None:
    with self._lock:
      self._by_round.clear()
