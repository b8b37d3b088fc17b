"""What absences do to jobs: who stands still when, and with how many chips.

Rules, the same for every policy:

* A failure stops its job (or learner). Whatever else happens until the stop
  ends is handled by the same stop: interruptions overlap more and more as a
  job grows.
* Without a standby the failed host's slice is out until the host is back.
* Returned chips join at the job's next stop. An elastic job makes one for them
  `rejoin_s` after the first of them came; a rigid one restarts for them once
  doing without them has cost as much as a restart. A job that has no chips
  left takes the first at once.
* A standby takes the failed host's place for as long as it is away; then the
  returned host becomes a standby. A host that comes free serves the slice
  that has waited longest.
* A learner that loses its last chips loses its work since the last merge, H/2
  steps on average; a rigid job rolls back to its last checkpoint.
"""

import heapq
import math
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoupled.simulate.failures import DAY_S, Absences, Floats, Spells
from decoupled.simulate.scenario import Scenario

STOPS = ("", "restart", "scale_down", "scale_up", "swap")
RESTART, SCALE_DOWN, SCALE_UP, SWAP = range(1, 5)

# What a change is of; the state of a job is one number for each.
FIELDS = ("away", "serviced", "stop", "lost", "slow")
AWAY, SERVICED, STOP, LOST, SLOW = range(5)


Row = tuple[float, int, int, int]  # time, job, field, delta
Slice = tuple[int, int]  # job, index within it


class Changes(NamedTuple):
  """State changes in the order of time; all arrays are [C].

  Attributes:
    time: seconds.
    job: whose state.
    field: which of FIELDS.
    delta: what is added: chips for `away` (failed) and `serviced` (planned),
      the index in STOPS for `stop` (taken off again at its end), 1 and -1
      around work that is `lost` and around `slow` spells.
  """

  time: Floats
  job: NDArray[np.int64]
  field: NDArray[np.int64]
  delta: NDArray[np.int64]


class Times(NamedTuple):
  """Seconds a job stands still: unforeseen, planned, for returns, swaps."""

  down: float
  drain: float
  up: float
  swap: float


def times(scenario: Scenario, chips: int) -> Times:
  """The stops of a job of that many chips under a scenario's policy."""
  rule = scenario.recovery
  rigid = scenario.policy == "dp_rigid"
  down = rule.restart_s if rigid else rule.scale_down_s
  up = rule.restart_s if rigid else rule.scale_up_s
  factor = rule.factor(chips)
  return Times(
    factor * (rule.detect_s + down),
    factor * down,
    factor * up,
    factor * (rule.detect_s + rule.swap_s),
  )


def changes(scenario: Scenario, gone: Absences, slow: Spells) -> Changes:
  """Applies the rules above to a history of absences."""
  rows = _follow(scenario, gone)
  columns = np.array(rows, np.float64).reshape(-1, 4).T
  time = np.concatenate([columns[0], slow.start, slow.end])
  ones = np.ones(len(slow.start), np.int64)
  job = np.concatenate([columns[1].astype(np.int64), slow.job, slow.job])
  field = np.concatenate(
    [columns[2].astype(np.int64), SLOW * ones, SLOW * ones]
  )
  delta = np.concatenate([columns[3].astype(np.int64), ones, -ones])
  order = np.argsort(time, kind="stable")
  return Changes(time[order], job[order], field[order], delta[order])


def _follow(scenario: Scenario, gone: Absences) -> list[Row]:
  """One pass over all departures and returns."""
  jobs = _Jobs(scenario, gone)
  count = len(gone.start)
  order = np.argsort(np.concatenate([gone.start, gone.end]), kind="stable")
  for index in order.tolist():
    if index < count:
      jobs.leave(index)
    else:
      jobs.come_back(index - count)
  jobs.ring(scenario.days * DAY_S)
  return jobs.rows


class _Jobs:
  """Who is present, who stands still until when, and which standbys serve.

  Plain lists: a million events pass through here one by one.
  """

  def __init__(self, scenario: Scenario, gone: Absences):
    count = len(scenario.sizes)
    self.rows: list[Row] = []
    self._width = scenario.slice_chips
    self._sizes = scenario.sizes
    self._stops = [times(scenario, size) for size in scenario.sizes]
    self._rigid = scenario.policy == "dp_rigid"
    self._interval = scenario.recovery.checkpoint_interval_s
    self._rejoin_s = scenario.recovery.rejoin_s
    self._unmerged = scenario.exchange.H / 2 * scenario.step_s
    self._standbys = scenario.standbys
    self._start, self._end = gone.start.tolist(), gone.end.tolist()
    self._job, self._slice = gone.job.tolist(), gone.slice.tolist()
    self._hosts, self._planned = gone.hosts.tolist(), gone.planned.tolist()
    self._present = list(scenario.sizes)
    self._until = [0.0] * count
    self._served: set[int] = set()  # absences whose place a standby holds
    self._unserved: deque[int] = deque()
    # Per slice that is out: how many absences keep it out, and whether its
    # chips are counted as away or as serviced.
    self._out: dict[Slice, tuple[int, int]] = {}
    # Per job: slices that could join, what doing without them has cost in
    # chip-seconds and up to when, and which alarm is valid.
    self._joining: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    self._forgone = [(0.0, 0.0)] * count
    self._alarm = [0] * count
    self._alarms: list[tuple[float, int, int]] = []

  def leave(self, event: int) -> None:
    time, job = self._start[event], self._job[event]
    self.ring(time)
    stops = self._stops[job]
    planned = self._planned[event]
    key = (job, self._slice[event])
    absent, counted = self._out.get(key, (0, SERVICED if planned else AWAY))
    hosts = self._hosts[event]
    if not absent and hosts <= self._standbys:
      self._standbys -= hosts
      self._served.add(event)
      self._halt(time, job, stops.swap, SWAP)
      return
    self._out[key] = absent + 1, counted
    self._unserved.append(event)
    if absent:
      return  # its slice was idle already
    chips = self._chips(key)
    self._present[job] -= chips
    self.rows.append((time, job, counted, chips))
    if not planned:
      self._lose(time, job)
    kind = RESTART if self._rigid else SCALE_DOWN
    self._halt(time, job, stops.drain if planned else stops.down, kind)

  def come_back(self, event: int) -> None:
    time = self._end[event]
    self.ring(time)
    if event in self._served:
      self._served.remove(event)
      self._standbys += self._hosts[event]
      self._serve_longest(time)
    else:
      self._restore(time, event)

  def _serve_longest(self, time: float) -> None:
    while self._unserved:
      event = self._unserved[0]
      if self._end[event] > time:
        if self._hosts[event] > self._standbys:
          return
        self._standbys -= self._hosts[event]
        self._served.add(event)
        self._restore(time, event)
      self._unserved.popleft()

  def _restore(self, time: float, event: int) -> None:
    """One absence less keeps a slice out; without any it may join."""
    job = self._job[event]
    key = (job, self._slice[event])
    absent, counted = self._out[key]
    if absent > 1:
      self._out[key] = absent - 1, counted
      return
    del self._out[key]
    self._account(time, job)
    self._joining[job].append((counted, self._chips(key)))
    if time < self._until[job]:
      self._join(time, job)
    elif not self._present[job]:
      self._take_back(time, job)
    else:
      self._set_alarm(time, job)

  def _account(self, time: float, job: int) -> None:
    cost, since = self._forgone[job]
    chips = sum(chips for _, chips in self._joining[job])
    self._forgone[job] = cost + chips * (time - since), time

  def _set_alarm(self, time: float, job: int) -> None:
    """When to stop for what has returned, unless a stop comes earlier."""
    if self._rigid:
      worth = self._stops[job].up * self._sizes[job]
      chips = sum(chips for _, chips in self._joining[job])
      due = time + max(0.0, worth - self._forgone[job][0]) / chips
    elif len(self._joining[job]) == 1:
      due = time + self._rejoin_s
    else:
      return
    self._alarm[job] += 1
    heapq.heappush(self._alarms, (due, job, self._alarm[job]))

  def ring(self, now: float) -> None:
    while self._alarms and self._alarms[0][0] <= now:
      time, job, alarm = heapq.heappop(self._alarms)
      if alarm == self._alarm[job] and self._joining[job]:
        self._take_back(time, job)

  def _take_back(self, time: float, job: int) -> None:
    kind = RESTART if self._rigid else SCALE_UP
    self._halt(time, job, self._stops[job].up, kind)
    self._join(time, job)

  def _join(self, time: float, job: int) -> None:
    for counted, chips in self._joining[job]:
      self._present[job] += chips
      self.rows.append((time, job, counted, -chips))
    self._joining[job].clear()
    self._forgone[job] = 0.0, time
    self._alarm[job] += 1

  def _chips(self, key: Slice) -> int:
    return min(self._width, self._sizes[key[0]] - key[1] * self._width)

  def _halt(self, time: float, job: int, seconds: float, kind: int) -> None:
    if time < self._until[job]:
      return
    if seconds > 0:
      self._until[job] = time + seconds
      self.rows.append((time, job, STOP, kind))
      self.rows.append((time + seconds, job, STOP, -kind))
    if self._joining[job]:
      self._join(time, job)

  def _lose(self, time: float, job: int) -> None:
    """What the job did since the last state that outlives this failure."""
    ran = time - self._until[job]
    if self._rigid and ran > 0 and self._interval > 0:
      since = math.fmod(ran, self._interval)
    elif not self._rigid and not self._present[job]:
      since = min(time, self._unmerged)
    else:
      return
    self.rows.append((time - since, job, LOST, 1))
    self.rows.append((time, job, LOST, -1))
