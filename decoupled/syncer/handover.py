"""A learner that is asked to go, and the standby that prepares for its place.

While the old one trains, the standby takes over whatever it can beforehand.
Then the old one is told to stop and to leave, and the id is the standby's. A
handover that is given up costs nothing: the learner trains on.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from decoupled.errors import Refused
from decoupled.syncer.membership import Member

if TYPE_CHECKING:
  from decoupled.syncer.pool import Standby


@dataclasses.dataclass(eq=False)
class Handover:
  """From the request to the claim of the standby.

  Attributes:
    learner_id: who is to go.
    incarnation: of that one.
    standby: who takes its place.
    name: of that standby.
    due: when the next thing must have happened.
    prepared: the standby has what it can have; the learner is told to stop.
    over: None under way, "" once the standby has the id, else why not.
    told: called when it is over.
  """

  learner_id: int
  incarnation: int
  standby: "Standby"
  name: str
  due: float
  prepared: bool = False
  over: str | None = None
  told: Callable[[], None] = lambda: None

  def end(self, over: str) -> None:
    """It is over: "" for done, else why it was given up."""
    if self.over is None:
      self.over = over
      self.told()

  @property
  def stage(self) -> str:
    """In words, for people."""
    return (
      "the learner stops at its next boundary"
      if self.prepared
      else "it prepares while the learner trains"
    )


def check(member: Member) -> None:
  """Raises Refused where a learner cannot be replaced as planned."""
  if member.hosts > 1:
    raise Refused(
      "hosts",
      f"learner {member.learner_id} has {member.hosts} hosts: this version "
      "swaps learners of one host; it trains on",
    )
  if not (member.gives_state and (member.stepped or member.previous)):
    raise Refused(
      "early",
      f"learner {member.learner_id} ({member.holder}) has not finished a step "
      "yet: there is nothing to hand over; ask again",
    )
