"""The learner's loop: read this file first.

One inner step at a time, and between two of them a boundary. Nothing in here
waits for the network, a disk, a lock or a metric:

  1. dispatch the step on the batch at hand (its inputs are donated);
  2. fetch and place the next batch while the device works;
  3. sleep until the step is about to finish (`pace`);
  4. boundary: adopt merged fragments, extract wanted ones (`link`).

Losses are read one step late, by another thread.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from decoupled.algorithm.policy import Exchange
from decoupled.data.pipeline import Item
from decoupled.learner.mesh import replicated
from decoupled.learner.pace import Pace
from decoupled.learner.step import Metrics, TrainState, TrainStep, put_batch
from decoupled.link.ops import place

_RECENT_STEPS = 1 << 16  # step times kept for the median and the 99th


class Stretch(Protocol):
  """Stretches inner steps: a fault that is injected, 1.0 for none."""

  factor: float


class Exchanging(Protocol):
  """What the loop needs of a link; a standby's shadow steps have none.

  Attributes:
    done: the run has ended.
    policy: the contract's exchange.
  """

  done: bool
  policy: Exchange

  @property
  def common_step(self) -> int: ...
  def boundary(
    self,
    params: Any,
    *,
    step: int,
    tokens: int,
    schedule_step: int = 0,
    position: tuple[int, int] = (0, 0),
    loss: float = math.nan,
    idle: Callable[[], bool] = lambda: False,
  ) -> Any: ...


class FullSpeed:
  """No stretch."""

  factor = 1.0


_FULL_SPEED = FullSpeed()


class Lanes(Protocol):
  """What a learner of several hosts feeds into its steps and gets back."""

  def feed(self) -> tuple[jax.Array, ...]:
    """Further arguments of the step about to be dispatched."""
    ...

  def carried(self, metrics: Metrics) -> None:
    """What that step will return."""
    ...


class NoLanes:
  """A learner of one host."""

  def feed(self) -> tuple[jax.Array, ...]:
    return ()

  def carried(self, metrics: Metrics) -> None:
    del metrics


_NO_LANES = NoLanes()


class Source(Protocol):
  """Where batches come from (`data.pipeline.ReadAhead`)."""

  @property
  def exhausted(self) -> bool: ...
  def __next__(self) -> Item | None: ...


@dataclasses.dataclass
class Trained:
  """What a loop has done; also its state while it runs.

  Attributes:
    state: parameters and inner optimizer state.
    step: inner steps.
    tokens: tokens trained on.
    schedule_step: step of the learning-rate schedule.
    position: data position after the last step.
    loss: last training loss read.
    learning_rate: of the same step.
    step_s: durations of the newest steps.
  """

  state: TrainState
  schedule_step: int
  position: tuple[int, int]
  step: int = 0
  tokens: int = 0
  loss: float = math.nan
  learning_rate: float = math.nan
  step_s: list[float] = dataclasses.field(default_factory=list)


def train(
  link: Exchanging,
  done: Trained,
  train_step: TrainStep,
  batches: Source,
  mesh: jax.sharding.Mesh,
  pace: Pace,
  *,
  tokens_per_step: int,
  learner_id: int,
  pad: Callable[[], float] = lambda: 0.0,
  slow: Stretch = _FULL_SPEED,
  lanes: Lanes = _NO_LANES,
  stopping: Callable[[], bool] = lambda: False,
  after_step: Callable[[Trained], None] = lambda _: None,
) -> None:
  """Trains until the run ends or `stopping()`; `done` is kept up to date.

  Args:
    link: has begun; says when the run is over.
    done: where to start from.
    train_step: the compiled inner step.
    batches: yields (rows, position after them); None at the end of the data.
    mesh: where batches live.
    pace: watches steps finish.
    tokens_per_step: of this learner.
    learner_id: goes into the dropout key.
    pad: seconds to sleep in a step, which stand for accelerator time.
    slow: its `factor` stretches steps.
    lanes: by which the hosts of this learner agree.
    stopping: whether to leave at the next boundary.
    after_step: told after every boundary; must not block.
  """
  everywhere = replicated(mesh)

  def scalar(value: int) -> jax.Array:
    """An int32 on every device, moved there explicitly."""
    return place(np.array(value, np.int32), everywhere)

  learner = scalar(learner_id)
  item = next(batches)
  batch = put_batch(item.rows, mesh) if item else None
  began = time.monotonic()
  with jax.transfer_guard("disallow"):
    while not (link.done or stopping()):
      if item is None:
        item = _without_data(link, done, batches, stopping)
        batch = put_batch(item.rows, mesh) if item else None
        began = time.monotonic()
        continue
      done.state, metrics = train_step(
        done.state,
        batch,
        scalar(done.schedule_step),
        scalar(done.step),
        learner,
        *lanes.feed(),
      )
      lanes.carried(metrics)
      done.step += 1
      done.tokens += tokens_per_step
      done.position = item.position
      pace.dispatched(done.step, metrics)
      item = next(batches)
      batch = put_batch(item.rows, mesh) if item else None
      time.sleep(pad())
      pace.wait(done.step)
      if slow.factor > 1.0:
        time.sleep((slow.factor - 1.0) * (time.monotonic() - began))
      done.loss = pace.last.loss
      done.learning_rate = pace.last.learning_rate
      params = link.boundary(
        done.state.params,
        step=done.step,
        tokens=done.tokens,
        schedule_step=done.schedule_step + 1,
        position=done.position,
        loss=done.loss,
      )
      done.state = done.state._replace(params=params)
      done.schedule_step += 1
      if link.policy.adopt_step:
        done.schedule_step = max(done.schedule_step, link.common_step)
      now = time.monotonic()
      done.step_s.append(now - began)
      del done.step_s[:-_RECENT_STEPS]
      began = now
      after_step(done)
  if done.step:
    done.loss = pace.finish(done.step).loss


def _without_data(
  link: Exchanging, done: Trained, batches: Source, stopping: Callable[[], bool]
) -> Item | None:
  """Visits boundaries without steps: others may still need this learner.

  Returns:
    The next batch, should there be one after all: of a unit whose holder died.
  """
  params = link.boundary(
    done.state.params,
    step=done.step,
    tokens=done.tokens,
    schedule_step=done.schedule_step,
    position=done.position,
    loss=done.loss,
    idle=lambda: batches.exhausted and not stopping(),
  )
  done.state = done.state._replace(params=params)
  return None if link.done or batches.exhausted else next(batches)
