"""Several hosts of one learner do the same at the same boundary (4.9)."""

import dataclasses
import random

import numpy as np
import pytest

from decoupled.link.agreement import Bits, ByStep, OneHost
from decoupled.link.boundary import Session
from decoupled.types import NO_VERSION, CopyId, OpenRound, Phase, Version
from tests.exchange.hosts import POLICY, Host, P


class Steps:
  """Inner steps of all hosts: their collective is the minimum and maximum.

  As in a loop that keeps one step dispatched: before the boundary after step
  k, step k has been dispatched, and the answer of step k - 1 is read.
  """

  def __init__(self, hosts):
    self.hosts = hosts
    self.count = 0

  def step(self):
    """Returns what every host was told at the boundary after this step."""
    self.count += 1
    fed = np.stack([host.agreement.feed for host in self.hosts])
    agreed = []
    for host in self.hosts:
      host.agreement.carried(fed.min(axis=0), fed.max(axis=0))
      k = self.count
      agreed.append(host.boundary.visit(host.leaves, k, 10 * k))
    first, *others = [host.did() for host in self.hosts]
    assert all(other == first for other in others)
    return agreed


@pytest.mark.parametrize("seed", range(6))
def test_hosts_hear_at_different_times_and_act_at_the_same(seed):
  draw = random.Random(seed)
  hosts = [Host(ByStep(P)) for _ in range(3)]
  steps = Steps(hosts)
  queues = [[] for _ in hosts]
  version = [Version(1, 0)] * P
  for k in range(1, 60):
    if k % 2:  # something new happens; each host hears of it later
      p, new = (k // 2) % P, Version(1, k)
      for queue in queues:
        at = k + draw.randrange(4)
        queue.append((at, p, new, version[p]))
      version[p] = new
    for host, queue in zip(hosts, queues, strict=True):
      for at, p, new, base in [x for x in queue if x[0] <= k]:
        queue.remove((at, p, new, base))
        host.stage(p, new, base)
        host.open[p] = OpenRound(Version(1, new.round + 50), p, new)
        host.announce(k, host.open.values())
    steps.step()
  held, copies = hosts[0].did()
  assert max(v.round for v in held) > 40
  assert copies
  for host in hosts:
    for p in range(P):
      assert (np.asarray(host.leaves[p]) == held[p].round).all()


def test_a_version_fed_in_is_kept_until_its_agreement_is_read():
  hosts = [Host(ByStep(P)) for _ in range(2)]
  steps = Steps(hosts)
  old, new = Version(1, 4), Version(1, 8)
  for host in hosts:
    host.stage(0, old, Version(1, 0))
  steps.step()  # notes `old`, which the next step carries round
  hosts[0].stage(0, new, old)  # comes before the answer, at one host only
  steps.step()
  assert [host.boundary.held[0] for host in hosts] == [Version(1, 0)] * 2
  steps.step()  # the answer about `old`
  assert [host.boundary.held[0] for host in hosts] == [old, old]
  for _ in range(4):
    steps.step()  # the other host does not have `new`
  assert [host.boundary.held[0] for host in hosts] == [old, old]
  hosts[1].stage(0, new, old)
  for _ in range(3):
    steps.step()
  assert [host.boundary.held[0] for host in hosts] == [new, new]


def test_a_version_costs_one_step_more_than_on_one_host():
  hosts = [Host(ByStep(P)) for _ in range(2)]
  steps = Steps(hosts)
  for _ in range(5):
    steps.step()
  for host in hosts:
    host.stage(1, Version(1, 2), Version(1, 0))
  taken = 0
  while hosts[0].boundary.held[1] == Version(1, 0):
    steps.step()
    taken += 1
  # noted at a boundary, carried by the next step, read a step late
  assert taken == 3


@pytest.mark.parametrize("late", range(4))
def test_a_refusal_heard_at_different_times_is_acted_on_together(late):
  hosts = [Host(ByStep(P)) for _ in range(2)]
  steps = Steps(hosts)
  for host in hosts:
    host.announce(1, [OpenRound(Version(1, 9), 1, Version(1, 0))])
  while not hosts[0].extracted:
    steps.step()
  first = hosts[0].extracted[0].header.copy
  hosts[0].boundary.refusals.append(first)
  for _ in range(late):
    steps.step()
  hosts[1].boundary.refusals.append(first)
  for _ in range(6):
    steps.step()
  for host in hosts:
    copies = [e.header.copy for e in host.extracted]
    assert [copy.attempt for copy in copies] == [0, 1]
    assert {copy.round for copy in copies} == {9}


def test_a_round_that_one_host_has_not_heard_of_waits():
  hosts = [Host(ByStep(P)) for _ in range(2)]
  steps = Steps(hosts)
  hosts[0].announce(1, [OpenRound(Version(1, 9), 1, Version(1, 0))])
  hosts[1].announce(1, [])
  for _ in range(5):
    steps.step()
  assert not hosts[0].extracted
  hosts[1].announce(2, [OpenRound(Version(1, 9), 1, Version(1, 0))])
  for _ in range(4):
    steps.step()
  assert [len(host.extracted) for host in hosts] == [1, 1]


def test_an_extraction_agreed_on_is_void_once_its_base_is_gone():
  """The version arrives between the agreement and its reading."""
  hosts = [Host(ByStep(P)) for _ in range(2)]
  steps = Steps(hosts)
  for host in hosts:
    host.stage(1, Version(1, 2), Version(1, 0))
  steps.step()
  for host in hosts:  # wants the base that is about to be replaced
    host.announce(1, [OpenRound(Version(1, 9), 1, Version(1, 0))])
  for _ in range(6):
    steps.step()
  for host in hosts:
    assert host.boundary.held[1] == Version(1, 2)
    assert not host.extracted


def test_one_host_that_must_stop_stops_all_a_step_later():
  hosts = [Host(ByStep(P)) for _ in range(2)]
  steps = Steps(hosts)
  hosts[1].announce(1, [], Phase.DRAINING)
  stops = [[agreed.stop for agreed in steps.step()] for _ in range(4)]
  assert stops[0] == [False, False]
  assert stops[-1] == [True, True]
  assert all(a == b for a, b in stops)


def test_a_learner_of_one_host_acts_at_once():
  host = Host(OneHost())
  host.stage(2, Version(1, 3), Version(1, 0))
  host.announce(1, [OpenRound(Version(1, 9), 1, Version(1, 0))])
  agreed = host.boundary.visit(host.leaves, 1, 10)
  assert agreed.adopt[2] == Version(1, 3) == host.boundary.held[2]
  assert agreed.adopt[0] == NO_VERSION
  [extraction] = host.extracted
  assert extraction.header.copy.round == 9
  assert (extraction.header.steps, extraction.header.tokens) == (1, 10)


class Together:
  """The collective by itself: what all hosts of a test feed at once.

  The hosts of a test take turns, so each host's lanes are put down in a first
  round of visits whose answers are thrown away with the hosts.
  """

  def __init__(self, others):
    self.others = others

  def __call__(self, lanes):
    fed = np.stack([lanes, *(other() for other in self.others)])
    return fed.min(axis=0), fed.max(axis=0)


def alone_with(other_bits, words=()):
  """A `ByStep` whose other host always feeds the same bits."""
  other = ByStep(P, lambda lanes: (lanes, lanes))
  for word in words:
    other.every(word, True)
  other.exchange(other_bits)
  lanes = other.feed
  return ByStep(P, Together([lambda: lanes]))


def bits(staged=NO_VERSION, **fields):
  none = (NO_VERSION,) * P
  return Bits((staged, *none[1:]), none, held=none, attempts=(0,) * P, **fields)


def test_a_boundary_without_a_step_is_answered_at_once():
  version = Version(1, 4)
  agreement = alone_with(bits(version, incarnation=3))
  assert agreement.joined(3) == 0
  agreed = agreement.exchange(bits(version, incarnation=3))
  assert agreed.adopt[0] == version
  assert agreement.joined(3) == 3
  assert agreement.exchange(bits(Version(1, 5))).adopt[0] == NO_VERSION


def test_words_are_heard_with_the_next_answer():
  agreement = alone_with(bits(), words=("begun", "leave"))
  assert not agreement.every("begun", True)  # nobody has been asked yet
  agreement.exchange(bits())
  assert agreement.every("begun", True)
  assert not agreement.every("ready", True)  # the other host is not
  assert agreement.some("leave", False)
  assert not agreement.some("ended", False)


def test_what_steps_have_under_way_is_forgotten_where_none_follows():
  version = Version(1, 4)
  agreement = alone_with(bits())
  for _ in range(2):
    lanes = agreement.feed
    agreement.carried(lanes, lanes)
    agreement.exchange(bits(version))
  assert len(agreement.pinned()) == 3
  agreement.exchange(bits(version))  # no step: the other host has none staged
  assert agreement.pinned() == (bits(version),)
  lanes = agreement.feed  # stepping again: the first answer is a step late
  agreement.carried(lanes, lanes)
  assert agreement.exchange(bits(version)).adopt[0] == NO_VERSION
  lanes = agreement.feed
  agreement.carried(lanes, lanes)
  assert agreement.exchange(bits(version)).adopt[0] == version


def test_a_new_incarnation_counts_once_every_host_has_joined_as_it():
  hosts = [Host(ByStep(P)) for _ in range(2)]
  steps = Steps(hosts)
  for _ in range(4):
    steps.step()
  for host in hosts:
    host.announce(1, [OpenRound(Version(1, 9), 1, Version(1, 0))])
  hosts[0].boundary.session = Session(2, 1)
  for _ in range(5):
    steps.step()  # asserts that both do the same
  assert not hosts[0].extracted
  hosts[1].boundary.session = Session(2, 1)
  for _ in range(6):
    steps.step()
  for host in hosts:
    assert [e.header.copy.incarnation for e in host.extracted] == [2]


def test_a_version_that_one_host_cannot_carry_is_overwritten_by_all():
  policy = dataclasses.replace(POLICY, adoption="carry")
  hosts = [Host(ByStep(P), policy) for _ in range(2)]
  steps = Steps(hosts)
  steps.step()
  base = hosts[0].ops.stage(0, (np.zeros(3, np.float32),))
  hosts[0].stage(0, Version(1, 2), Version(1, 0), own_base=base)
  hosts[1].stage(0, Version(1, 2), Version(1, 0))
  for host in hosts:
    host.train()
  for _ in range(4):
    steps.step()
  assert [host.values()[0] for host in hosts] == [2.0, 2.0]


@pytest.mark.parametrize("late", range(3))
def test_version_0_is_handed_over_at_the_same_boundary(late):
  hosts = [Host(ByStep(P)) for _ in range(2)]
  steps = Steps(hosts)
  for _ in range(3):
    steps.step()
  wanted = tuple(CopyId(1, 1, 0, p, 0) for p in range(P))
  hosts[0].announce(1, [], Phase.WAITING, wanted=wanted)
  for _ in range(late):
    steps.step()
  assert not hosts[0].extracted
  hosts[1].announce(1, [], Phase.WAITING, wanted=wanted)
  for _ in range(6):
    steps.step()
  for host in hosts:
    assert [e.header.copy for e in host.extracted] == list(wanted)
