"""Two hosts of one learner and their syncer over real gRPC."""

import dataclasses
from concurrent import futures

import numpy as np
import pytest

from decoupled.errors import Refused
from decoupled.types import Contribution, Slice
from decoupled.wire import codecs
from decoupled.wire.client import GrpcLearnerWire
from tests.wire import fakes
from tests.wire.fakes import TOKEN, FakeRounds, Server, wait_until
from tests.wire.test_learner_wire import Listener


class Host:
  """One host's connections."""

  def __init__(self, server, rank):
    self.rank = rank
    self.wire = GrpcLearnerWire(server.address, TOKEN)
    self.listener = Listener()

  def hello(self, **changes):
    said = fakes.hello(
      hosts=2, host=self.rank, holder=f"box{self.rank}:1", **changes
    )
    return self.wire.hello(said)

  def listen(self):
    self.wire.listen(self.listener.announced, self.listener.lost)

  def report(self, seq, **changes):
    self.wire.report(fakes.report(seq, host=self.rank, **changes))


def together(*calls):
  """Calls that wait for each other, each on a thread of its own."""
  with futures.ThreadPoolExecutor(len(calls)) as pool:
    return [f.result(fakes.LIMIT_S) for f in [pool.submit(c) for c in calls]]


def joined(hosts, **changes):
  welcomes = together(*(lambda h=h: h.hello(**changes) for h in hosts))
  for host in hosts:
    host.listen()
  for host in hosts:
    wait_until(lambda h=host: h.listener.announcements, "an announcement")
  return welcomes


@pytest.fixture
def server():
  with Server() as running:
    yield running


@pytest.fixture
def hosts(server):
  made = [Host(server, rank) for rank in range(2)]
  yield made
  for host in made:
    host.wire.close()


def test_a_claim_is_granted_once_to_all_hosts(server, hosts):
  first, second = joined(hosts)
  assert first == second
  [(_, claim)] = server.rounds.did("hello")
  assert (claim.hosts, claim.holder) == (2, "box0:1,box1:1")
  status = server.service.status()
  assert [(one.learner_id, one.hosts) for one in status.learners] == [(0, 2)]


def test_a_claim_without_a_host_says_who_is_missing():
  with Server(hosts_s=0.3) as server:
    host = Host(server, 1)
    with pytest.raises(Refused, match="host 0 did not join") as refused:
      host.hello()
    assert refused.value.reason == "incomplete"
    with pytest.raises(Refused, match="must name the --learner_id"):
      host.hello(learner_id=-1)
    assert not server.rounds.did("hello")
    host.wire.close()


def test_one_report_reaches_the_rounds(server, hosts):
  joined(hosts)
  hosts[0].report(1, step=4)
  hosts[1].report(1, step=3)
  wait_until(lambda: server.rounds.reports, "the report")
  [report] = server.rounds.reports
  assert (report.step, report.host) == (3, 0)


def test_one_lost_stream_ends_the_incarnation_of_all(server, hosts):
  joined(hosts)
  hosts[1].wire.close()
  wait_until(lambda: hosts[0].listener.losses, "the other host to be told")
  assert "host 1" in hosts[0].listener.losses[0]
  assert server.rounds.did("disconnected") == [("disconnected", 0, 1)]
  back = [hosts[0], Host(server, 1)]
  welcomes = joined(back, previous=1)
  assert [w.incarnation for w in welcomes] == [2, 2]
  back[1].wire.close()


def test_a_host_that_joins_again_makes_the_others_join_again(server, hosts):
  """Its connection may look alive for long, seen from here."""
  joined(hosts)
  with futures.ThreadPoolExecutor(1) as pool:
    first = pool.submit(lambda: hosts[1].hello(previous=1))
    wait_until(lambda: hosts[0].listener.losses, "the other host to be told")
    second = hosts[0].hello(previous=1)
    assert first.result(fakes.LIMIT_S) == second


def test_a_learner_leaves_with_its_last_host(server, hosts):
  joined(hosts)
  hosts[0].wire.leave("ended")
  assert not server.rounds.did("leave")
  hosts[1].wire.leave("ended")
  assert server.rounds.did("leave") == [("leave", 0, 1)]
  assert not server.rounds.did("disconnected")


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_parts_become_one_contribution(codec):
  with Server(FakeRounds(codec)) as server:
    hosts = [Host(server, rank) for rank in range(2)]
    joined(hosts)
    base = server.rounds.current[0]
    arrays = fakes.arrays(0, seed=5)
    held = server.rounds.versions[0]
    header = fakes.header(0, held)
    slices = [
      (Slice(0, (0, 0), (200, 1000)), Slice(1, (), ())),
      (Slice(0, (200, 0), (500, 1000)),),
    ]
    for host in hosts:
      mine = slices[host.rank]
      part = Contribution(
        0,
        header,
        tuple(arrays[s.unit][s.within] for s in mine),
        host.rank,
        mine,
      )
      assert not server.rounds.contributions
      assert host.wire.contribute(part, base) == ""
    [whole] = server.rounds.contributions
    assert (whole.header, whole.slices) == (header, ())
    sent = codecs.encode(codec, arrays, base)
    for got, expected in zip(
      whole.arrays, codecs.decode(codec, sent, base), strict=True
    ):
      np.testing.assert_array_equal(got, expected)
    late = dataclasses.replace(header, copy=header.copy._replace(incarnation=9))
    part = Contribution(0, late, (arrays[1],), 0, (Slice(1, (), ()),))
    assert hosts[0].wire.contribute(part, None) == "fenced"
    for host in hosts:
      host.wire.close()
