"""A boundary of one host, played by hand: no wire, no rounds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from decoupled.algorithm.policy import Exchange
from decoupled.clock import ManualClock
from decoupled.link import tree
from decoupled.link.boundary import Boundary, Session, Staged
from decoupled.link.ops import FragmentOps
from decoupled.types import Announcement, Manifest, Phase, Unit, Version

P = 4
POLICY = Exchange(H=8, P=P)


class Host:
  """A boundary of one host, and what its network has brought so far."""

  def __init__(self, agreement, policy=POLICY):
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
    self.clock = ManualClock()
    self.boundary = Boundary(
      policy, self.ops, agreement, self.clock, self.extracted.append
    )
    self.boundary.session = Session(1, 1)
    self.boundary.held = [Version(1, 0)] * P

  def stage(self, fragment, version, base, **fields):
    """A merged fragment has arrived; its values are its round's number."""
    value = (np.full(3, version.round, np.float32),)
    staged = Staged(
      fragment=fragment,
      version=version,
      base=base,
      merged=self.ops.stage(fragment, value),
      included=None,
      own_base=None,
      common_step=0,
      restored=False,
    )
    self.boundary.arrived.append(dataclasses.replace(staged, **fields))

  def announce(self, seq, rounds, phase=Phase.TRAINING, **fields):
    announcement = Announcement(
      1, seq, phase, tuple(rounds), 100, 0.0, 0.0, (Version(1, 0),) * P
    )
    self.boundary.announced_at = self.clock.now()
    self.boundary.announcement = dataclasses.replace(announcement, **fields)

  def visit(self, step, tokens=None):
    """The boundary after a step of `step` in all; 10 tokens each."""
    tokens = 10 * step if tokens is None else tokens
    return self.boundary.visit(self.leaves, step, tokens)

  def train(self, amount=1.0):
    self.leaves = [leaf + amount for leaf in self.leaves]

  def values(self):
    return [float(leaf[0]) for leaf in self.leaves]

  def headers(self):
    return [e.header for e in self.extracted]

  def did(self):
    copies = [e.header.copy for e in self.extracted]
    return tuple(self.boundary.held), copies
