"""The contract's numbers: how often, with whom and how fragments merge."""

import ast
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from decoupled.errors import ConfigError

FRAGMENTATIONS = ("balanced", "tensor", "layer")
MERGES = ("rda", "average")
GRANULARITIES = ("tensor", "fragment")
ADOPTIONS = ("overwrite", "carry", "blend")
CODECS = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Exchange:
  """When fragments are visited and what a visit waits for.

  Attributes:
    H: inner steps between two visits of the same fragment.
    P: number of fragments; H must be a multiple of P.
    tau: overlap budget in inner steps from the opening of a round to the
      adoption of its result; 0 is a lock-step mode for tests.
    quorum: K, fresh reports a round needs.
    gamma: safety factor of the grace window, below 1 (Eq. 3 of the paper).
    max_grace_rounds: upper bound of the grace window in rounds.
    ema: weight of the newest sample in running estimates.
    fragmentation: balanced, tensor or layer.
    adoption: overwrite, carry or blend.
    blend: share of the local value kept by `blend`.
    codec: precision on the wire.
    max_unsynced_steps: inner steps without any adoption after which a learner
      pauses; 0 = never, -1 = 50 x H.
    adopt_step: take over the run's schedule step at adoption (off only in
      exact tests).
  """

  H: int = 24
  P: int = 24
  tau: int = 2
  quorum: int = 1
  gamma: float = 0.8
  max_grace_rounds: float = 1.0
  ema: float = 0.2
  fragmentation: str = "balanced"
  adoption: str = "overwrite"
  blend: float = 0.5
  codec: str = "float32"
  max_unsynced_steps: int = -1
  adopt_step: bool = True

  def __post_init__(self) -> None:
    _at_least("Exchange.H", self.H, 1)
    _at_least("Exchange.P", self.P, 1)
    if self.H % self.P:
      raise ConfigError(
        f"Exchange.H = {self.H} is not a multiple of Exchange.P = {self.P}: "
        f"choose H = {self.P * max(1, round(self.H / self.P))}, or a P that "
        "divides H"
      )
    _at_least("Exchange.tau", self.tau, 0)
    _at_least("Exchange.quorum", self.quorum, 1)
    _between("Exchange.gamma", self.gamma, 0.0, 1.0)
    _between("Exchange.ema", self.ema, 0.0, 1.0)
    _between("Exchange.blend", self.blend, 0.0, 1.0)
    _at_least("Exchange.max_grace_rounds", self.max_grace_rounds, 0)
    _at_least("Exchange.max_unsynced_steps", self.max_unsynced_steps, -1)
    one_of("Exchange.fragmentation", self.fragmentation, FRAGMENTATIONS)
    one_of("Exchange.adoption", self.adoption, ADOPTIONS)
    one_of("Exchange.codec", self.codec, CODECS)

  @property
  def unsynced_limit(self) -> int:
    """Inner steps a learner may go without an adoption; 0 = no limit."""
    if self.max_unsynced_steps < 0:
      return 50 * self.H
    return self.max_unsynced_steps


@dataclasses.dataclass(frozen=True)
class Outer:
  """How contributions become a new global fragment.

  Attributes:
    learning_rate: eta of the outer Nesterov step.
    momentum: mu.
    merge: rda or average (embeddings are always averaged).
    granularity: whether RDA takes norms per tensor or per fragment.
    presence_exponent: eta is scaled by (learners merged / learners at the
      run's fullest) to this power; 0 keeps it fixed.
  """

  learning_rate: float = 0.6
  momentum: float = 0.8
  merge: str = "rda"
  granularity: str = "tensor"
  presence_exponent: float = 0.5

  def __post_init__(self) -> None:
    if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
      raise ConfigError(
        f"Outer.learning_rate = {self.learning_rate} must be above 0"
      )
    if not 0 <= self.momentum < 1:
      raise ConfigError(f"Outer.momentum = {self.momentum} must be in [0, 1)")
    _between("Outer.presence_exponent", self.presence_exponent, 0.0, 1.0)
    one_of("Outer.merge", self.merge, MERGES)
    one_of("Outer.granularity", self.granularity, GRANULARITIES)


def exchange_of(contract: Mapping[str, str]) -> Exchange:
  """The exchange policy that a run's contract lines spell out.

  Args:
    contract: lines such as `Exchange.H -> 24`; others are ignored, missing
      ones take the defaults.
  """
  return Exchange(**_spelt("Exchange", Exchange, contract))


def outer_of(contract: Mapping[str, str]) -> Outer:
  """As `exchange_of`, for the outer rule."""
  return Outer(**_spelt("Outer", Outer, contract))


def _spelt(
  name: str, kind: type, contract: Mapping[str, str]
) -> dict[str, Any]:
  """Per field of `kind` the value that `contract` spells out, if any."""
  spelt = {
    field.name: contract.get(f"{name}.{field.name}")
    for field in dataclasses.fields(kind)
  }
  return {
    key: ast.literal_eval(text)
    for key, text in spelt.items()
    if text is not None
  }


def exchange_lines(exchange: Exchange) -> tuple[tuple[str, str], ...]:
  """The contract lines of a policy; `exchange_of` reads them back."""
  return tuple(
    (f"Exchange.{field.name}", repr(getattr(exchange, field.name)))
    for field in dataclasses.fields(exchange)
  )


def _at_least(name: str, value: float, least: float) -> None:
  if not value >= least:
    raise ConfigError(f"{name} = {value} must be at least {least}")


def _between(name: str, value: float, low: float, high: float) -> None:
  if not low <= value <= high:
    raise ConfigError(f"{name} = {value} must lie between {low} and {high}")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
  """Raises ConfigError unless `value` is one of the `known` words."""
  if value not in known:
    raise ConfigError(f"{name} = {value!r} is not one of {', '.join(known)}")
