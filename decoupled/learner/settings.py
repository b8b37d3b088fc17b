"""How a learner trains: optimizer and schedule (contract), the rest local."""

import dataclasses
import math

from decoupled.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """The inner optimizer, AdamW.

  Attributes:
    learning_rate: peak rate, reached at the end of the warm-up.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled decay of matrices (norms and embeddings: none).
    clip_norm: bound of the gradient's global norm.
  """

  learning_rate: float = 3e-3
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.1
  clip_norm: float = 1.0

  def __post_init__(self) -> None:
    for name in ("learning_rate", "eps", "clip_norm"):
      _above("Optimizer", name, getattr(self, name))
    for name in ("b1", "b2"):
      value = getattr(self, name)
      if not 0 <= value < 1:
        raise ConfigError(f"Optimizer.{name} = {value} must be in [0, 1)")
    if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
      raise ConfigError(
        f"Optimizer.weight_decay = {self.weight_decay} must be at least 0"
      )


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The learning rate over the schedule step, as shares of its peak.

  Attributes:
    warmup_steps: steps of the linear rise; 0 starts at the peak.
    decay_steps: step at which the cosine decay reaches the floor.
    floor: share of the peak that is left from then on; above 0, so that a
      longer run still learns.
  """

  warmup_steps: int = 50
  decay_steps: int = 2000
  floor: float = 0.1

  def __post_init__(self) -> None:
    if self.warmup_steps < 0:
      raise ConfigError(
        f"Schedule.warmup_steps = {self.warmup_steps} must be at least 0"
      )
    if self.decay_steps <= self.warmup_steps:
      raise ConfigError(
        f"Schedule.decay_steps = {self.decay_steps} must be above "
        f"Schedule.warmup_steps = {self.warmup_steps}: the decay begins where "
        "the warm-up ends"
      )
    if not 0 < self.floor <= 1:
      raise ConfigError(f"Schedule.floor = {self.floor} must be in (0, 1]")


@dataclasses.dataclass(frozen=True)
class Mesh:
  """How a learner's devices are arranged.

  Attributes:
    data: copies of the parameters; 0 = as many as the devices allow.
    fsdp: devices over which one copy of the parameters is sharded.
  """

  data: int = 0
  fsdp: int = 1

  def __post_init__(self) -> None:
    if self.data < 0:
      raise ConfigError(
        f"Mesh.data = {self.data} must be at least 0 (0 = all devices)"
      )
    if self.fsdp < 1:
      raise ConfigError(f"Mesh.fsdp = {self.fsdp} must be at least 1")


@dataclasses.dataclass(frozen=True)
class Local:
  """What a learner may choose without changing what it computes.

  Attributes:
    remat: recompute activations in the backward pass instead of keeping them.
    microbatches: pieces of a batch whose gradients are accumulated.
    pad_s: fixed sleep per inner step on CPU devices, which stands for
      accelerator time.
    jitter: share by which that sleep varies from step to step, evenly spread.
    xla_threads: threads of XLA on the CPU; 0 = XLA's own choice.
    donates: give the optimizer state to learners that join; meanwhile there
      is a copy of it on the devices.
    copy_every: inner steps from one copy of a host's state in host memory to
      the next, in a learner of several hosts: what the others go back to when
      one of them dies.
  """

  remat: bool = False
  microbatches: int = 1
  pad_s: float = 0.08
  jitter: float = 0.0
  xla_threads: int = 1
  donates: bool = True
  copy_every: int = 10

  def __post_init__(self) -> None:
    if self.microbatches < 1:
      raise ConfigError(
        f"Local.microbatches = {self.microbatches} must be at least 1"
      )
    if not (math.isfinite(self.pad_s) and self.pad_s >= 0):
      raise ConfigError(f"Local.pad_s = {self.pad_s} must be at least 0")
    if not 0 <= self.jitter < 1:
      raise ConfigError(f"Local.jitter = {self.jitter} must be in [0, 1)")
    if self.copy_every < 1:
      raise ConfigError(
        f"Local.copy_every = {self.copy_every} must be at least 1"
      )
    if self.xla_threads < 0:
      raise ConfigError(
        f"Local.xla_threads = {self.xla_threads} must be at least 0"
      )


def _above(component: str, name: str, value: float) -> None:
  if not (math.isfinite(value) and value > 0):
    raise ConfigError(f"{component}.{name} = {value} must be above 0")
