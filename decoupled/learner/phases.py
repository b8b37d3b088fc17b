"""When the parts of a learner's start were over."""

import time


class Phases:
  """Marks of one start; the first is where the process begins to work.

  What comes before it (interpreter, imports) lies between the moment at which
  the process was started and `booted`.
  """

  def __init__(self) -> None:
    self._at: dict[str, float] = {}
    self.mark("booted")

  def mark(self, name: str) -> None:
    """The part of that name is over now."""
    self._at[name] = time.monotonic()

  def mark_once(self, name: str) -> None:
    """As `mark`, unless that part was over before."""
    if name not in self._at:
      self.mark(name)

  def since(self, started_at: float) -> dict[str, float]:
    """The marks in seconds from a moment of the machine's monotonic clock."""
    return {name: round(at - started_at, 6) for name, at in self._at.items()}
