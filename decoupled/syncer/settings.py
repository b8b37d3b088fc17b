"""How long the parts of a job wait for each other, and how limits nest."""

import dataclasses
import math

from decoupled.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Limits:
  """Every wait of the exchange has one of these as its limit, in seconds.

  They nest: a lease spans several heartbeats, so that a lost one evicts
  nobody; a transfer and a drain outlast a lease, so that a dead peer is known
  to be dead before anybody gives up on it.

  Attributes:
    lease_s: silence after which a learner's claim of its id lapses, or a
      standby is no longer in the pool; also how long a standby may take to
      claim the id that it is offered.
    heartbeat_s: how often a learner shows that it lives.
    start_s: how long an empty syncer waits for the expected learners before
      it goes on with those that are there.
    connect_s: how long a learner tries to reach the syncer.
    transfer_s: how long the transfer of one fragment may take.
    drain_s: how long the end of a run waits for learners to acknowledge.
    restart_s: how long the end of a run waits for a restart that is owed.
    collective_s: how long a host waits inside one collective for another host
      of its learner that is connected and silent; whole seconds. Half as much
      silence towards the syncer is then enough to be taken for dead.
    reform_s: how long the hosts of a learner may take to meet in their next
      epoch, and again to finish a step in it.
    seat_s: how long a learner that has lost a host waits for somebody to take
      its seat, before the other hosts give up what they hold.
    grace_s: how long a process that is told to end (SIGTERM) may take for
      everything: a learner to finish its step, to save and to say goodbye, a
      syncer to hand over and to save. Choose it below what the machine gives,
      and above a step and a save.
  """

  lease_s: float = 5.0
  heartbeat_s: float = 1.0
  start_s: float = 120.0
  connect_s: float = 60.0
  transfer_s: float = 30.0
  drain_s: float = 30.0
  restart_s: float = 60.0
  collective_s: float = 3.0
  reform_s: float = 120.0
  seat_s: float = 120.0
  grace_s: float = 20.0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not (math.isfinite(value) and value > 0):
        raise ConfigError(
          f"Limits.{field.name} = {value} must be a number of seconds above 0"
        )
    self._nest("heartbeat_s", "lease_s", 2, "or one lost heartbeat evicts")
    if not 1 <= self.collective_s < 40 or self.collective_s % 1:
      raise ConfigError(
        f"Limits.collective_s = {self.collective_s:g} must be 1 to 39 whole "
        "seconds: XLA counts them, and ends processes after 40"
      )
    for outer in ("reform_s", "seat_s"):
      self._nest("collective_s", outer, 1, "or a frozen host outlasts it")
    for outer in ("connect_s", "transfer_s", "drain_s", "restart_s", "start_s"):
      self._nest("lease_s", outer, 1, "or a dead peer outlasts that wait")

  def _nest(self, inner: str, outer: str, times: int, why: str) -> None:
    """Raises ConfigError unless `times` x inner is below outer."""
    low, high = getattr(self, inner), getattr(self, outer)
    if not times * low < high:
      factor = f"{times} x " if times > 1 else ""
      raise ConfigError(
        f"Limits.{outer} = {high:g} must be above {factor}Limits.{inner} = "
        f"{low:g}, {why}: raise the first or lower the second"
      )
