"""Several hosts of one learner do the same at the same boundary (4.9)."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled.algorithm.policy import Exchange
from decoupled.clock import ManualClock
from decoupled.link import tree
from decoupled.link.agreement import ByStep, OneHost
from decoupled.link.boundary import Boundary, Session, Staged
from decoupled.link.ops import FragmentOps
from decoupled.types import (
  NO_VERSION,
  Announcement,
  Manifest,
  OpenRound,
  Phase,
  Unit,
  Version,
)

P = 4
POLICY = Exchange(H=8, P=P)


class Host:
  """A boundary of one host, and what its network has brought so far."""

  def __init__(self, agreement):
    params = {f"w{i}": jnp.zeros(3) for i in range(P)}
    self.leaves = jax.tree.leaves(params)
    manifest = Manifest(
      tree.tensor_specs(params), tuple((Unit(f"w{i}"),) for i in range(P))
    )
    index = {f"w{i}": i for i in range(P)}
    self.ops = FragmentOps(manifest, index, self.leaves)
    self.agreement = agreement
    self.extracted = []
    self.open = {}
    self.boundary = Boundary(
      POLICY, self.ops, agreement, ManualClock(), self.extracted.append
    )
    self.boundary.session = Session(1, 1)
    self.boundary.held = [Version(1, 0)] * P

  def stage(self, fragment, version, base):
    value = (np.full(3, version.round, np.float32),)
    self.boundary.arrived.append(
      Staged(
        fragment, version, base, self.ops.stage(fragment, value),
        None, None, 0, False,
      )
    )  # fmt: skip

  def announce(self, seq, rounds, phase=Phase.TRAINING):
    self.boundary.announcement = Announcement(
      1, seq, phase, tuple(rounds), 100, 0.0, 0.0, (Version(1, 0),) * P
    )

  def did(self):
    copies = [e.header.copy for e in self.extracted]
    return tuple(self.boundary.held), copies


def step(hosts):
  """The inner step's collective: minimum and maximum over the hosts."""
  fed = np.stack([host.agreement.feed for host in hosts])
  low, high = fed.min(axis=0), fed.max(axis=0)
  for host in hosts:
    host.agreement.answer(low, high)


@pytest.mark.parametrize("seed", range(6))
def test_hosts_hear_at_different_times_and_act_at_the_same(seed):
  draw = random.Random(seed)
  hosts = [Host(ByStep(P)) for _ in range(3)]
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
    for host in hosts:
      host.boundary.visit(host.leaves, k, 10 * k)
    first, *others = [host.did() for host in hosts]
    assert all(other == first for other in others)
    step(hosts)
  held, copies = hosts[0].did()
  assert max(v.round for v in held) > 40
  assert copies
  for host in hosts:
    for p in range(P):
      assert (np.asarray(host.leaves[p]) == held[p].round).all()


def test_a_version_fed_in_is_kept_until_its_agreement_is_read():
  hosts = [Host(ByStep(P)) for _ in range(2)]
  old, new = Version(1, 4), Version(1, 8)
  for host in hosts:
    host.stage(0, old, Version(1, 0))
    host.boundary.visit(host.leaves, 1, 10)  # feeds `old`
  hosts[0].stage(0, new, old)  # arrives before the answer, at one host only
  step(hosts)  # still the answer to what was fed before `old`
  for host in hosts:
    host.boundary.visit(host.leaves, 2, 20)
  step(hosts)  # the answer about `old`
  for host in hosts:
    host.boundary.visit(host.leaves, 3, 30)
  assert [host.boundary.held[0] for host in hosts] == [old, old]


def test_one_host_that_must_stop_stops_all_a_step_later():
  hosts = [Host(ByStep(P)) for _ in range(2)]
  hosts[1].announce(1, [], Phase.DRAINING)
  stops = []
  for k in range(1, 4):
    stops.append([h.boundary.visit(h.leaves, k, k).stop for h in hosts])
    step(hosts)
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
