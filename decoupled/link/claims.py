"""What a link passes on about units of the corpus, for a loop that claims any.

A loop with data of its own (the library door) needs none of it.
"""

from typing import Protocol

from decoupled.types import Claim


class DataClaims(Protocol):
  """The units that a learner holds; called on the link's threads.

  Attributes:
    wants: how many unfinished units to hold.
    unclaimed: units begun without a claim.
  """

  wants: int
  unclaimed: int

  def word(self, claims: tuple[Claim, ...], ended: bool) -> None:
    """Takes the syncer's word: these units, and none but these."""

  def held(self, position: tuple[int, int]) -> tuple[Claim, ...]:
    """What to report of a loop that has come to `position`."""

  def rejoined(self) -> None:
    """Another syncer may not know what the last one was told."""


class NoClaims:
  """A loop with data of its own."""

  wants = 0
  unclaimed = 0

  def word(self, claims: tuple[Claim, ...], ended: bool) -> None:
    del claims, ended

  def held(self, position: tuple[int, int]) -> tuple[Claim, ...]:
    del position
    return ()

  def rejoined(self) -> None:
    return
