"""SIGTERM on a learner: its machine is taken away, and a standby may be ready.

Then the learner trains on while the standby prepares, as far as its grace time
allows, and leaves when it is told that its place is taken. Where there is no
such standby it leaves at its next boundary, as any process does.
"""

import logging
import signal
import threading
from collections.abc import Callable

from decoupled.errors import DecoupledError
from decoupled.launch.termination import Termination

_LOG = logging.getLogger("decoupled.learner")
_ASK_S = 2.0


class Notice:
  """Decides when a learner of one host stops.

  Args:
    end: of the process; `on_request` of it is taken.
    relieved: whether a standby is prepared to take this one's place.
    ask: asks the syncer for a standby within a limit; returns its name.
  """

  def __init__(
    self,
    end: Termination,
    relieved: Callable[[], bool],
    ask: Callable[[float], str],
  ):
    self._end, self._relieved, self._ask = end, relieved, ask
    self._alone = threading.Event()  # nobody takes its place
    end.on_request = self._asked

  def stops(self) -> bool:
    """Whether to leave at the next boundary."""
    if self._relieved():
      return True
    told = self._end.requested.is_set()
    return told and (self._alone.is_set() or self._end.half_over())

  def _asked(self) -> None:
    if self._end.number is not signal.SIGTERM:
      self._alone.set()
      return
    try:
      name = self._ask(min(_ASK_S, self._end.grace_s / 4))
    except DecoupledError as error:
      _LOG.info("no standby takes over: %s", error)
      self._alone.set()
    else:
      _LOG.warning("%s takes over; training goes on until it is prepared", name)
