"""The process of a learner: compile, join, train, save.

The order is the point: everything that takes long (imports, compilation, the
corpus) is done before the id is claimed, and the run's parameters are there
before the first step, so that a start or a restart never trains in vain.
"""

import logging
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from decoupled import faults
from decoupled.chaos.slow import Slowdown
from decoupled.checkpoint import learner_store
from decoupled.clock import MonotonicClock
from decoupled.config import Config
from decoupled.data import corpus as corpus_lib
from decoupled.data.claimed import FIRST_S, ClaimedBatches, Claims
from decoupled.data.pipeline import Order, batch_spec
from decoupled.launch import affinity, folders
from decoupled.launch.options import LearnerOptions
from decoupled.launch.termination import Termination
from decoupled.learner import allocator, compile_cache, joining, loop
from decoupled.learner import mesh as meshes
from decoupled.learner import step as steps
from decoupled.learner.copies import Copies, compile_copy
from decoupled.learner.donor import Donor
from decoupled.learner.optimizer import make_optimizer
from decoupled.learner.origin import Origin, Search
from decoupled.learner.pace import Pace
from decoupled.learner.phases import Phases
from decoupled.learner.snapshots import Place, Snapshots
from decoupled.link.link import Link, Patience
from decoupled.models.task import LanguageModel
from decoupled.observe.events import EventLog
from decoupled.observe.metrics import Metrics, flop_utilisation
from decoupled.types import Hello, RunContract
from decoupled.wire import client

_LOG = logging.getLogger("decoupled.learner")
_METRICS_EVERY_S = 1.0


def run(config: Config, options: LearnerOptions) -> int:
  """Runs one learner to the end of the run; returns the exit status.

  Raises:
    DecoupledError: with the line that the user reads.
  """
  faults.arm(f"learner/{options.learner_id}")
  folders.prepare(options.workdir)
  named = f"/{options.learner_id}" if options.learner_id >= 0 else ""
  end = Termination(f"learner{named}", config.limits.grace_s)
  end.events = _log(options)
  try:
    return _run(config, options, end)
  finally:
    end.close()


def _run(config: Config, options: LearnerOptions, end: Termination) -> int:
  phases = Phases()
  wire: client.GrpcLearnerWire | None = None
  asked: RunContract | None = None
  if not joining.complete(config, options):
    wire = joining.dial(config, options)
    asked = wire.contract(joining.holder())
    config, options = joining.adopt(config, options, asked)
    _LOG.info("the contract of run %s is taken over", asked.run_id)
  seed = options.seed or 0
  if options.devices_per_host:
    allocator.keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices_per_host)
  compiles = compile_cache.enable(options.workdir / "cache" / "xla")
  mesh = meshes.make_mesh(config.mesh)
  meshes.check_batch(config.batch.sequences, config.local.microbatches, mesh)
  text = corpus_lib.load(config.corpus)
  if asked is not None:
    joining.check_corpus(asked, text.digest)
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
  copies = Copies(compile_copy(specs.opt_state))
  learner_store.warm_up(jax.device_put(np.int32(0), meshes.replicated(mesh)))
  init = steps.make_init(task, optimizer, mesh)
  state = init(np.uint32(seed))
  phases.mark("compiled")
  wire = wire or joining.dial(config, options)
  end.goodbye = wire.leave
  order = Order(
    len(text.train),
    config.corpus.context,
    seed=seed,
    unit_windows=config.corpus.unit_windows,
  )
  claims = Claims(order.unit_windows, config.batch.sequences)
  link = _link(
    *(config, options, wire, state.params, task),
    *(claims, order, text.digest, end),
  )
  welcome = link.join(state.params)
  end.role = f"learner/{welcome.learner_id}"
  phases.mark("joined")
  search = Search(
    wire.take_state, welcome, _store(options), specs.opt_state, link.wake
  )
  # The syncer answers reports, and there are none between here and the first
  # step: what it grants late, having just begun itself, is waited for here (for
  # the lease in which a new syncer only listens).
  first_unit_by = time.monotonic() + FIRST_S
  state = state._replace(
    params=link.begin(
      state.params,
      lambda: (
        search.done() and (claims.ready or time.monotonic() > first_unit_by)
      ),
    )
  )
  origin = search.result()
  if origin.opt_state is not None:
    state = state._replace(opt_state=origin.opt_state)
  phases.mark("ready")
  place = Place(_store(options), welcome.learner_id, welcome.run_id)
  saved = Snapshots(
    place,
    config.checkpoint,
    config.exchange.H / config.exchange.P,
    copies,
    _log(options),
    MonotonicClock(),
  )
  donor = Donor(
    link, welcome.learner_id, wire.give_state, copies, specs.opt_state
  )
  batches = ClaimedBatches(
    text.train,
    order,
    claims,
    config.batch.sequences,
    learner=welcome.learner_id,
  )
  done = loop.Trained(
    state=state,
    schedule_step=max(link.common_step, origin.saved.get("schedule_step", 0)),
    position=batches.position,
  )
  _say_ready(options, link, origin, phases, compiles)
  affinity.release()
  end.something_to_lose()
  _train(
    config,
    options,
    link,
    done,
    saved,
    donor,
    train_step,
    batches,
    mesh,
    task,
    end.requested.is_set,
  )
  donor.close()
  _finish(options, link, done, saved, end, compiles)
  batches.close()
  return 0 if link.done else end.status


def _say_ready(
  options: LearnerOptions,
  link: Link,
  origin: Origin,
  phases: Phases,
  compiles: compile_cache.CompileCounter,
) -> None:
  log = _log(options)
  age = None
  if origin.schedule_step is not None:
    age = max(0, link.common_step - origin.schedule_step)
  if origin.donor is not None:
    _LOG.info(
      "optimizer state comes from learner %d, %d steps ago", origin.donor, age
    )
  log.emit(
    "ready",
    learner=link.welcome.learner_id,
    incarnation=link.welcome.incarnation,
    state_source=origin.source,
    donor=origin.donor,
    age_steps=age,
    phases=phases.since(options.started_at or 0.0),
    compiles=compiles.counts(),
  )
  log.close()


def _log(options: LearnerOptions) -> EventLog:
  return EventLog(
    options.workdir / "events.jsonl",
    options.started_at or 0.0,
    MonotonicClock(),
  )


def _store(options: LearnerOptions) -> str:
  return options.store or str(options.workdir / "checkpoints")


def _link(
  config: Config,
  options: LearnerOptions,
  wire: client.GrpcLearnerWire,
  params: Any,
  task: LanguageModel,
  claims: Claims,
  order: Order,
  digest: str,
  end: Termination,
) -> Link:
  hello = Hello(
    learner_id=options.learner_id,
    holder=joining.holder(),
    run_id="",
    tensors=task.tensor_specs(),
    contract=joining.agreed(
      config,
      options.seed or 0,
      [("Corpus.digest", digest), ("Corpus.units", str(order.units))],
    ),
    gives_state=config.local.donates and jax.process_count() == 1,
  )
  limits = config.limits

  def leaving(ending: bool) -> bool:
    """A drain is worth some of the grace time, any other wait is not."""
    return end.half_over() if ending else end.requested.is_set()

  patience = Patience(
    join_s=limits.start_s + limits.connect_s, end_s=4 * limits.drain_s
  )
  return Link(
    wire, params, hello, patience=patience, leaving=leaving, claims=claims
  )


def _train(
  config: Config,
  options: LearnerOptions,
  link: Link,
  done: loop.Trained,
  saved: Snapshots,
  donor: Donor,
  train_step: steps.TrainStep,
  batches: ClaimedBatches,
  mesh: jax.sharding.Mesh,
  task: LanguageModel,
  stopping: Callable[[], bool],
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
    donor.after_step(now)
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
    stopping=stopping,
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
  end: Termination,
  compiles: compile_cache.CompileCounter,
) -> None:
  """Saves the inner optimizer state, if it has trained; says goodbye, leaves.

  Whatever takes too long here, `end` leaves in its place.
  """
  log = _log(options)
  faults.reached("learner.finished")
  outcome = "nothing_to_save"
  if done.step:
    outcome = "saved" if saved.save(done, end.left_s) else "not_saved"
  reason = "ended" if link.done else "left"
  step_s = sorted(done.step_s) or [0.0]
  log.emit(
    "learner_done",
    learner=link.welcome.learner_id,
    incarnation=link.welcome.incarnation,
    steps=done.step - link.earlier[0],
    tokens=done.tokens - link.earlier[1],
    median_step_s=statistics.median(step_s),
    p99_step_s=step_s[int(0.99 * (len(step_s) - 1))],
    compiles=compiles.counts(),
    loss=done.loss,
    versions=[list(version) for version in link.versions],
    params_digest=link.digest(done.state.params),
    exit_reason=reason,
  )
  link.close(reason if link.done else end.why)
  end.ended(outcome)
  log.close()
