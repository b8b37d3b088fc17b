"""Shadow steps: the loop's own code on dummy batches, in a sandbox.

What is loaded, compiled or made at first use is so before it is needed. Nothing
of it is kept, and nobody else sees it.
"""

import importlib

import jax
import numpy as np

from decoupled.algorithm.policy import Exchange
from decoupled.checkpoint import learner_store
from decoupled.clock import MonotonicClock
from decoupled.data.claimed import ClaimedBatches
from decoupled.data.pipeline import Item, batch_spec
from decoupled.data.shared import Shared
from decoupled.learner import buddies, loop, origin, taking_part
from decoupled.learner.agreeing import StepLanes
from decoupled.learner.donor import gathered, leaves_of
from decoupled.learner.pace import Pace
from decoupled.learner.program import Program
from decoupled.learner.step import TrainState
from decoupled.link import tree
from decoupled.link.agreement import ByStep, Nothing
from decoupled.types import Claim, StateHeader
from decoupled.wire import states

_STEPS = 2


class _Nowhere:
  """Stands in for a link: exchanges nothing, ends after a few boundaries."""

  common_step = 0

  def __init__(self, policy: Exchange):
    self.policy = policy
    self.done = False

  def boundary(self, params: tree.Tree, *, step: int, **_: object) -> tree.Tree:
    self.done = step >= _STEPS
    return params


class _Dummies:
  """Batches of zeros, in the shape in which the pipeline makes them."""

  exhausted = False

  def __init__(self, spec: jax.ShapeDtypeStruct):
    self._rows = np.zeros(spec.shape, spec.dtype)

  def __next__(self) -> Item:
    return Item(self._rows, (0, 0))


def run(program: Program) -> None:
  """Takes shadow steps, and does once what a takeover does once.

  The states that it makes are gone when it returns.
  """
  config = program.config
  importlib.import_module("tensorboardX")  # else at the first metrics
  learner_store.newest_meta(taking_part.store_of(program.options), 0)
  _read(program)
  state = program.initial()
  several = program.collective is not None
  if several:
    _copy_and_place(program, state)
  else:
    _receive(program, state.opt_state)
  done = loop.Trained(state=state, schedule_step=0, position=(0, 0))
  del state
  pace = Pace(MonotonicClock())
  loop.train(
    _Nowhere(config.exchange),
    done,
    program.train_step,
    _Dummies(batch_spec(config.corpus.context, config.batch.sequences)),
    program.mesh,
    pace,
    tokens_per_step=config.batch.sequences * config.corpus.context,
    learner_id=0,
    lanes=_lanes(program),
  )
  pace.close()


def _lanes(program: Program) -> loop.Lanes:
  """What hosts of one learner feed into its steps."""
  if program.collective is None:
    return loop.NoLanes()
  agreement = ByStep(program.config.exchange.P, None, Nothing(Shared.size))
  return StepLanes(agreement, program.collective)


def _copy_and_place(program: Program, state: TrainState) -> None:
  """A state out of and into the devices, as hosts recover it."""
  copy = buddies.copy_to_host(program.copy(state), 0, 0, 0, {})
  jax.block_until_ready(buddies.place(program.specs, [copy]))


def _read(program: Program) -> None:
  """The first batch of the corpus, through the pipeline itself."""
  claims = program.claims()
  claims.word((Claim(0, 0),), ended=False)
  batches = ClaimedBatches(
    program.text.train, program.order, claims, program.config.batch.sequences
  )
  next(batches)
  batches.close()


def _receive(program: Program, opt_state: tree.Tree) -> None:
  """An optimizer state out of and into the devices, as donors send it."""
  copy = program.copy(opt_state)
  header = StateHeader(
    request=0,
    donor=0,
    incarnation=0,
    step=0,
    schedule_step=0,
    leaves=leaves_of(program.specs.opt_state),
  )
  leaves = (gathered(leaf) for leaf in jax.tree.leaves(copy))
  sent = states.outgoing(header, leaves)
  taken = origin.received(states.Incoming(sent), program.specs.opt_state)
  jax.block_until_ready(taken.opt_state)
  # Saving compiles something for each kind of array. One of each will do: the
  # whole state may be large, and this goes to the disk of temporary files.
  kinds = {(x.shape, x.dtype, x.sharding): x for x in jax.tree.leaves(copy)}
  learner_store.warm_up(list(kinds.values()))
