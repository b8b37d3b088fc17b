"""The global fragments: float32 parameters, outer state, what was published.

Nothing here knows the rounds. `merged` is pure: it computes a successor and
leaves the current fragment as it is, so that it can run off the event loop.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import optax

from decoupled.algorithm import merge as merge_lib
from decoupled.algorithm import outer as outer_lib
from decoupled.algorithm.policy import Exchange, Outer
from decoupled.types import (
  NO_VERSION,
  Arrays,
  Contribution,
  Manifest,
  Role,
  Version,
)
from decoupled.wire import codecs


@dataclasses.dataclass(frozen=True)
class GlobalFragment:
  """One fragment of the global model at one version.

  Attributes:
    version: who wrote it.
    base: the version it replaced.
    arrays: float32 parameters, the syncer's own.
    outer_state: its Optax state.
    published: the parameters as learners decode them (equal to `arrays` on a
      float32 wire).
    delta: what takes a holder of `base` to `published`, below float32.
    common_step: the run's schedule step at this version.
    restored: adopt by overwriting.
  """

  version: Version
  base: Version
  arrays: Arrays
  outer_state: optax.OptState
  published: Arrays
  delta: codecs.Payload | None
  common_step: int
  restored: bool = False


class GlobalModel:
  """All fragments of the run."""

  def __init__(self, manifest: Manifest, exchange: Exchange, outer: Outer):
    self.manifest = manifest
    self._codec = exchange.codec
    self._outer = outer
    self.roles: tuple[tuple[Role, ...], ...] = tuple(
      tuple(manifest.spec(unit.tensor).role for unit in units)
      for units in manifest.fragments
    )
    self.fragments: list[GlobalFragment | None] = [None] * len(
      manifest.fragments
    )

  @property
  def versions(self) -> tuple[Version, ...]:
    return tuple(NO_VERSION if f is None else f.version for f in self.fragments)

  def get(self, fragment: int) -> GlobalFragment:
    found = self.fragments[fragment]
    if found is None:
      raise ValueError(f"fragment {fragment} has no version yet")
    return found

  def start(
    self,
    fragment: int,
    version: Version,
    arrays: Arrays,
    common_step: int,
    outer_state: optax.OptState | None = None,
    restored: bool = False,
  ) -> None:
    """Sets a fragment that replaces nothing: a seed or a snapshot."""
    arrays = tuple(np.asarray(a, np.float32) for a in arrays)
    if outer_state is None:
      outer_state = outer_lib.init(self._outer, arrays, self.roles[fragment])
    self.fragments[fragment] = GlobalFragment(
      version=version,
      base=NO_VERSION,
      arrays=arrays,
      outer_state=outer_state,
      published=arrays,
      delta=None,
      common_step=common_step,
      restored=restored,
    )

  def merged(
    self,
    fragment: int,
    version: Version,
    contributions: Sequence[Contribution],
    weights: Sequence[float],
    rate_scale: float,
    common_step: int,
    restored: bool = False,
  ) -> GlobalFragment:
    """The successor of a fragment (Algorithm 2, lines 11 and 13).

    Args:
      fragment: which.
      version: of the successor.
      contributions: in the order of learner ids, all based on the current
        version; may be empty.
      weights: one per contribution; all zero leaves the parameters unchanged.
      rate_scale: factor on the outer learning rate.
      common_step: the run's schedule step at the new version.
      restored: whether learners must overwrite with it.
    """
    now = self.get(fragment)
    roles = self.roles[fragment]
    arrays, state = now.arrays, now.outer_state
    if any(w > 0 for w in weights):
      deltas = [
        merge_lib.pseudo_gradient(now.published, c.arrays)
        for c in contributions
      ]
      delta = merge_lib.merge(
        deltas,
        np.asarray(weights, np.float64),
        roles,
        self._outer.merge,
        self._outer.granularity,
      )
      arrays, state = outer_lib.step(
        self._outer, arrays, delta, state, roles, rate_scale
      )
    published, payload = arrays, None
    if self._codec != "float32":
      payload = codecs.encode(self._codec, arrays, now.published)
      published = codecs.decode(self._codec, payload, now.published)
    return GlobalFragment(
      version=version,
      base=now.version,
      arrays=arrays,
      outer_state=state,
      published=published,
      delta=payload,
      common_step=common_step,
      restored=restored,
    )

  def commit(self, fragment: int, successor: GlobalFragment) -> None:
    """Makes a successor current; versions only go forward."""
    now = self.get(fragment)
    if successor.base != now.version or successor.version <= now.version:
      raise ValueError(
        f"fragment {fragment} is at {now.version}, the merge was based on "
        f"{successor.base}"
      )
    self.fragments[fragment] = successor
