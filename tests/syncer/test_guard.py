"""A syncer that must not act any more does nothing, whoever asks."""

import asyncio

import pytest

from decoupled.clock import ManualClock
from decoupled.syncer.driver import Driver
from decoupled.syncer.lease import Fenced


class Rounds:
  """Counts what reaches it."""

  generation = 0
  ended = False

  def __init__(self):
    self.calls = []
    self.jobs = []
    self.handed_over = False

  def wake_at(self, now):
    return now

  def tick(self, now):
    self.calls.append("tick")

  def report(self, now):
    self.calls.append("report")

  def next_merge(self):
    return self.jobs.pop() if self.jobs else None

  def merged(self, now, job):
    self.calls.append("merged")


class Job:
  def __init__(self, meanwhile):
    self.run = meanwhile


class Guard:
  fenced = False

  def __call__(self):
    if self.fenced:
      raise Fenced("fenced: another one serves this run")


def test_after_the_fence_nothing_reaches_the_rounds():
  async def story():
    rounds, guard = Rounds(), Guard()
    driver = Driver(rounds, ManualClock(), lambda: None, guard)
    driver.call(rounds.report)
    guard.fenced = True
    with pytest.raises(Fenced):
      driver.call(rounds.report)
    with pytest.raises(Fenced):
      await driver.run()
    assert rounds.calls == ["report"]

  asyncio.run(story())


def test_a_merge_that_was_under_way_is_not_committed():
  async def story():
    rounds, guard = Rounds(), Guard()

    def stopped():  # the process, in the midst of the merge
      guard.fenced = True

    driver = Driver(rounds, ManualClock(), lambda: None, guard)
    rounds.jobs.append(Job(stopped))
    driver.call(rounds.report)
    with pytest.raises(Fenced):
      await asyncio.wait_for(driver.run(), 10)
    assert "merged" not in rounds.calls

  asyncio.run(story())
