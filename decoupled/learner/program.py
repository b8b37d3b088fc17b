"""What a learner has before it claims an id: everything that takes long.

A process that has prepared a program can take the part of any learner of the
run (`taking_part`): a learner does so at once, a standby when it is told to.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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
from decoupled.launch.options import LearnerOptions
from decoupled.learner import allocator, compile_cache, executables, joining
from decoupled.learner import mesh as meshes
from decoupled.learner import step as steps
from decoupled.learner.compile_cache import CompileCounter
from decoupled.learner.copies import Copier, compile_copy
from decoupled.learner.executables import Executables
from decoupled.learner.optimizer import make_optimizer
from decoupled.link import agreement
from decoupled.link.collective import Collective
from decoupled.link.ops import Kernels
from decoupled.models.task import LanguageModel
from decoupled.types import Hello, RunContract, TensorSpec

_LIBRARIES = ("jax", "jaxlib", "flax", "optax")


class Placed(NamedTuple):
  """A leaf of the state, without the devices that it lies on."""

  shape: tuple[int, ...]
  dtype: Any
  spec: jax.sharding.PartitionSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Outline:
  """What a program is made of that knows no device, so that it outlives them.

  Attributes:
    config: complete: what it did not bring, it has from the run.
    options: likewise; `learner_id` is what it would like to be.
    compiles: counts this process's compilations.
    text: the corpus.
    order: which window each row of a unit is.
    tensors: the parameters as the wire knows them.
  """

  config: Config
  options: LearnerOptions
  compiles: CompileCounter
  text: Text
  order: Order
  tensors: tuple[TensorSpec, ...]

  @property
  def hosts(self) -> int:
    return self.options.num_processes


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A learner's compiled program with its data, and no role yet.

  Attributes:
    outline: what outlives it.
    mesh: where state and batches live.
    task: the model and its loss.
    specs: of the state, with shardings.
    train_step: the compiled inner step.
    copy: the compiled copy of the optimizer's state; of a learner of several
      hosts that of the whole state.
    init: makes a state from the seed.
    collective: by which several hosts agree where no step is taken; None for
      a learner of one.
    kernels: the device operations of its fragments; likewise.
    kept: its executables as files; likewise.
  """

  outline: Outline
  mesh: jax.sharding.Mesh
  task: LanguageModel
  specs: steps.TrainState
  train_step: steps.TrainStep
  copy: Copier
  init: Callable[[Any], steps.TrainState]
  collective: Collective | None = None
  kernels: Kernels | None = None
  kept: Executables | None = None

  @property
  def config(self) -> Config:
    return self.outline.config

  @property
  def options(self) -> LearnerOptions:
    return self.outline.options

  @property
  def compiles(self) -> CompileCounter:
    return self.outline.compiles

  @property
  def text(self) -> Text:
    return self.outline.text

  @property
  def order(self) -> Order:
    return self.outline.order

  @property
  def layout(self) -> Any:
    """The specs of the state as `Placed`, for the mesh of a next epoch."""
    return jax.tree.map(
      lambda x: Placed(x.shape, x.dtype, x.sharding.spec), self.specs
    )

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
      ("hosts", str(self.outline.hosts)),
      *((f"mesh.{axis}", str(n)) for axis, n in self.mesh.shape.items()),
      ("Local.remat", str(local.remat)),
      ("Local.microbatches", str(local.microbatches)),
    )

  @property
  def fingerprint(self) -> str:
    """A digest of the contract and of `lines`."""
    lines = sorted({*self.contract, *self.lines})
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:12]

  def hello(self, learner_id: int, epoch: int = 0) -> Hello:
    """The claim of an id; of several hosts under an epoch."""
    return Hello(
      learner_id=learner_id,
      holder=joining.holder(),
      run_id="",
      tensors=self.outline.tensors,
      contract=self.contract,
      program=self.lines,
      gives_state=self.config.local.donates and self.outline.hosts == 1,
      hosts=self.options.num_processes,
      host=self.options.process_id,
      epoch=epoch,
    )


def prepare(
  config: Config, options: LearnerOptions, asked: RunContract | None = None
) -> Program:
  """Sets the devices up, compiles, reads the corpus; claims nothing.

  Of a learner of one host; see `reforming` for those of several.

  Args:
    config: complete.
    options: complete.
    asked: what the run agrees on, if its syncer was asked.

  Raises:
    DecoupledError: with the line that the user reads.
  """
  simulate(options.devices_per_host)
  program = build(outline(config, options, asked))
  warm_saving = jax.device_put(np.int32(0), meshes.replicated(program.mesh))
  learner_store.warm_up(warm_saving)
  return program


def simulate(devices: int) -> None:
  """So many CPU devices in this process; 0 takes what there is."""
  if devices:
    allocator.keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def outline(
  config: Config, options: LearnerOptions, asked: RunContract | None = None
) -> Outline:
  """Reads the corpus, and whatever else needs no device.

  Args:
    config: complete.
    options: complete.
    asked: what the run agrees on, if its syncer was asked.
  """
  text = corpus_lib.load(config.corpus)
  if asked is not None:
    joining.check_corpus(asked, text.digest)
  return Outline(
    config=config,
    options=options,
    compiles=compile_cache.enable(options.workdir / "cache" / "xla"),
    text=text,
    order=Order(
      len(text.train),
      config.corpus.context,
      seed=options.seed or 0,
      unit_windows=config.corpus.unit_windows,
    ),
    tensors=LanguageModel(config.transformer).tensor_specs(),
  )


def build(outline: Outline, layout: Any = None, keeps: bool = False) -> Program:
  """The program on the devices that there are now.

  Args:
    outline: from `outline`.
    layout: of a program before it, which saves tracing the model.
    keeps: load executables that fit from this user's own files, and put those
      there that had to be compiled.

  Raises:
    ConfigError: mesh, batch and devices do not fit.
  """
  config, hosts = outline.config, outline.hosts
  mesh = meshes.make_mesh(config.mesh)
  meshes.check_hosts(mesh, hosts)
  meshes.check_batch(config.batch.sequences, config.local.microbatches, mesh)
  rows = meshes.batch_sharding(mesh) if mesh.size > 1 else None
  task = LanguageModel(config.transformer, config.local.remat, rows)
  optimizer = make_optimizer(config.optimizer, outline.tensors)
  if layout is None:
    specs = steps.state_specs(task, optimizer, mesh)
  else:
    specs = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=jax.sharding.NamedSharding(mesh, leaf.spec),
      ),
      layout,
      is_leaf=lambda x: isinstance(x, Placed),
    )

  # traced at the first use: hosts that go on from a copy have none
  made_init = functools.cache(lambda: steps.make_init(task, optimizer, mesh))

  def init(seed: Any) -> steps.TrainState:
    return made_init()(seed)

  program = Program(outline, mesh, task, specs, _not_yet, _not_yet, init)
  if hosts == 1:
    return dataclasses.replace(
      program,
      train_step=_compiled_step(program, optimizer),
      copy=compile_copy(specs.opt_state),
    )
  kept = executables_of(program) if keeps else NotKept()
  size = agreement.size(config.exchange.P, Shared.size)
  collective = Collective(
    meshes.batch_sharding(mesh), size, kept.load("agreement")
  )
  train_step = kept.load("step")
  copy = kept.load("copy")
  if train_step is None:
    train_step = _compiled_step(program, optimizer, collective)
    kept.save("step", train_step)
  if copy is None:
    copy = compile_copy(specs)
    kept.save("copy", copy)
    kept.save("agreement", collective.program)
  return dataclasses.replace(
    program,
    train_step=train_step,
    copy=copy,
    collective=collective,
    kernels=Kernels(kept),
    kept=kept if isinstance(kept, Executables) else None,
  )


def executables_folder(outline: Outline) -> Path:
  """Where this user's executables of the run are."""
  return outline.options.workdir / "cache" / "executables"


def executables_of(program: Program) -> Executables:
  """The files of a program's executables; asks for the devices."""
  parts = [f"{k}={v}" for k, v in sorted({*program.contract, *program.lines})]
  fits = executables.fingerprint(parts)
  folder = executables_folder(program.outline)
  return Executables(folder / fits[:16], fits)


class NotKept:
  """In place of a folder of executables: nothing is there, nothing stays."""

  def load(self, name: str) -> Any | None:
    del name
    return None

  def save(self, name: str, compiled: Any) -> None:
    del name, compiled


def _not_yet(*_: Any) -> Any:
  raise AssertionError("the program is being built")


def _compiled_step(
  program: Program, optimizer: Any, collective: Collective | None = None
) -> steps.TrainStep:
  config = program.config
  return steps.compile_train_step(
    steps.make_train_step(
      program.task,
      optimizer,
      config.optimizer,
      config.schedule,
      program.mesh,
      config.local.microbatches,
      agrees=collective is not None,
    ),
    program.specs,
    batch_spec(config.corpus.context, config.batch.sequences),
    program.mesh,
    *([] if collective is None else [collective.spec]),
  )
