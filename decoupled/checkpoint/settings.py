"""How often the parts of a job save themselves, and how much of it stays."""

import dataclasses
import math

from decoupled.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """How often syncer and learners save themselves while training goes on.

  Whichever interval is over first counts. A learner counts rounds in its own
  inner steps, H / P for each. A save that is still under way when the next
  one is due is not waited for: the next one comes after it.

  Attributes:
    every_rounds: rounds from one snapshot to the next; 0 = no such interval.
    every_s: seconds from one snapshot to the next; 0 = no such interval.
    least_s: seconds that lie at least between two snapshots made for
      `every_rounds`: where rounds are short, saving would cost too much.
    first_s: seconds from version 0 to the syncer's first snapshot; the next
      ones follow at twice the distance each until an interval takes over, so
      that a syncer that dies early loses half of the run at most; 0 = the
      intervals alone. Without an interval there is none of them.
    keep: how many of the newest snapshots stay, beside version 0.
    tape_mib: most that the contributions recorded with `--tape` may take, in
      MiB; the recording then ends, and says so.
  """

  every_rounds: int = 100
  every_s: float = 0.0
  least_s: float = 20.0
  first_s: float = 2.0
  keep: int = 3
  tape_mib: float = 1024.0

  def __post_init__(self) -> None:
    if self.every_rounds < 0:
      raise ConfigError(
        f"Checkpoint.every_rounds = {self.every_rounds} must be at least 0 "
        "(0 = no such interval)"
      )
    if not (math.isfinite(self.tape_mib) and self.tape_mib > 0):
      raise ConfigError(
        f"Checkpoint.tape_mib = {self.tape_mib} must be a size in MiB above 0 "
        "(without --tape nothing is recorded)"
      )
    for name in ("every_s", "least_s", "first_s"):
      value = getattr(self, name)
      if not (math.isfinite(value) and value >= 0):
        raise ConfigError(
          f"Checkpoint.{name} = {value} must be a number of seconds, at least "
          "0 (0 = no such interval)"
        )
    if self.keep < 1:
      raise ConfigError(
        f"Checkpoint.keep = {self.keep} must be at least 1: the newest one "
        "always stays"
      )

  def due(self, rounds: float, seconds: float) -> bool:
    """Whether to save, so long after the last time."""
    by_rounds = 0 < self.every_rounds <= rounds and seconds >= self.least_s
    return by_rounds or 0 < self.every_s <= seconds

  def due_early(self, seconds: float, age_s: float) -> bool:
    """Whether to save before an interval is over, since the run is young.

    Args:
      seconds: since the last snapshot.
      age_s: of the run at that time, since version 0.
    """
    return (
      self.first_s > 0
      and (self.every_rounds > 0 or self.every_s > 0)
      and seconds >= max(self.first_s, age_s)
    )
