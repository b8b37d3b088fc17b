"""The syncer's rounds by hand: one message after the other, no network."""

import dataclasses
import math

import numpy as np
import pytest

from decoupled.algorithm.policy import Exchange, Outer, exchange_lines
from decoupled.errors import Refused
from decoupled.launch.in_memory import Recorder
from decoupled.syncer.rounds import Plan, Rounds
from decoupled.syncer.settings import Limits
from decoupled.types import (
  Contribution,
  CopyHeader,
  CopyId,
  Hello,
  Phase,
  Report,
  Stage,
  TensorSpec,
  Version,
)

P = 2
SPECS = tuple(TensorSpec(f"w{i}", (3,), "float32") for i in range(P))
AVERAGE = Outer(
  learning_rate=1.0, momentum=0.0, merge="average", presence_exponent=0.5
)


class Hand:
  """A learner played by hand: says what it is told to say."""

  def __init__(self, rounds, learner_id, now=0.0):
    self.rounds = rounds
    self.learner_id = learner_id
    self.welcome = rounds.hello(
      now, Hello(learner_id, f"here:{learner_id}", "", SPECS)
    )
    self.seq = 0
    self.versions = (Version(0, -1),) * P

  def seed(self, now, value=0.0):
    for p in range(P):
      header = self.header(0, p, base=Version(0, -1), steps=0)
      self.send(now, header, value)
    self.versions = self.rounds.model.versions

  def header(self, number, fragment, base=None, steps=1, attempt=0):
    copy = CopyId(
      self.welcome.incarnation, self.rounds.term, number, fragment, attempt
    )
    base = self.versions[fragment] if base is None else base
    return CopyHeader(copy, base, steps, 10 * steps, 10 * steps)

  def report(self, now, step, copies=(), stage=Stage.TRAINING, seq=None):
    self.seq = self.seq + 1 if seq is None else seq
    self.rounds.report(
      now,
      Report(
        learner_id=self.learner_id,
        incarnation=self.welcome.incarnation,
        seq=self.seq,
        stage=stage,
        step=step,
        tokens=10 * step,
        schedule_step=step,
        copies=tuple(copies),
        versions=self.versions,
        sent_at_s=now,
      ),
    )

  def send(self, now, header, value=1.0):
    arrays = (np.full(3, value, np.float32),)
    return self.rounds.contribution(
      now, Contribution(self.learner_id, header, arrays)
    )

  def announced(self, now):
    return self.rounds.announcement(now, self.learner_id)


def syncer(learners=1, exchange=None, outer=AVERAGE, rounds=0, tokens=0):
  exchange = exchange or Exchange(H=P, P=P, tau=1)
  plan = Plan("hand", learners, rounds, tokens, exchange_lines(exchange))
  return Rounds(plan, exchange, outer, Limits(), term=1, events=Recorder())


def training(learners=1, **options):
  """A run whose learners hold version 0 and have not stepped."""
  made = syncer(learners, **options)
  hands = [Hand(made, i) for i in range(learners)]
  hands[0].seed(0.0)
  for hand in hands:
    hand.versions = made.model.versions
    hand.report(0.0, 0)
  assert made.phase is Phase.TRAINING
  return made, hands


def merge(made, now):
  job = made.next_merge()
  assert job is not None
  job.run()
  made.merged(now, job)
  return job


def test_version_0_comes_from_the_lowest_live_learner_and_nobody_else():
  made = syncer(2)
  second = Hand(made, 1)
  assert made.phase is Phase.WAITING
  assert second.announced(0.0).note == "waiting for learners 0"
  first = Hand(made, 0)
  assert [c.fragment for c in first.announced(0.0).wanted] == [0, 1]
  assert second.announced(0.0).wanted == ()
  seed = second.header(0, 0, base=Version(0, -1), steps=0)
  assert second.send(0.0, seed) == "late"
  first.seed(0.0, value=7.0)
  assert made.phase is Phase.TRAINING
  assert made.model.versions == (Version(1, 0),) * P
  assert (made.model.get(1).arrays[0] == 7).all()
  # and never again
  assert first.send(0.0, first.header(0, 0, steps=0)) == "late"


def test_no_round_opens_before_somebody_holds_every_fragment():
  made = syncer(1)
  hand = Hand(made, 0)
  hand.seed(0.0)
  hand.versions = (Version(1, 0), Version(0, -1))
  hand.report(0.0, 0)
  assert made.announcement(0.0, 0).open == ()
  hand.versions = made.model.versions
  hand.report(0.1, 0)
  [opened] = made.announcement(0.1, 0).open
  assert (opened.version, opened.fragment) == (Version(1, 1), 0)
  assert opened.base == Version(1, 0)


def test_a_round_merges_what_was_reported_and_sent():
  made, [hand] = training()
  header = hand.header(1, 0)
  hand.report(1.0, 1, [header])
  assert hand.announced(1.0).wanted == (header.copy,)
  assert made.next_merge() is None  # reported, not here yet
  assert hand.send(1.1, header, value=4.0) == ""
  merge(made, 1.2)
  assert made.model.versions[0] == Version(1, 1)
  assert (made.model.get(0).arrays[0] == 4).all()
  fetched = made.fetch(1.2, 0, 1, 0)
  assert (fetched.included, fetched.base) == (header.copy, Version(1, 0))
  [event] = made._events.of("round")
  assert (event["participants"], event["alive"]) == ([0], [0])


def test_a_copy_that_was_sent_again_is_merged_once_and_answered():
  made, [hand] = training()
  header = hand.header(1, 0)
  hand.report(1.0, 1, [header])
  assert hand.send(1.1, header) == ""
  assert hand.send(1.1, header, value=9.0) == ""  # same id, same bytes
  assert (merge(made, 1.2).contributions[0].arrays[0] == 1).all()
  assert hand.send(1.3, header) == ""
  assert made.refused == {}


def test_late_and_repeated_reports_change_nothing():
  made, [hand] = training()
  hand.report(3.0, 3)
  hand.report(4.0, 4)
  hand.report(5.0, 2, seq=2)  # overtaken
  assert made.membership.live[0].report.step == 4
  assert made.tokens == {0: 40}
  hand.report(6.0, 4, seq=3)
  assert made.membership.live[0].report.seq == 3


def test_a_report_of_the_wrong_number_of_fragments_is_malformed():
  _, [hand] = training()
  hand.versions = hand.versions[:1]
  with pytest.raises(Refused) as caught:
    hand.report(1.0, 1)
  assert caught.value.reason == "malformed"
  assert "1 fragments, the run has 2" in str(caught.value)


def test_a_report_of_a_copy_on_another_base_makes_no_quorum():
  made, [hand] = training()
  stale = hand.header(1, 0, base=Version(1, -1))
  hand.report(1.0, 1, [stale])
  assert made._open[1].fresh == {}
  assert hand.announced(1.0).wanted == ()
  assert hand.send(1.0, stale) == "base"
  assert made.refused == {"base": 1}
  [(copy, why)] = hand.announced(1.0).refused
  assert (copy, why) == (stale.copy, "base")
  hand.report(2.0, 2)  # dropped: no more needs saying
  assert hand.announced(2.0).refused == ()


def test_a_copy_made_ahead_is_taken_before_its_round_opens():
  made, [hand] = training()
  ahead = hand.header(2, 1)
  hand.report(1.0, 1, [ahead])
  assert hand.announced(1.0).wanted == (ahead.copy,)
  assert hand.send(1.0, ahead) == ""
  assert hand.announced(1.0).wanted == ()
  assert made.next_merge() is None


def test_a_copy_made_ahead_on_another_base_is_not_wanted():
  made, [hand] = training()
  stale = hand.header(2, 1, base=Version(1, -1))
  hand.report(1.0, 1, [stale])
  assert hand.announced(1.0).wanted == ()
  assert hand.send(1.0, stale) == "base"
  assert made._received == {}


def test_a_copy_for_the_round_after_an_open_one_comes_too_early():
  """Closing the open one will change its base."""
  made, [hand] = training()
  next_visit = hand.header(3, 0)
  hand.report(1.0, 1, [next_visit])
  assert hand.announced(1.0).wanted == ()
  assert hand.send(1.0, next_visit) == "late"
  assert made._received == {}


def test_a_copy_of_an_earlier_incarnation_is_not_taken_for_its_successors():
  made, [hand] = training()
  old = hand.header(1, 0)
  made.disconnected(1.0, 0, 1, "reset")
  again = Hand(made, 0, now=1.1)
  again.versions = hand.versions
  again.report(1.2, 1, [old])
  assert made.membership.live[0].copies == {}
  assert again.send(1.3, old) == "fenced"
  with pytest.raises(Refused, match="speaks as incarnation 1"):
    hand.report(1.4, 2)
  assert made.fetch(1.4, 0, 2, 0).version == Version(1, 0)
  with pytest.raises(Refused, match="speaks as incarnation 1"):
    made.fetch(1.4, 0, 1, 0)


def test_what_a_lost_learner_sent_is_not_merged_after_it():
  """Its copies die with its claim; another may claim the id at once."""
  made, [first, second] = training(2, exchange=Exchange(H=P, P=P, quorum=2))
  header = first.header(1, 0)
  first.report(1.0, 1, [header])
  assert first.send(1.0, header) == ""
  made.disconnected(1.1, 0, 1, "reset")
  assert made._received == {}
  second.report(1.2, 1, [second.header(1, 0)])
  second.send(1.2, second.header(1, 0))
  assert made.next_merge() is None  # one is no quorum of two


@pytest.mark.parametrize(("present", "share"), [(4, 1.0), (1, 0.5)])
def test_few_learners_take_smaller_outer_steps(present, share):
  """Presence: eta x (merged / most ever live) ** exponent."""
  made, hands = training(4)
  for hand in hands[present:]:
    made.leave(0.5, hand.learner_id, 1)
  headers = [hand.header(1, 0) for hand in hands[:present]]
  for hand, header in zip(hands[:present], headers, strict=True):
    hand.report(1.0, 1, [header])
  for hand, header in zip(hands[:present], headers, strict=True):
    hand.send(1.0, header, value=8.0)
  job = merge(made, 1.1)
  assert len(job.contributions) == present
  assert job.rate_scale == pytest.approx(share)
  assert made.model.get(0).arrays[0] == pytest.approx(8 * share)


def test_the_tokens_asked_for_end_the_run():
  made, [hand] = training(tokens=20)
  header = hand.header(1, 0)
  hand.report(1.0, 1, [header])
  hand.send(1.0, header)
  merge(made, 1.1)
  assert made.phase is Phase.TRAINING
  hand.versions = made.model.versions
  header = hand.header(2, 1)
  hand.report(2.0, 2, [header])
  hand.send(2.0, header)
  merge(made, 2.1)
  assert made.phase is Phase.DRAINING
  assert made.rounds_closed == 2


def wait(hand, now, stop, **report):
  """Time passes; the learner says the same every second."""
  for _ in range(200):
    if stop():
      return now
    hand.report(now, 1, **report)
    now = min(hand.rounds.wake_at(now), now + 1.0)
    hand.rounds.tick(now)
  raise AssertionError("not reached")


def draining():
  """A drain that was asked for while a round lacked its quorum."""
  made, [hand] = training()
  hand.report(1.0, 1)
  made.drain(1.0, "asked for")
  assert made.phase is Phase.TRAINING  # what is open may still finish
  now = wait(hand, 1.0, lambda: made.phase is Phase.DRAINING)
  assert now == 1.0 + Limits().drain_s
  return made, hand, now


def acknowledge(made, hand, now):
  """The learner stops, says so, and sends everything once more."""
  opened = hand.announced(now).open
  copies = [hand.header(r.version.round, r.fragment) for r in opened]
  hand.report(now, 1, copies, stage=Stage.TRAINING)
  for header in copies:
    hand.send(now, header)
  assert made.next_merge() is None  # it may yet take another step
  hand.report(now, 1, copies, stage=Stage.DRAINED)
  for _ in opened:
    merge(made, now)


def test_a_drain_merges_once_more_for_overwriting_and_counts_no_round():
  made, hand, now = draining()
  acknowledge(made, hand, now)
  assert made.rounds_closed == 0
  assert all(made.fetch(now, 0, 1, p).restored for p in range(P))
  assert not made.ended
  assert hand.announced(now).note == "waiting for learners 0"
  with pytest.raises(Refused) as caught:
    Hand(made, 1, now)
  assert caught.value.reason == "ended"
  hand.versions = made.model.versions
  hand.report(now, 1, stage=Stage.DRAINED)
  assert made.ended


def test_a_drain_ends_without_those_who_never_adopt():
  made, hand, began = draining()
  acknowledge(made, hand, began)
  now = wait(hand, began, lambda: made.ended, stage=Stage.DRAINED)
  assert now == began + 2 * Limits().drain_s


def test_a_drain_has_as_long_as_it_is_given():
  made, [hand] = training()
  hand.report(1.0, 1)
  made.drain(1.0, "stopped by SIGTERM", 6.0)
  now = wait(hand, 1.0, lambda: made.phase is Phase.DRAINING)
  assert now == 3.0
  now = wait(hand, now, lambda: merged_all(made, now))
  now = wait(hand, now, lambda: made.ended)
  assert now <= 7.0


def test_a_drain_under_way_can_be_shortened():
  made, hand, now = draining()
  made.drain(now, "stopped by SIGTERM", 6.0)
  assert made.drain_why == "asked for"
  now_ = wait(hand, now, lambda: merged_all(made, now))
  now_ = wait(hand, now_, lambda: made.ended)
  assert now_ <= now + 6.0


def merging(rounds=0):
  """A run with a merge under way."""
  made, [hand] = training(rounds=rounds)
  header = hand.header(1, 0)
  hand.report(1.0, 1, [header])
  hand.send(1.0, header)
  job = made.next_merge()
  job.run()
  return made, hand, job


def test_a_syncer_that_hands_over_finishes_its_merge_and_begins_no_other():
  made, hand, job = merging()
  made.hand_over(1.0, 6.0)
  assert not made.handed_over
  made.merged(1.1, job)
  assert made.handed_over
  assert made.rounds_closed == 1
  # whatever comes now is its successor's
  hand.versions = made.model.versions
  hand.report(2.0, 2)
  made.tick(3.0)
  made.drain(3.0, "asked for")
  assert (made.phase, made.drain_why) == (Phase.TRAINING, "")
  assert made.next_merge() is None
  assert hand.announced(3.0).open == ()


def test_a_run_that_nobody_has_joined_is_handed_over_as_it_is():
  made = syncer(2)
  made.hand_over(0.0)
  assert made.handed_over
  assert not made.ended


def test_a_run_at_its_end_is_ended_rather_than_handed_over():
  made, _, job = merging(rounds=1)
  made.expect(1.0, 1, 600.0)  # a restart is not waited for now
  made.hand_over(1.0, 6.0)
  made.merged(1.1, job)
  assert made.phase is Phase.DRAINING
  assert not made.handed_over
  assert made._drain_by == 1.1 + 2.0


def test_a_drain_under_way_is_finished_rather_than_handed_over():
  made, hand, now = draining()
  made.hand_over(now, 6.0)
  now_ = wait(hand, now, lambda: merged_all(made, now))
  now_ = wait(hand, now_, lambda: made.ended)
  assert not made.handed_over
  assert now_ <= now + 6.0


def merged_all(made, now):
  """Hands back whatever merge is due; whether the drain has none left."""
  while (job := made.next_merge()) is not None:
    job.run()
    made.merged(now, job)
  return not made._open


def test_a_drain_ends_without_those_who_never_acknowledge():
  made, hand, began = draining()
  for _ in range(P):
    assert made.next_merge() is None
  wait(hand, began, lambda: bool(made._jobs))
  for _ in range(P):
    assert merge(made, made._drain_by).contributions == ()
  now = wait(hand, made._drain_by, lambda: made.ended)
  assert now <= began + 2 * Limits().drain_s


def test_the_end_waits_for_a_restart_that_has_not_stepped_yet():
  made, [first, second] = training(2, rounds=1)
  made.disconnected(0.5, 1, 1, "killed")
  again = Hand(made, 1, now=0.6)
  again.versions = second.versions
  again.report(0.7, 0)
  header = first.header(1, 0)
  first.report(1.0, 1, [header])
  first.send(1.0, header)
  merge(made, 1.1)
  assert made.phase is Phase.TRAINING
  again.report(2.0, 1)
  assert made.phase is Phase.DRAINING


def test_only_learners_that_stepped_are_waited_for():
  made, [first, second] = training(2)
  header = first.header(1, 0)
  first.report(1.0, 1, [header])
  first.send(1.0, header)
  assert merge(made, 1.1).alive == (0,)
  second.report(1.2, 1)
  assert [m.learner_id for m in made._training()] == [0, 1]


def test_deltas_and_bases_are_those_of_the_newest_version():
  exchange = Exchange(H=P, P=P, tau=1, codec="bfloat16")
  made, [hand] = training(exchange=exchange)
  assert made.delta(0, Version(1, 0)) is None  # replaces nothing
  header = hand.header(1, 0)
  hand.report(1.0, 1, [header])
  hand.send(1.0, header, value=1 / 3)
  merge(made, 1.1)
  version, payload = made.delta(0, Version(1, 0))
  assert version == Version(1, 1)
  assert payload[0].dtype == np.uint16
  assert made.delta(0, Version(1, 1)) is None
  assert made.published(0, Version(1, 0)) is None
  now = made.published(0, Version(1, 1))
  assert now[0] is made.model.get(0).published[0]
  assert (now[0] != made.model.get(0).arrays[0]).all()


def test_an_idle_syncer_wakes_for_what_is_due_and_for_nothing_else():
  made = syncer(2)
  assert made.wake_at(0.0) == math.inf
  Hand(made, 0)
  limits = Limits()
  assert made.wake_at(0.0) == limits.lease_s
  made.tick(limits.lease_s)
  assert made.membership.live == {}
  assert made.wake_at(limits.lease_s) == limits.start_s


def test_a_changed_announcement_is_stamped_and_an_unchanged_one_is_not():
  made, [hand, _] = training(2)
  before = made.stamp(0), made.stamp(1)
  hand.report(0.2, 0)
  assert (made.stamp(0), made.stamp(1)) == before
  bad = hand.header(1, 0)
  hand.send(0.3, dataclasses.replace(bad, tokens=-1))
  assert made.stamp(0) != before[0]
  assert made.stamp(1) == before[1]  # another's refusal is not its concern
