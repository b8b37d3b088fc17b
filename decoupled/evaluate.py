"""Held-out loss of the global parameters: version 0 and the newest snapshot.

Runs in a process of its own after the drain, on the same batches for both, so
that the difference is what training did.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from decoupled.checkpoint import syncer_store
from decoupled.checkpoint.syncer_store import GlobalSnapshot
from decoupled.clock import MonotonicClock
from decoupled.config import Config
from decoupled.data import corpus, pipeline
from decoupled.errors import DecoupledError
from decoupled.launch.options import EvaluateOptions
from decoupled.learner import mesh as meshes
from decoupled.link import tree
from decoupled.models.task import LanguageModel
from decoupled.observe.events import EventLog, EventReader

_TOKENS = 1 << 16  # about as many are evaluated
_SEQUENCES = 32  # of a batch, at most


class HeldOut(NamedTuple):
  """Mean loss over held-out tokens.

  Attributes:
    loss: nats per token.
    tokens: how many there were.
  """

  loss: float
  tokens: int


def main(config: Config, options: EvaluateOptions) -> int:
  """Evaluates, appends an `eval` event to the log and says the result.

  Raises:
    DecoupledError: nothing was saved, or it does not fit the configuration.
  """
  if options.devices_per_host:
    jax.config.update("jax_num_cpu_devices", options.devices_per_host)
  if options.follow:
    from decoupled import follow

    return follow.main(config, options)
  store = options.store or str(options.workdir / "checkpoints")
  first = syncer_store.restore_version0(store)
  newest = syncer_store.restore_newest(store)
  if first is None or newest is None:
    raise DecoupledError(
      f"nothing to evaluate: no snapshot lies under {store}; was it the "
      "--store of a run that has ended?"
    )
  evaluator = Evaluator(config)
  before = evaluator.loss(first.value)
  after = evaluator.loss(newest.value)
  log = event_log(options)
  log.emit(
    "eval",
    initial_loss=before.loss,
    eval_loss=after.loss,
    eval_tokens=after.tokens,
    round=newest.number,
  )
  log.close()
  print(
    f"held-out loss {before.loss:.4f} before, {after.loss:.4f} after "
    f"{newest.value.rounds} rounds ({after.tokens:,} tokens, {newest.path})"
  )
  return 0


class Stopped(Exception):
  """An evaluation was given up since its process has to end."""


class Evaluator:
  """Evaluates snapshots on the held-out split of a configuration."""

  def __init__(self, config: Config):
    """Reads the corpus; compiles at the first evaluation."""
    self._mesh = meshes.make_mesh(config.mesh)
    rows = meshes.batch_sharding(self._mesh)
    self._task = LanguageModel(config.transformer, activations=rows)
    text, context = corpus.load(config.corpus).heldout, config.corpus.context
    windows = (len(text) - 1) // context
    size = self._mesh.size
    sequences = max(min(_SEQUENCES, windows) // size, 1) * size
    self._batches = [
      jax.device_put(batch, rows)
      for batch in pipeline.heldout_batches(
        text, context, sequences, max(1, _TOKENS // (sequences * context))
      )
    ]
    self._loss = jax.jit(
      lambda params, batch: self._task.loss(params, batch, None)
    )

  def loss(
    self,
    snapshot: GlobalSnapshot,
    stopping: Callable[[], bool] = lambda: False,
  ) -> HeldOut:
    """Mean over all tokens, added up in float64.

    Args:
      snapshot: whose parameters.
      stopping: asked before each batch; True gives up.

    Raises:
      DecoupledError: the snapshot is of another model.
      Stopped: it was given up.
    """
    params = self._params(snapshot)
    total, tokens = 0.0, 0
    for batch in self._batches:
      if stopping():
        raise Stopped
      loss, metrics = self._loss(params, batch)
      count = int(metrics["tokens"])
      total += float(loss) * count
      tokens += count
    return HeldOut(total / tokens, tokens)

  def _params(self, snapshot: GlobalSnapshot) -> Any:
    """The parameters laid out on the mesh."""
    specs = self._task.tensor_specs()
    tensors = snapshot.tensors()
    for spec in specs:
      found = tensors.get(spec.name)
      if found is None or found.shape != spec.shape:
        saved = "is not there" if found is None else f"has shape {found.shape}"
        raise DecoupledError(
          f"the snapshot is of another model: {spec.name} {saved}, the "
          f"configuration wants shape {spec.shape}"
        )
    leaves: list[np.ndarray] = [tensors[spec.name] for spec in specs]
    like = self._task.param_specs()
    shardings = meshes.param_shardings(like, specs, self._mesh)
    return jax.device_put(tree.unflatten(like, leaves), shardings)


def event_log(options: EvaluateOptions) -> EventLog:
  """The job's log; outside a job, time stands where the log ended."""
  path: Path = options.workdir / "events.jsonl"
  started_at = options.started_at
  if started_at is None:
    ends = [e["t"] for e in EventReader(path).new()[-1:]]
    started_at = MonotonicClock().now() - (ends[0] if ends else 0.0)
  return EventLog(path, started_at)
