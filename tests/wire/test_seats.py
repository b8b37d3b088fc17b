"""Hosts and the real syncer: seats, epochs, standbys, zombies."""

import dataclasses

import pytest

from decoupled.algorithm.policy import Exchange, Outer
from decoupled.errors import Refused
from decoupled.syncer.rounds import Plan, Rounds
from decoupled.syncer.settings import Limits
from decoupled.types import Offer, Sitting, Standing
from decoupled.wire.client import GrpcLearnerWire
from tests.wire.fakes import LIMIT_S, TOKEN, Events, Server, wait_until

LIMITS = Limits(lease_s=3.0, heartbeat_s=0.2, collective_s=1.0)
BEAT_S = 0.05
STANDBY = Standing("standby/0", "s:1", "", (), (), "abc")


@pytest.fixture
def syncer():
  rounds = Rounds(
    Plan("run", contract=(("Exchange.H", "2"),)),
    Exchange(H=2, P=2, tau=1),
    Outer(),
    LIMITS,
    3,
    Events(),
  )
  with Server(rounds, limits=LIMITS) as running:
    yield running


class Host:
  """One host: its wire and its seat."""

  def __init__(self, syncer, rank, holder, beat_s=BEAT_S, **more):
    self.rank = rank
    self.wire = GrpcLearnerWire(syncer.address, TOKEN)
    sitting = Sitting(0, rank, 2, holder, **more)
    self.seat = self.wire.seat(sitting, beat_s)

  def say(self, **more):
    self.seat.say(dataclasses.replace(self.seat.sitting, **more))

  def word(self, state, epoch=0):
    found = self.seat.wait(
      lambda word: word.state == state and word.epoch > epoch, LIMIT_S
    )
    assert found is not None, (state, self.seat.word)
    return found

  def close(self):
    self.seat.close()
    self.wire.close()


@pytest.fixture
def sit(syncer):
  made = []

  def make(*arguments, **more):
    made.append(Host(syncer, *arguments, **more))
    return made[-1]

  yield make
  for one in made:
    one.close()


def form(hosts, epoch=0):
  """All get ready and step in the next epoch; returns its word."""
  proposed = hosts[0].word("preparing", epoch).epoch
  for host in hosts:
    host.say(ready=proposed, copies=((epoch, 10 * host.rank + 10),))
  word = hosts[0].word("committed", epoch)
  for host in hosts:
    host.say(ready=0, epoch=proposed, stepped=proposed)
  hosts[0].word("seated", epoch)
  return word


def test_a_lost_hosts_seat_goes_to_a_standby_under_a_newer_epoch(syncer, sit):
  first, second = sit(0, "h:0", address="a:1"), sit(1, "h:1")
  word = form([first, second])
  assert word.epoch >> 16 == 3  # of the syncer's term
  assert [seat.holder for seat in word.seats] == ["h:0", "h:1"]
  assert [seat.copies for seat in word.seats] == [((0, 10),), ((0, 20),)]
  assert word.seats[0].address == "a:1"
  wire = GrpcLearnerWire(syncer.address, TOKEN)
  pool = wire.pool(STANDBY)
  second.close()  # a silent death
  short = first.word("short", word.epoch)
  assert "host 1 (h:1) is lost" in short.why
  first.say(left=word.epoch, stepped=0)
  said = pool.wait(None, LIMIT_S)
  while said is None or said.offer is None:
    said = pool.wait(said, LIMIT_S)
  assert said.offer == Offer(1, 0, rank=1)
  heir = sit(1, "s:1")
  again = form([first, heir], word.epoch)
  assert [seat.holder for seat in again.seats] == ["h:0", "s:1"]
  # the original comes back: too late
  zombie = sit(1, "h:1", epoch=word.epoch)
  with pytest.raises(Refused, match=r"host 1 is s:1.*start it as a standby"):
    zombie.seat.wait(lambda word: False, LIMIT_S)
  pool.close()
  wire.close()


def test_a_frozen_host_is_lost_once_another_ones_epoch_has_broken(sit):
  first, frozen = sit(0, "h:0"), sit(1, "h:1", beat_s=60.0)
  epoch = form([first, frozen]).epoch
  first.say(left=epoch, stepped=0)
  assert "host 1" in first.word("short", epoch).why
  with pytest.raises(Refused, match="silent"):
    frozen.seat.wait(lambda word: False, LIMIT_S)


def test_hosts_whose_epoch_broke_for_no_loss_form_another_one(sit):
  hosts = [sit(0, "h:0"), sit(1, "h:1")]
  epoch = form(hosts).epoch
  for host in hosts:
    host.say(left=epoch, stepped=0)
  assert form(hosts, epoch).epoch == epoch + 1


def test_hosts_go_on_unnoticed_when_a_syncer_takes_over(sit):
  hosts = [sit(rank, f"h:{rank}", epoch=70000) for rank in range(2)]
  assert {host.word("seated").epoch for host in hosts} == {70000}


def test_where_nobody_holds_the_state_all_begin_anew(syncer, sit):
  first, second = sit(0, "h:0"), sit(1, "h:1")
  form([first, second])
  second.close()
  first.close()
  wait_until(lambda: not _streams(syncer), "both to be gone")
  third, fourth = sit(0, "n:0"), sit(1, "n:1")
  form([third, fourth], third.word("preparing").epoch - 1)


def _streams(syncer):
  tables = syncer.service._seating._tables.values()
  return [stream for table in tables for stream in table.streams]
