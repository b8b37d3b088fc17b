"""Steps are logged in batches, and none is lost when a learner goes."""

import dataclasses

from decoupled.launch.in_memory import Recorder
from decoupled.syncer.membership import Member
from decoupled.syncer.step_log import StepLog
from decoupled.types import Report, Stage, Version

START_S = 100.0
V0 = (Version(1, 0),)


def report(step: int, *ends: float, versions=V0) -> Report:
  return Report(
    learner_id=3,
    incarnation=2,
    seq=step,
    stage=Stage.TRAINING,
    step=step,
    tokens=10 * step,
    schedule_step=step,
    copies=(),
    versions=versions,
    position=(0, step),
    sent_at_s=0.0,
    step_ends_s=ends,
    loss=1.0,
  )


class Told:
  """A log that one member is told to."""

  def __init__(self):
    self.events = Recorder()
    self.log = StepLog(self.events, lambda s: s - START_S, opened_held=2)
    self.member = Member(
      learner_id=3,
      incarnation=2,
      holder="h:1",
      hosts=1,
      lease_until=0.0,
      joined_at=0.0,
    )
    self.member.clock_offset_s = 0.5

  def say(self, now: float, said: Report) -> None:
    self.member.report = said
    self.log.reported(now, self.member)

  @property
  def ends(self):
    return [e["ends"] for e in self.events.of("steps")]


def test_steps_come_in_batches_on_the_clock_of_the_job():
  told = Told()
  told.say(101.0, report(1, 100.5))
  told.say(101.5, report(2, 101.0))
  assert told.ends == [[1.0]]
  told.say(102.0, report(3, 101.5))
  assert told.ends == [[1.0], [1.5, 2.0]]
  assert [e["step"] for e in told.events.of("steps")] == [1, 3]


def test_what_is_left_is_logged_when_a_learner_goes():
  told = Told()
  told.say(101.0, report(1, 100.5))
  told.say(101.5, report(2, 101.0))
  told.log.gone(told.member)
  assert told.ends == [[1.0], [1.5]]
  # one that has made no step is no news
  told.say(101.75, dataclasses.replace(report(0), incarnation=3))
  assert told.ends == [[1.0], [1.5]]


def test_an_adoption_is_timed_from_the_opening_of_its_round():
  told = Told()
  for number in (1, 2, 3):
    told.log.opened(100.0 + number, Version(1, number))
  before = report(1)
  told.log.adopted(104.0, before, report(2, versions=(Version(1, 3),)))
  # too long ago to be remembered
  told.log.adopted(104.0, before, report(2, versions=(Version(1, 1),)))
  told.say(104.0, report(2, 103.0))
  [event] = told.events.of("steps")
  assert event["adopted_after_s"] == [1.0]
