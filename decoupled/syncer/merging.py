"""An open round, and the CPU work that closing it takes."""

import dataclasses

from decoupled.algorithm import quorum
from decoupled.syncer import checks
from decoupled.syncer.model import GlobalFragment, GlobalModel
from decoupled.types import Contribution, OpenRound, Version


@dataclasses.dataclass
class Round:
  """An open round.

  Attributes:
    version: what closing it writes.
    fragment: which it visits.
    base: version of the fragment when it opened.
    opened: when.
    counted: False for the rounds of the drain.
    fresh: per learner when its first fresh report came.
    merging: its job has been handed out.
    decided: the last decision and what it was based on.
  """

  version: Version
  fragment: int
  base: Version
  opened: float
  counted: bool
  fresh: dict[int, float] = dataclasses.field(default_factory=dict)
  merging: bool = False
  decided: tuple[object, quorum.Decision] | None = None

  def announced(self) -> OpenRound:
    return OpenRound(self.version, self.fragment, self.base)


@dataclasses.dataclass
class MergeJob:
  """CPU work for one round; `run` touches nothing but this object.

  Attributes:
    spoilt: contributions that were finite, but whose merge was not; the round
      then closes unchanged.
    result: the successor of the fragment, after `run`.
  """

  model: GlobalModel
  round: Round
  contributions: tuple[Contribution, ...]
  weights: tuple[float, ...]
  rate_scale: float
  common_step: int
  decision: quorum.Decision
  alive: tuple[int, ...]
  closed_at: float
  spoilt: tuple[Contribution, ...] = ()
  result: GlobalFragment | None = None

  def run(self) -> None:
    self.result = self._merged()
    if not checks.all_finite((*self.result.arrays, *self.result.published)):
      self.spoilt, self.contributions = self.contributions, ()
      self.weights = ()
      self.result = self._merged()

  def _merged(self) -> GlobalFragment:
    return self.model.merged(
      self.round.fragment,
      self.round.version,
      self.contributions,
      self.weights,
      self.rate_scale,
      self.common_step,
      restored=not self.round.counted,
    )
