"""A language model's learner for in-memory jobs: the real inner step."""

from typing import Any

import jax
import numpy as np

from decoupled.config import Config
from decoupled.data.corpus import Bytes
from decoupled.data.pipeline import Order, Steps
from decoupled.learner import mesh as meshes
from decoupled.learner import step as steps
from decoupled.learner.optimizer import make_optimizer
from decoupled.models.task import LanguageModel


class Program:
  """What all learners of one configuration share: the compiled step.

  Args:
    config: model, optimizer, schedule, corpus and batch.
    sequences: of one step; the configuration's by default.
  """

  def __init__(self, config: Config, sequences: int = 0):
    self.config = config
    self.sequences = sequences or config.batch.sequences
    self.mesh = meshes.make_mesh(config.mesh, jax.devices()[:1])
    self.task = LanguageModel(config.transformer)
    self.optimizer = make_optimizer(config.optimizer, self.task.tensor_specs())
    self.step: Any = steps.make_train_step(
      self.task, self.optimizer, config.optimizer, config.schedule, self.mesh
    )
    self.init = steps.make_init(self.task, self.optimizer, self.mesh)


class LanguageTrainer:
  """One learner (see `launch.in_memory.Trainer`).

  Args:
    program: shared with the other learners.
    text: the training bytes.
    seed: of the initial parameters and of the data order.
    learner: which shard of the data.
    learners: of how many.
    shards: shards read at once, from `learner` on (data-parallel training
      reads all of them).
  """

  def __init__(
    self,
    program: Program,
    text: Bytes,
    seed: int,
    learner: int = 0,
    learners: int = 1,
    shards: int = 1,
  ):
    self._program = program
    self._learner = learner
    self._state = program.init(np.uint32(seed))
    each = program.sequences // shards
    context = program.config.corpus.context
    self._steps = [
      Steps(
        text,
        Order(len(text), context, seed=seed, learner=shard, learners=learners),
        0,
        each,
      )
      for shard in range(learner, learner + shards)
    ]
    self._tokens = each * shards * context

  @property
  def params(self) -> Any:
    return self._state.params

  @params.setter
  def params(self, params: Any) -> None:
    self._state = self._state._replace(params=params)

  def step(self, step: int, schedule_step: int) -> tuple[int, float]:
    rows = np.concatenate([s[step - 1].rows for s in self._steps])
    batch = steps.put_batch(rows, self._program.mesh)
    self._state, metrics = self._program.step(
      self._state,
      batch,
      np.int32(schedule_step),
      np.int32(step),
      np.int32(self._learner),
    )
    return self._tokens, float(metrics["loss"])
