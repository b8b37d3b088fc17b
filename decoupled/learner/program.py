"""What a learner has before it claims an id: everything that takes long.

A process that has prepared a program can take the part of any learner of the
run (`taking_part`): a learner does so at once, a standby when it is told to.
"""

import dataclasses
import hashlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import decoupled
from decoupled.checkpoint import learner_store
from decoupled.config import Config
from decoupled.data import corpus as corpus_lib
from decoupled.data.claimed import Claims
from decoupled.data.corpus import Text
from decoupled.data.pipeline import Order, batch_spec
from decoupled.data.shared import Shared
from decoupled.errors import ConfigError
from decoupled.launch.options import LearnerOptions
from decoupled.learner import allocator, compile_cache, epochs, joining
from decoupled.learner import mesh as meshes
from decoupled.learner import step as steps
from decoupled.learner.compile_cache import CompileCounter
from decoupled.learner.copies import Copier, compile_copy
from decoupled.learner.optimizer import make_optimizer
from decoupled.link import agreement
from decoupled.link.collective import Collective
from decoupled.models.task import LanguageModel
from decoupled.types import Hello, RunContract

_LIBRARIES = ("jax", "jaxlib", "flax", "optax")


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A learner's compiled program with its data, and no role yet.

  Attributes:
    config: complete: what it did not bring, it has from the run.
    options: likewise; `learner_id` is what it would like to be.
    compiles: counts this process's compilations.
    mesh: where state and batches live.
    text: the corpus.
    task: the model and its loss.
    specs: of the state, with shardings.
    train_step: the compiled inner step.
    copy: the compiled copy of the optimizer's state.
    init: makes a state from the seed.
    order: which window each row of a unit is.
    collective: by which several hosts agree where no step is taken; None for
      a learner of one.
  """

  config: Config
  options: LearnerOptions
  compiles: CompileCounter
  mesh: jax.sharding.Mesh
  text: Text
  task: LanguageModel
  specs: steps.TrainState
  train_step: steps.TrainStep
  copy: Copier
  init: Callable[[Any], steps.TrainState]
  order: Order
  collective: Collective | None = None

  @property
  def seed(self) -> int:
    """The run's."""
    return self.options.seed or 0

  def initial(self) -> steps.TrainState:
    """The state of step 0, freshly made."""
    return self.init(np.uint32(self.seed))

  def claims(self) -> Claims:
    """An account of the units that a learner holds; none yet."""
    return Claims(self.order.unit_windows, self.config.batch.sequences)

  @property
  def contract(self) -> tuple[tuple[str, str], ...]:
    """The contract lines that it was made for."""
    more = [
      ("Corpus.digest", self.text.digest),
      ("Corpus.units", str(self.order.units)),
    ]
    return joining.agreed(self.config, self.seed, more)

  @property
  def lines(self) -> tuple[tuple[str, str], ...]:
    """What else shapes its executables: a standby needs the same."""
    local, kind = self.config.local, self.mesh.devices.flat[0].device_kind
    versions = [(name, importlib.metadata.version(name)) for name in _LIBRARIES]
    return (
      ("decoupled", decoupled.__version__),
      *versions,
      ("devices", f"{self.mesh.size} x {kind}"),
      ("hosts", str(jax.process_count())),
      *((f"mesh.{axis}", str(n)) for axis, n in self.mesh.shape.items()),
      ("Local.remat", str(local.remat)),
      ("Local.microbatches", str(local.microbatches)),
    )

  @property
  def fingerprint(self) -> str:
    """A digest of the contract and of `lines`."""
    lines = sorted({*self.contract, *self.lines})
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:12]

  def hello(self, learner_id: int) -> Hello:
    """The claim of an id."""
    return Hello(
      learner_id=learner_id,
      holder=joining.holder(),
      run_id="",
      tensors=self.task.tensor_specs(),
      contract=self.contract,
      program=self.lines,
      gives_state=self.config.local.donates and jax.process_count() == 1,
      hosts=self.options.num_processes,
      host=self.options.process_id,
    )


def prepare(
  config: Config, options: LearnerOptions, asked: RunContract | None = None
) -> Program:
  """Sets the devices up, compiles, reads the corpus; claims nothing.

  Args:
    config: complete.
    options: complete.
    asked: what the run agrees on, if its syncer was asked.

  Raises:
    DecoupledError: with the line that the user reads.
  """
  if options.devices_per_host:
    allocator.keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices_per_host)
  if options.num_processes > 1:
    _connect(options, config.limits.start_s)
  compiles = compile_cache.enable(options.workdir / "cache" / "xla")
  mesh = meshes.make_mesh(config.mesh)
  meshes.check_hosts(mesh, options.num_processes)
  meshes.check_batch(config.batch.sequences, config.local.microbatches, mesh)
  text = corpus_lib.load(config.corpus)
  if asked is not None:
    joining.check_corpus(asked, text.digest)
  rows = meshes.batch_sharding(mesh) if mesh.size > 1 else None
  task = LanguageModel(config.transformer, config.local.remat, rows)
  optimizer = make_optimizer(config.optimizer, task.tensor_specs())
  specs = steps.state_specs(task, optimizer, mesh)
  collective = None
  if options.num_processes > 1:
    collective = Collective(
      meshes.batch_sharding(mesh),
      agreement.size(config.exchange.P, Shared.size),
    )
  train_step = steps.compile_train_step(
    steps.make_train_step(
      task,
      optimizer,
      config.optimizer,
      config.schedule,
      mesh,
      config.local.microbatches,
      agrees=collective is not None,
    ),
    specs,
    batch_spec(config.corpus.context, config.batch.sequences),
    mesh,
    *([] if collective is None else [collective.spec]),
  )
  copy = compile_copy(specs.opt_state)
  if collective is None:
    learner_store.warm_up(jax.device_put(np.int32(0), meshes.replicated(mesh)))
  return Program(
    config=config,
    options=options,
    compiles=compiles,
    mesh=mesh,
    text=text,
    task=task,
    specs=specs,
    train_step=train_step,
    copy=copy,
    init=steps.make_init(task, optimizer, mesh),
    order=Order(
      len(text.train),
      config.corpus.context,
      seed=options.seed or 0,
      unit_windows=config.corpus.unit_windows,
    ),
    collective=collective,
  )


# A coordination service ends with whoever holds it.
_services: list[epochs.Service] = []
# Longer than hosts lie apart where they compile or wait between boundaries.
_COLLECTIVE_S = 30


def _connect(options: LearnerOptions, limit_s: float) -> None:
  """Makes this process one of the hosts of its learner's JAX job.

  The coordination service is rank 0's own: with any host that dies all hosts
  of the learner are started again, and so is the service.
  """
  hosts, rank = options.num_processes, options.process_id
  if not options.coordinator_address:
    raise ConfigError(
      f"--num_processes={hosts} needs --coordinator_address=HOST:PORT, the "
      "same for all hosts of the learner: rank 0 listens there"
    )
  limits = epochs.EpochLimits(connect_s=limit_s, collective_s=_COLLECTIVE_S)
  epochs.prepare(limits)
  if rank == 0:
    _services.append(epochs.Service(options.coordinator_address, hosts))
  epochs.connect(options.coordinator_address, rank, hosts, limits)
