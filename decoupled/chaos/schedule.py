"""When the faults of a plan are due."""

import random
from collections.abc import Sequence

from decoupled.chaos.plan import Event, Fault, Storm, Target

_HOUR_S = 3600.0


class Schedule:
  """Hands out each fault once, at its second or just after its round.

  Args:
    plan: parsed events.
    learners: number of learners, among whom a storm chooses.
    seed: of storms that name none.
    rounds_before: rounds closed before the job started (a continued run);
      faults of those rounds have had their time and do not come again.
  """

  def __init__(
    self,
    plan: Sequence[Event],
    learners: int,
    seed: int,
    rounds_before: int = 0,
  ):
    faults = [event for event in plan if isinstance(event, Fault)]
    self._timed = sorted(
      (f for f in faults if f.unit == "s"), key=lambda f: f.at
    )
    self._by_round = sorted(
      (f for f in faults if f.unit == "r" and f.at > rounds_before),
      key=lambda f: f.at,
    )
    self._storms = [
      _Gusts(event, learners, seed + number)
      for number, event in enumerate(plan)
      if isinstance(event, Storm)
    ]

  def due(self, now_s: float, rounds_closed: int) -> list[Fault]:
    """Faults whose time has come.

    Args:
      now_s: seconds from the job's start.
      rounds_closed: the highest round that has closed.
    """
    due = []
    while self._timed and self._timed[0].at <= now_s:
      due.append(self._timed.pop(0))
    while self._by_round and self._by_round[0].at <= rounds_closed:
      due.append(self._by_round.pop(0))
    for storm in self._storms:
      due += storm.due(now_s)
    return due

  @property
  def waits_for_round(self) -> bool:
    return bool(self._by_round)

  @property
  def next_at_s(self) -> float:
    """Seconds from the job's start of the next timed fault (inf = none)."""
    times = [storm.next_at_s for storm in self._storms]
    times += [fault.at for fault in self._timed[:1]]
    return min(times, default=float("inf"))


class _Gusts:
  """The kills of one storm, drawn one ahead."""

  def __init__(self, storm: Storm, learners: int, seed: int):
    self._storm = storm
    self._learners = learners
    self._random = random.Random(seed if storm.seed is None else storm.seed)
    self.next_at_s = 0.0
    self._draw()

  def due(self, now_s: float) -> list[Fault]:
    due = []
    while self.next_at_s <= now_s:
      target = Target("learner", self._random.randrange(self._learners))
      due.append(
        Fault("kill", target, self.next_at_s, restart=self._storm.restart)
      )
      self._draw()
    return due

  def _draw(self) -> None:
    self.next_at_s += self._random.expovariate(self._storm.rate_per_h / _HOUR_S)
    until_s = self._storm.for_s
    if until_s is not None and self.next_at_s > until_s:
      self.next_at_s = float("inf")
