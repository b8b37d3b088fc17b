"""What a link needs of the network; gRPC and the in-memory wire provide it."""

from collections.abc import Callable
from typing import Protocol

from decoupled.types import (
  Announcement,
  Arrays,
  Contribution,
  Hello,
  MergedFragment,
  Report,
  Version,
  Welcome,
)


class LearnerWire(Protocol):
  """One learner's connection to its syncer; usable again after a loss.

  Attributes:
    peer: the syncer's address, for messages.
  """

  peer: str

  def hello(self, hello: Hello) -> Welcome:
    """Claims a learner id; blocks up to the wire's limit.

    Raises:
      Refused: the syncer declined, with its reason.
      Unreachable: nobody answered; the message names the address.
    """

  def listen(
    self,
    on_announcement: Callable[[Announcement], None],
    on_lost: Callable[[str], None],
  ) -> None:
    """Opens the control stream on a thread of its own.

    Args:
      on_announcement: called with the newest announcement; one that comes
        while it runs replaces those before it.
      on_lost: called once, with the cause, when the stream ends unasked.
    """

  def report(self, report: Report) -> None:
    """Sends the newest report; never blocks.

    A report that has not gone out yet is replaced; its `step_ends_s` are
    carried over into the newer one.
    """

  def contribute(self, contribution: Contribution, base: Arrays | None) -> str:
    """Sends one copy; blocks up to the wire's limit.

    Args:
      contribution: the copy.
      base: arrays of its base version, for a codec below float32.

    Returns:
      "" or the word under which the syncer refused it.

    Raises:
      Unreachable: the transfer failed or took too long.
    """

  def fetch(
    self, fragment: int, held: Version, base: Arrays | None
  ) -> MergedFragment:
    """Gets the newest version of a fragment; blocks up to the wire's limit.

    Args:
      fragment: which.
      held: the version that the learner holds.
      base: that version's arrays, None if they are gone.

    Raises:
      Refused: the syncer declined, with its reason.
      Unreachable: the transfer failed or took too long.
    """

  def leave(self, why: str = "") -> None:
    """Goes of its own will: ends the control stream after saying so."""

  def close(self) -> None:
    """Releases connections and threads; without `leave`, a silent death."""
