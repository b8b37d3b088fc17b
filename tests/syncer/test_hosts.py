"""The hosts of a learner as one member: claims, reports, announcements."""

import dataclasses

import pytest

from decoupled.errors import Refused
from decoupled.syncer.hosts import Gathering, Group
from decoupled.types import (
  Announcement,
  CopyHeader,
  CopyId,
  Heartbeat,
  Hello,
  Phase,
  Report,
  Stage,
  Version,
)


def hello(host, hosts=2, **fields):
  said = Hello(0, f"box{host}:1", "", (), (), hosts=hosts, host=host)
  return dataclasses.replace(said, **fields)


def header(round_=1, attempt=0, steps=1):
  copy = CopyId(3, 1, round_, 0, attempt)
  return CopyHeader(copy, Version(1, 0), steps, 8, 8)


def report(host, seq=1, **fields):
  said = Report(0, 3, seq, Stage.TRAINING, 5, 50, 5, (), (Version(1, 0),) * 2)
  return dataclasses.replace(said, host=host, **fields)


def announcement(**fields):
  said = Announcement(1, 1, Phase.TRAINING, (), 1, 0.0, 0.0, (Version(1, 0),))
  return dataclasses.replace(said, **fields)


def test_a_claim_is_complete_when_every_host_has_said_hello():
  gathering = Gathering()
  assert not gathering.complete
  gathering.add(hello(1, hosts=3, previous=4))
  gathering.add(hello(0, hosts=3, previous=6))
  assert gathering.missing == (2,)
  assert not gathering.complete
  gathering.add(hello(2, hosts=3))
  assert gathering.complete
  joined = gathering.joined()
  assert (joined.host, joined.hosts, joined.previous) == (0, 3, 6)
  assert joined.holder == "box0:1,box1:1,box2:1"


def test_who_gives_up_counts_no_longer_but_its_successor_does():
  gathering = Gathering()
  first, second = hello(0), hello(0, holder="box0:2")
  gathering.add(first)
  assert gathering.add(second) == (0,)
  gathering.take_back(first)  # its call ends after the second one has begun
  assert gathering.missing == (1,)
  gathering.take_back(second)
  assert gathering.missing == ()
  assert not gathering.complete


def test_hosts_of_an_earlier_epoch_make_no_claim_with_those_of_a_later():
  gathering = Gathering()
  gathering.add(hello(0, epoch=1))
  assert gathering.add(hello(1, epoch=2)) == (0,)
  with pytest.raises(Refused, match=r"epoch 1.*epoch 2") as refused:
    gathering.add(hello(0, epoch=1))
  assert refused.value.reason == "fenced"
  gathering.add(hello(0, epoch=2))
  assert gathering.complete


def test_hosts_that_differ_are_refused_with_both_sides():
  gathering = Gathering()
  gathering.add(hello(0, contract=(("a", "1"),)))
  with pytest.raises(Refused, match=r"contract of host 1 .*'2'.*'1'"):
    gathering.add(hello(1, contract=(("a", "2"),)))
  with pytest.raises(Refused, match="hosts of host 1"):
    gathering.add(hello(1, hosts=4, contract=(("a", "1"),)))


def test_a_lease_is_kept_by_all_hosts_together():
  group = Group(3, 2)
  assert group.beat(Heartbeat(0, 3, 1.0, 0)) is None
  assert group.beat(Heartbeat(0, 3, 2.0, 0)) is None
  joined = group.beat(Heartbeat(0, 3, 99.0, 1))
  assert (joined.host, joined.sent_at_s) == (0, 2.0)  # one clock
  for _ in range(5):  # host 1 is frozen
    assert group.beat(Heartbeat(0, 3, 3.0, 0)) is None
  assert not group.leave(1)
  assert group.beat(Heartbeat(0, 3, 4.0, 0)) is not None  # it has left in order
  assert group.leave(0)


def test_a_report_says_what_all_hosts_have():
  group = Group(3, 2)
  mine = report(
    0, step=7, tokens=70, copies=(header(1), header(2)), loss=2.5,
    versions=(Version(1, 4), Version(1, 1)), step_ends_s=(1.0,),
  )  # fmt: skip
  assert group.report(mine) is None
  joined = group.report(
    report(
      1, step=6, tokens=60, copies=(header(2), header(3)), loss=9.0,
      versions=(Version(1, 2), Version(1, 3)), step_ends_s=(77.0,),
    )
  )  # fmt: skip
  assert joined.copies == (header(2),)
  assert joined.versions == (Version(1, 2), Version(1, 1))
  assert (joined.step, joined.tokens, joined.loss) == (6, 60, 2.5)
  assert joined.step_ends_s == (1.0,)
  again = group.report(report(1, seq=2, step=7))
  assert again.seq > joined.seq
  assert again.step_ends_s == ()  # told once
  assert group.report(report(1, seq=2)) is None  # late or repeated


@pytest.mark.parametrize(
  ("stages", "joined"),
  [
    ((Stage.DRAINED, Stage.TRAINING), Stage.TRAINING),
    ((Stage.DRAINED, Stage.DRAINED), Stage.DRAINED),
    ((Stage.JOINING, Stage.TRAINING), Stage.JOINING),
  ],
)
def test_a_learner_is_where_its_last_host_is(stages, joined):
  group = Group(3, 2)
  group.report(report(0, stage=stages[0]))
  assert group.report(report(1, stage=stages[1])).stage is joined


def test_a_refusal_is_repeated_until_each_host_has_heard_it():
  group = Group(3, 2)
  for host in range(2):
    group.report(report(host, copies=(header(),)))
  copy = header().copy
  said = announcement(refused=((copy, "base"),))
  assert group.announced(0, said).refused == ((copy, "base"),)
  group.report(report(0, seq=2))  # host 0 has dropped it, the rounds forget it
  assert group.announced(1, announcement()).refused == ((copy, "base"),)
  assert group.announced(0, announcement()).refused == ()
  group.report(report(1, seq=2))
  assert group.announced(1, announcement()).refused == ()


def test_nobody_is_asked_for_a_part_that_is_here():
  group = Group(3, 2)
  copy, other = header(1).copy, header(2).copy
  said = announcement(wanted=(copy, other))
  assert group.announced(0, said, sent=(copy,)).wanted == (other,)
  assert Group(3, 1).announced(0, said, sent=(copy,)) is said
