"""The process of a learner: compile, join, train, save.

The order is the point: everything that takes long (imports, compilation, the
corpus) is done before the id is claimed, and the run's parameters are there
before the first step, so that a start or a restart never trains in vain.
"""

import logging
import os
import random
import signal
import socket
import statistics
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from decoupled.chaos.slow import Slowdown
from decoupled.checkpoint import learner_store
from decoupled.clock import MonotonicClock
from decoupled.config import Config, contract_lines
from decoupled.data import corpus as corpus_lib
from decoupled.data.claimed import ClaimedBatches, Claims
from decoupled.data.pipeline import Order, batch_spec
from decoupled.launch import address, affinity
from decoupled.launch.options import LearnerOptions
from decoupled.learner import allocator, compile_cache, loop
from decoupled.learner import mesh as meshes
from decoupled.learner import step as steps
from decoupled.learner.optimizer import make_optimizer
from decoupled.learner.pace import Pace
from decoupled.learner.snapshots import Place, Snapshots, compile_copy
from decoupled.link.link import Link, Patience
from decoupled.models.task import LanguageModel
from decoupled.observe.events import EventLog
from decoupled.observe.metrics import Metrics, flop_utilisation
from decoupled.types import Hello, Welcome
from decoupled.wire import client, credentials

_LOG = logging.getLogger("decoupled.learner")
_TERMINATED = 128 + signal.SIGTERM
_METRICS_EVERY_S = 1.0


def run(config: Config, options: LearnerOptions) -> int:
  """Runs one learner to the end of the run; returns the exit status.

  Raises:
    DecoupledError: with the line that the user reads.
  """
  stopping = _on_sigterm()
  if options.devices_per_host:
    allocator.keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices_per_host)
  compiles = compile_cache.enable(options.workdir / "cache" / "xla")
  mesh = meshes.make_mesh(config.mesh)
  meshes.check_batch(config.batch.sequences, config.local.microbatches, mesh)
  text = corpus_lib.load(config.corpus)
  rows = meshes.batch_sharding(mesh) if mesh.size > 1 else None
  task = LanguageModel(config.transformer, config.local.remat, rows)
  optimizer = make_optimizer(config.optimizer, task.tensor_specs())
  specs = steps.state_specs(task, optimizer, mesh)
  train_step = steps.compile_train_step(
    steps.make_train_step(
      task,
      optimizer,
      config.optimizer,
      config.schedule,
      mesh,
      config.local.microbatches,
    ),
    specs,
    batch_spec(config.corpus.context, config.batch.sequences),
    mesh,
  )
  copy = compile_copy(specs.opt_state)
  learner_store.warm_up(jax.device_put(np.int32(0), meshes.replicated(mesh)))
  init = steps.make_init(task, optimizer, mesh)
  state = init(np.uint32(options.seed))
  state, restored = _restore(options, specs, state)
  order = Order(
    len(text.train),
    config.corpus.context,
    seed=options.seed,
    unit_windows=config.corpus.unit_windows,
  )
  claims = Claims(order.unit_windows, config.batch.sequences)
  link = _link(config, options, state.params, task, claims, order, text.digest)
  welcome = link.join(state.params)
  state = state._replace(params=link.begin(state.params))
  if restored and restored.get("run_id", welcome.run_id) != welcome.run_id:
    _LOG.warning(
      "the checkpoint of learner %d is of run %s, not of %s: not used",
      *(welcome.learner_id, restored["run_id"], welcome.run_id),
    )
    fresh = init(np.uint32(options.seed))
    state, restored = state._replace(opt_state=fresh.opt_state), None
  if restored is None and welcome.has_history:
    _LOG.warning(
      "learner %d has no checkpoint: it goes on with fresh optimizer moments",
      welcome.learner_id,
    )
  place = Place(_store(options), welcome.learner_id, welcome.run_id)
  saved = Snapshots(
    place,
    config.checkpoint,
    config.exchange.H / config.exchange.P,
    copy,
    _log(options),
    MonotonicClock(),
  )
  meta = restored or {}
  batches = ClaimedBatches(
    text.train,
    order,
    claims,
    config.batch.sequences,
    learner=welcome.learner_id,
  )
  done = loop.Trained(
    state=state,
    schedule_step=max(link.common_step, meta.get("schedule_step", 0)),
    position=batches.position,
  )
  _say_ready(options, link, restored is not None, compiles)
  affinity.release()
  _train(
    config,
    options,
    link,
    done,
    saved,
    train_step,
    batches,
    mesh,
    task,
    stopping,
  )
  _finish(options, link, done, saved, welcome, compiles)
  batches.close()
  return 0 if link.done else _TERMINATED


def _say_ready(
  options: LearnerOptions,
  link: Link,
  restored: bool,
  compiles: compile_cache.CompileCounter,
) -> None:
  log = _log(options)
  log.emit(
    "ready",
    learner=link.welcome.learner_id,
    incarnation=link.welcome.incarnation,
    state_source="checkpoint" if restored else "fresh",
    compiles=compiles.counts(),
  )
  log.close()


def _log(options: LearnerOptions) -> EventLog:
  return EventLog(
    options.workdir / "events.jsonl",
    options.started_at or 0.0,
    MonotonicClock(),
  )


def _on_sigterm() -> threading.Event:
  """SIGTERM ends the loop at the next boundary, in order."""
  stopping = threading.Event()
  signal.signal(signal.SIGTERM, lambda *_: stopping.set())
  return stopping


def _store(options: LearnerOptions) -> str:
  return options.store or str(options.workdir / "checkpoints")


def _restore(
  options: LearnerOptions, specs: Any, state: steps.TrainState
) -> tuple[steps.TrainState, dict[str, Any] | None]:
  """Inner optimizer state from the newest checkpoint of this id, if any."""
  if options.learner_id < 0:
    return state, None
  snapshot = learner_store.restore_learner(
    _store(options), options.learner_id, {"opt_state": specs.opt_state}
  )
  if snapshot is None:
    return state, None
  for sentence in snapshot.skipped:
    _LOG.warning("%s", sentence)
  _LOG.info("optimizer state comes from %s", snapshot.path)
  return (
    state._replace(opt_state=snapshot.tree["opt_state"]),
    snapshot.meta,
  )


def _link(
  config: Config,
  options: LearnerOptions,
  params: Any,
  task: LanguageModel,
  claims: Claims,
  order: Order,
  digest: str,
) -> Link:
  limit_s = config.limits.connect_s
  where = address.resolve(options.syncer_address, limit_s)
  token = (
    credentials.read_token(options.token_file) if options.token_file else ""
  )
  hello = Hello(
    learner_id=options.learner_id,
    holder=f"{socket.gethostname()}:{os.getpid()}",
    run_id="",
    tensors=task.tensor_specs(),
    contract=(
      *contract_lines(config),
      ("Corpus.digest", digest),
      ("Corpus.units", str(order.units)),
      ("run.seed", str(options.seed)),
    ),
  )
  limits = config.limits
  wire = client.GrpcLearnerWire(
    where,
    token,
    connect_s=limits.connect_s,
    transfer_s=limits.transfer_s,
    moved=lambda: address.published(options.syncer_address),
  )
  patience = Patience(
    join_s=limits.start_s + limits.connect_s, end_s=4 * limits.drain_s
  )
  return Link(wire, params, hello, patience=patience, claims=claims)


def _train(
  config: Config,
  options: LearnerOptions,
  link: Link,
  done: loop.Trained,
  saved: Snapshots,
  train_step: steps.TrainStep,
  batches: ClaimedBatches,
  mesh: jax.sharding.Mesh,
  task: LanguageModel,
  stopping: threading.Event,
) -> None:
  learner_id = link.welcome.learner_id
  per_step = config.batch.sequences * config.corpus.context
  metrics = Metrics(options.workdir / "metrics" / f"learner_{learner_id}")
  flops = task.flops_per_token(config.corpus.context) * per_step
  device = mesh.devices.flat[0].device_kind
  clock = MonotonicClock()
  said = 0.0

  def after_step(now: loop.Trained) -> None:
    nonlocal said
    saved.after_step(now)
    time_s = clock.now()
    if time_s - said < _METRICS_EVERY_S:
      return
    said, step_s = time_s, now.step_s[-1]
    metrics.step(
      now.schedule_step,
      loss=now.loss,
      tokens_per_second=per_step / step_s,
      learning_rate=now.learning_rate,
      model_flop_utilisation=flop_utilisation(flops, step_s, device, mesh.size),
    )

  pace = Pace(clock)
  loop.train(
    link,
    done,
    train_step,
    batches,
    mesh,
    pace,
    tokens_per_step=per_step,
    learner_id=learner_id,
    pad=_pad(config, learner_id, mesh),
    slow=Slowdown.from_environment(),
    stopping=stopping.is_set,
    after_step=after_step,
  )
  pace.close()
  metrics.close()


def _pad(
  config: Config, learner_id: int, mesh: jax.sharding.Mesh
) -> Callable[[], float]:
  """The sleep of each step: fixed, or spread evenly about its mean.

  It stands for accelerator time: where there is an accelerator, there is none.
  """
  if mesh.devices.flat[0].platform != "cpu":
    return lambda: 0.0
  mean, share = config.local.pad_s, config.local.jitter
  draw = random.Random(learner_id)
  return lambda: mean * (1 + share * draw.uniform(-1, 1)) if share else mean


def _finish(
  options: LearnerOptions,
  link: Link,
  done: loop.Trained,
  saved: Snapshots,
  welcome: Welcome,
  compiles: compile_cache.CompileCounter,
) -> None:
  """Saves the inner optimizer state, says goodbye, leaves."""
  log = _log(options)
  saved.save(done)
  step_s = sorted(done.step_s) or [0.0]
  log.emit(
    "learner_done",
    learner=welcome.learner_id,
    incarnation=link.welcome.incarnation,
    steps=done.step - link.earlier[0],
    tokens=done.tokens - link.earlier[1],
    median_step_s=statistics.median(step_s),
    p99_step_s=step_s[int(0.99 * (len(step_s) - 1))],
    compiles=compiles.counts(),
    loss=done.loss,
  )
  link.close()
  log.close()
