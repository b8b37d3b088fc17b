"""A learner gives its optimizer state to a joiner, beside its loop.

When an announcement asks for it, the next boundary dispatches a copy on the
devices and goes on. A thread that gives way to the loop takes the leaves to
the host one by one, whole, whatever mesh they lie on, and sends them.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from decoupled import background, faults
from decoupled.errors import DecoupledError
from decoupled.learner.copies import Copies, StateCopy
from decoupled.learner.loop import Trained
from decoupled.link import tree, workers
from decoupled.types import Leaf, StateHeader

Give: TypeAlias = Callable[[StateHeader, Iterable[np.ndarray]], None]

_LOG = logging.getLogger("decoupled.learner")


class Asked(Protocol):
  """What a donor needs of its link."""

  @property
  def donation(self) -> tuple[int, int] | None: ...


class Donor:
  """Answers what the syncer asks for; one request at a time.

  Args:
    link: says what is asked for.
    learner_id: who gives.
    give: sends a state; may block.
    copies: of the optimizer state, shared with who else needs one.
    opt_state: the tree, or its specs: names, shapes and dtypes.
  """

  def __init__(
    self,
    link: Asked,
    learner_id: int,
    give: Give,
    copies: Copies,
    opt_state: Any,
  ):
    self._link = link
    self._learner_id = learner_id
    self._give = give
    self._copies = copies
    self._leaves = leaves_of(opt_state)
    self._answered: tuple[int, int] | None = None
    self._next: tuple[tuple[int, int], StateCopy] | None = None
    self._busy = False
    # made here: to start a thread is to wait for it
    self._worker = workers.Threaded("donor", self._beside, self._failed)

  def after_step(self, now: Trained) -> None:
    """Begins to give if that is asked for; never waits."""
    asked = self._link.donation
    if asked is None or asked == self._answered or self._busy:
      return
    faults.reached("donor.asked")
    self._answered, self._busy = asked, True
    self._next = (asked, self._copies.take(now, self))
    self._worker.put(asked)

  def close(self) -> None:
    """Gives no more; what is under way ends with the connection."""
    self._worker.close(limit_s=0.0)

  def _beside(self, key: Hashable) -> None:
    del key  # at most one request waits
    assert self._next is not None
    (incarnation, request), copy = self._next
    self._next = None
    header = StateHeader(
      request=request,
      donor=self._learner_id,
      incarnation=incarnation,
      step=copy.step,
      schedule_step=copy.schedule_step,
      leaves=self._leaves,
    )
    try:
      self._give(header, _hosted(copy.state))
      _LOG.info("a joiner got this learner's optimizer state")
    finally:
      self._copies.release(copy, self)
      self._busy = False

  def _failed(self, error: BaseException) -> None:
    """The joiner gets another donor; this learner trains on."""
    if isinstance(error, DecoupledError):
      _LOG.warning("optimizer state was not given to a joiner: %s", error)
    else:
      _LOG.error("giving optimizer state failed", exc_info=error)


def leaves_of(opt_state: Any) -> tuple[Leaf, ...]:
  """What a header says of a tree of arrays, or of their specs."""
  return tuple(
    Leaf(path, tuple(leaf.shape), np.dtype(leaf.dtype).name)
    for path, leaf in tree.dict_of_leaves(opt_state).items()
  )


def _hosted(state: Any) -> Iterator[np.ndarray]:
  """The leaves on the host, each when it is asked for."""
  background.give_way()  # on the thread of the call that sends them
  for leaf in jax.tree.leaves(state):
    yield gathered(leaf)


def gathered(leaf: jax.Array) -> np.ndarray:
  """A whole array from its shards, which all are on this host's devices."""
  whole = np.empty(leaf.shape, leaf.dtype)
  for shard in leaf.addressable_shards:
    if shard.replica_id == 0:
      whole[shard.index] = np.asarray(shard.data)
  return whole
