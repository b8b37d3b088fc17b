"""A slow simulation that walks through time tick by tick.

It applies the rules that `decoupled.simulate.stops` states in words, with sets
instead of events, to the same absences; the fast path must agree with it.
"""

import numpy as np

from decoupled.algorithm.grace import Estimates
from decoupled.algorithm.quorum import close_time
from decoupled.simulate.failures import DAY_S


class _Job:
  def __init__(self, scenario, chips):
    width = scenario.slice_chips
    starts = range(0, chips, width)
    self.chips = {i: min(width, chips - s) for i, s in enumerate(starts)}
    self.size = chips
    self.working = set(self.chips)
    self.joining = set()
    self.absent = dict.fromkeys(self.chips, 0)
    self.until = 0.0
    self.first_joining = 0.0
    self.forgone = 0.0

  def present(self):
    return sum(self.chips[i] for i in self.working)

  def stop(self, now, seconds):
    if now >= self.until:
      self.until = now + seconds
      self.join()

  def join(self):
    self.working |= self.joining
    self.joining.clear()
    self.forgone = 0.0


def goodput(scenario, gone, tick):
  """Share of useful chip time, by ticks of so many seconds."""
  rule = scenario.recovery
  rigid = scenario.policy == "dp_rigid"
  down = rule.restart_s if rigid else rule.scale_down_s
  up = rule.restart_s if rigid else rule.scale_up_s
  jobs = [_Job(scenario, chips) for chips in scenario.sizes]
  events = [(t, 0, e) for e, t in enumerate(gone.start)]
  events += [(t, 1, e) for e, t in enumerate(gone.end)]
  events.sort()
  pool, served, unserved = scenario.standbys, set(), []
  useful, position, memory = 0.0, 0, {}

  def back(job, index, now):
    job.absent[index] -= 1
    if job.absent[index]:
      return
    if not job.joining:
      job.first_joining = now
    job.joining.add(index)
    if now < job.until:
      job.join()
    elif not job.working:
      job.stop(now, up)

  for now in np.arange(0.0, scenario.days * DAY_S, tick):
    while position < len(events) and events[position][0] <= now:
      _, returns, event = events[position]
      position += 1
      job, index = jobs[gone.job[event]], int(gone.slice[event])
      hosts = gone.hosts[event]
      if not returns and not job.absent[index] and hosts <= pool:
        pool -= hosts
        served.add(event)
        job.stop(now, rule.swap_s)
      elif not returns:
        job.absent[index] += 1
        unserved.append(event)
        if job.absent[index] == 1:
          job.working.discard(index)
          job.joining.discard(index)
          job.stop(now, down)
      elif event in served:
        pool += hosts
        unserved = [
          e for e in unserved if gone.end[e] > events[position - 1][0]
        ]
        while unserved and gone.hosts[unserved[0]] <= pool:
          first = unserved.pop(0)
          pool -= gone.hosts[first]
          served.add(first)
          back(jobs[gone.job[first]], int(gone.slice[first]), now)
      else:
        if event in unserved:
          unserved.remove(event)
        back(job, index, now)
    for job in jobs:
      if job.joining:
        job.forgone += tick * sum(job.chips[i] for i in job.joining)
        worth = job.forgone >= up * job.size
        waited = now >= job.first_joining + rule.rejoin_s
        if worth if rigid else waited:
          job.stop(now, up)
    running = tuple(now >= job.until and bool(job.working) for job in jobs)
    if running not in memory:
      step = np.full(len(jobs), scenario.step_s)
      decision = close_time(0.0, step, running, Estimates(), scenario.rule)
      memory[running] = bool(np.isfinite(decision.close_at))
    if memory[running]:
      present = [j.present() for j, r in zip(jobs, running, strict=True) if r]
      useful += tick * sum(present)
  return useful / (scenario.chips * scenario.days * DAY_S)
