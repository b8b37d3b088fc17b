"""A host keeps copies of its shards every few steps, beside its loop.

The boundary dispatches a copy on the devices, since the next step donates the
state, and goes on. A thread takes it to this host's memory, and sends it to the
buddy's. While one is under way no other is begun: memory holds one copy on the
devices and `buddies.KEPT` of each owner on the host.
"""

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

from decoupled.errors import DecoupledError
from decoupled.learner import buddies
from decoupled.link import workers

Copier: TypeAlias = Callable[[Any], Any]  # from `copies.compile_copy`
Send: TypeAlias = Callable[[buddies.HostCopy], None]

_LOG = logging.getLogger("decoupled.learner")


@dataclasses.dataclass(frozen=True)
class _Taken:
  step: int
  tree: Any
  counters: Mapping[str, int]


class Keeper:
  """Keeps the copies of one host, in one epoch.

  Args:
    memory: where they are kept; outlives epochs.
    rank: this host's.
    epoch: in which it trains.
    every: inner steps from one copy to the next.
    copy: copies the tree on the devices, compiled ahead.
    send: sends a copy to the buddy; may block, within its own limit.
  """

  def __init__(
    self,
    memory: buddies.Memory,
    rank: int,
    epoch: int,
    every: int,
    copy: Copier,
    send: Send,
  ):
    self._memory = memory
    self._rank = rank
    self._epoch = epoch
    self._every = every
    self._copy = copy
    self._send = send
    self._taken: _Taken | None = None
    self._busy = False
    # made here: to start a thread is to wait for it
    self._worker = workers.Threaded("keeper", self._beside, self._failed)

  def after_step(
    self, step: int, tree: Any, counters: Mapping[str, int]
  ) -> bool:
    """At a boundary; never waits. Returns whether a copy has begun.

    All hosts must keep the same steps: a copy is due by the step's number, and
    one that is skipped for being busy is only missing from the next complete
    set.
    """
    if step % self._every or self._busy:
      return False
    self._busy = True
    self._taken = _Taken(step, self._copy(tree), dict(counters))
    self._worker.put(step)
    return True

  def close(self, limit_s: float) -> None:
    """Keeps no more, and lets go of the devices' memory.

    Args:
      limit_s: for the copy under way, which a failed step may have spoilt.
    """
    self._worker.close(limit_s)
    self._taken = None

  def _beside(self, key: Hashable) -> None:
    del key  # at most one waits
    taken, self._taken = self._taken, None
    try:
      if taken is None:
        return
      copy = buddies.copy_to_host(
        taken.tree, self._rank, self._epoch, taken.step, taken.counters
      )
      del taken
      self._memory.keep(copy)
      self._send(copy)
    finally:
      self._busy = False

  def _failed(self, error: BaseException) -> None:
    """The copy before is still there; the step's own error is the loop's."""
    if isinstance(error, DecoupledError):
      _LOG.warning("a copy did not reach the buddy: %s", error)
    else:
      _LOG.warning("a copy of this host's shards failed: %s", error)
