"""One simulated job: its chips, how they fail, how it recovers, its policy.

Everything is plain frozen data, checked where it is made. Times are seconds
unless a name says days.
"""

import dataclasses
import math

from decoupled.algorithm.policy import Exchange, one_of
from decoupled.errors import ConfigError
from decoupled.simulate.ranges import at_least, positive, whole
from decoupled.simulate.result import POLICIES

# Fitted to the ten data-parallel cells of the published goodput table, which
# no paper explains by constants of its own: `python -m decoupled.simulate.fit`
# prints them again. All else in this file is given or assumed, not fitted.
RIGID_RESTART_S = 76.0
ELASTIC_STOP_S = 19.0
ELASTIC_REJOIN_S = 60.0

MOST_ABSENCES = 2_000_000  # each takes about a kilobyte and 30 microseconds


@dataclasses.dataclass(frozen=True)
class Correlated:
  """Failures that take a whole group of neighbouring chips at once.

  Attributes:
    chips: size of a group (a rack, a slice, a site); groups are cut from each
      learner's chips in order.
    mtbi_days: mean time between two failures of one group.
    return_s: mean time until the group is back (exponential).
  """

  chips: int
  mtbi_days: float
  return_s: float = 3600.0

  def __post_init__(self) -> None:
    whole("Correlated.chips", self.chips, 1)
    positive("Correlated.mtbi_days", self.mtbi_days, endless=True)
    positive("Correlated.return_s", self.return_s)


@dataclasses.dataclass(frozen=True)
class Maintenance:
  """Planned absences, announced in time: nothing is detected or lost.

  Attributes:
    chips: how many leave together.
    every_days: each group leaves once in this time; groups take turns.
    lasts_s: how long it stays away.
  """

  chips: int
  every_days: float
  lasts_s: float = 3600.0

  def __post_init__(self) -> None:
    whole("Maintenance.chips", self.chips, 1)
    positive("Maintenance.every_days", self.every_days, endless=True)
    positive("Maintenance.lasts_s", self.lasts_s)
    if self.lasts_s >= self.every_days * 86400:
      raise ConfigError(
        f"Maintenance.lasts_s = {self.lasts_s} must be below every_days = "
        f"{self.every_days} ({self.every_days * 86400:.0f} s)"
      )


@dataclasses.dataclass(frozen=True)
class Stragglers:
  """Chips that become slow for a while; their learner waits for them.

  Attributes:
    mtbi_chip_days: mean time between two slow spells of one chip.
    slowdown: factor on the learner's step meanwhile.
    lasts_s: mean length of a spell (exponential).
  """

  mtbi_chip_days: float = math.inf
  slowdown: float = 1.25
  lasts_s: float = 600.0

  def __post_init__(self) -> None:
    positive("Stragglers.mtbi_chip_days", self.mtbi_chip_days, endless=True)
    at_least("Stragglers.slowdown", self.slowdown, 1.0)
    positive("Stragglers.lasts_s", self.lasts_s)


@dataclasses.dataclass(frozen=True)
class Failures:
  """How chips fail and return.

  Attributes:
    mtbi_chip_days: mean time between interruptions of one chip, counted from
      its return; inf = never.
    shape: Weibull shape of that time; 1 = exponential. Chips are met in the
      middle of their lives, so the rate is the same from the first second.
    return_s: mean time until a failed chip is back.
    return_shape: Weibull shape of that time.
    correlated: failures of whole groups, on top.
    maintenance: planned absences, on top.
    stragglers: slow spells, on top.
  """

  mtbi_chip_days: float = 365.25
  shape: float = 1.0
  return_s: float = 600.0
  return_shape: float = 1.0
  correlated: tuple[Correlated, ...] = ()
  maintenance: tuple[Maintenance, ...] = ()
  stragglers: Stragglers = Stragglers()

  def __post_init__(self) -> None:
    positive("Failures.mtbi_chip_days", self.mtbi_chip_days, endless=True)
    positive("Failures.shape", self.shape)
    positive("Failures.return_s", self.return_s)
    positive("Failures.return_shape", self.return_shape)


@dataclasses.dataclass(frozen=True)
class Recovery:
  """How long a job, or a learner, stands still when its chips change.

  A change that comes while it stands still already is handled by the same
  stop and costs nothing more.

  Attributes:
    detect_s: until a failure is noticed; 0 where the times below contain it.
    restart_s: dp_rigid: stop of the whole job, for a failure and again to
      take returned chips back.
    scale_down_s: stop of an elastic job to go on with fewer chips.
    scale_up_s: stop of an elastic job to take returned chips back.
    rejoin_s: how long an elastic job waits for further returned chips, or for
      a stop that happens anyway, before it stops to take them back.
    swap_s: stop while a standby takes the place of what failed
      (TrainMover, unexpected failure with standby, 1,024 GPUs: 21 s).
    checkpoint_interval_s: dp_rigid loses what it did since the last
      checkpoint; 0 = each step, or contained in restart_s.
    growth: relative growth of all these times per doubling of the job's (or
      learner's) chips beyond `growth_from`.
    growth_from: chips for which the times hold as given.
  """

  detect_s: float = 0.0
  restart_s: float = RIGID_RESTART_S
  scale_down_s: float = ELASTIC_STOP_S
  scale_up_s: float = ELASTIC_STOP_S
  rejoin_s: float = ELASTIC_REJOIN_S
  swap_s: float = 21.0
  checkpoint_interval_s: float = 0.0
  growth: float = 0.0
  growth_from: int = 150_000

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      at_least(f"Recovery.{field.name}", getattr(self, field.name), 0.0)
    whole("Recovery.growth_from", self.growth_from, 1)

  def factor(self, chips: int) -> float:
    """By how much the times of a job of that many chips are longer."""
    return max(0.0, 1.0 + self.growth * math.log2(chips / self.growth_from))


@dataclasses.dataclass(frozen=True)
class Scenario:
  """One simulated job.

  Attributes:
    policy: dp_rigid, dp_elastic, diloco (lock-step: every round needs all
      learners) or decoupled.
    chips: N, chips that train (standbys come on top).
    learners: M, each with N/M chips; the data-parallel policies are one job.
    quorum: K of `decoupled`; it replaces `exchange.quorum`.
    grace: whether rounds wait beyond the quorum while it is free.
    standbys: idle hosts that replace failed ones.
    chips_per_host: chips that a failing chip takes with it, and that one
      standby replaces.
    slice_chips: chips that leave an elastic job together when no standby
      replaces the failed host.
    days: simulated time.
    exchange: H, P, tau and the rest of the exchange policy.
    step_s: inner step of the fastest kind of learner.
    speeds: relative step time of each learner; () = all 1.
    speed_spread: standard deviation of each learner's relative step time.
    speed_hold_s: how long such a deviation lasts.
    early_slack: a learner whose step is longer than this many rounds extracts
      ahead of the opening (inf: nobody does, as in the paper).
    sync_s: from the closing of a round to its result at the learners.
    params: parameters of the model, for bandwidths; 0 = not asked for.
    failures: how chips fail.
    recovery: how the job recovers.
    price_chip_hour: for cost per token.
    tokens_per_chip_s: of a chip at work, for cost per token.
    sampled_rounds: rounds on which participation is measured.
  """

  policy: str = "decoupled"
  chips: int = 150_000
  learners: int = 8
  quorum: int = 1
  grace: bool = True
  standbys: int = 0
  chips_per_host: int = 4
  slice_chips: int = 64
  days: float = 7.0
  exchange: Exchange = dataclasses.field(default_factory=Exchange)
  step_s: float = 1.0
  speeds: tuple[float, ...] = ()
  speed_spread: float = 0.0
  speed_hold_s: float = 600.0
  early_slack: float = 1.1
  sync_s: float = 0.1
  params: float = 0.0
  failures: Failures = Failures()
  recovery: Recovery = Recovery()
  price_chip_hour: float = 0.0
  tokens_per_chip_s: float = 0.0
  sampled_rounds: int = 2000

  def __post_init__(self) -> None:
    one_of("Scenario.policy", self.policy, POLICIES)
    whole("Scenario.chips", self.chips, 1)
    whole("Scenario.learners", self.learners, 1)
    whole("Scenario.quorum", self.quorum, 1)
    whole("Scenario.standbys", self.standbys, 0)
    whole("Scenario.chips_per_host", self.chips_per_host, 1)
    whole("Scenario.slice_chips", self.slice_chips, 1)
    whole("Scenario.sampled_rounds", self.sampled_rounds, 1)
    for name in ("days", "step_s", "speed_hold_s"):
      positive(f"Scenario.{name}", getattr(self, name))
    for name in ("sync_s", "params", "price_chip_hour", "tokens_per_chip_s"):
      at_least(f"Scenario.{name}", getattr(self, name), 0.0)
    if not self.early_slack >= 1:
      raise ConfigError(
        f"Scenario.early_slack = {self.early_slack} must be at least 1"
      )
    if not 0 <= self.speed_spread < 0.3:
      raise ConfigError(
        f"Scenario.speed_spread = {self.speed_spread} must lie in [0, 0.3)"
      )
    if self.learners > self.chips:
      raise ConfigError(
        f"Scenario.learners = {self.learners} must lie between 1 and "
        f"Scenario.chips = {self.chips}: a learner needs a chip"
      )
    if self.quorum > self.learners:
      raise ConfigError(
        f"Scenario.quorum = {self.quorum} must lie between 1 and "
        f"Scenario.learners = {self.learners}"
      )
    if self.speeds and len(self.speeds) != self.learners:
      raise ConfigError(
        f"Scenario.speeds has {len(self.speeds)} entries for "
        f"Scenario.learners = {self.learners}: give one each, or none"
      )
    for speed in self.speeds:
      positive("Scenario.speeds", speed)
    if self.expected_absences > MOST_ABSENCES:
      raise ConfigError(
        f"Scenario.days = {self.days:g} would see about "
        f"{self.expected_absences:.3g} failures and returns of slices, more "
        f"than {MOST_ABSENCES:.0e}: days up to "
        f"{self.days * MOST_ABSENCES / self.expected_absences:.3g} say as much"
      )

  @property
  def expected_absences(self) -> float:
    """About how many absences of single slices begin in the simulated time."""
    rule = self.failures
    single = self.chips * self.days / rule.mtbi_chip_days
    slow = self.chips * self.days / rule.stragglers.mtbi_chip_days
    groups = [(g.chips, g.mtbi_days) for g in rule.correlated]
    groups += [(g.chips, g.every_days) for g in rule.maintenance]
    slices = sum(
      self.chips * self.days / every * (1 / size + 1 / self.slice_chips)
      for size, every in groups
    )
    return single + slow + slices

  @property
  def jobs(self) -> int:
    """Parts that stop and go by themselves: learners, or the one job."""
    return 1 if self.policy.startswith("dp_") else self.learners

  @property
  def sizes(self) -> tuple[int, ...]:
    """Chips of each job."""
    each, more = divmod(self.chips, self.jobs)
    return tuple(each + (m < more) for m in range(self.jobs))

  @property
  def rule(self) -> Exchange:
    """The exchange policy in force, with this scenario's K and grace."""
    waits_for = {"diloco": self.jobs, "decoupled": self.quorum}
    return dataclasses.replace(
      self.exchange,
      quorum=waits_for.get(self.policy, 1),
      max_grace_rounds=self.exchange.max_grace_rounds if self.grace else 0.0,
    )
