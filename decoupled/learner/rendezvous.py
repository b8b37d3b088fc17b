"""The hosts of a learner meet at the coordinator, and are in an epoch."""

import logging
import time

from decoupled.errors import Refused, Unreachable
from decoupled.launch import address
from decoupled.learner import epochs
from decoupled.wire import tls as tls_lib
from decoupled.wire.epochs import EpochsClient

_LOG = logging.getLogger("decoupled.epochs")
_RETRY_S = 0.1


def meet(
  spec: str,
  token: str,
  learner_id: int,
  epoch: int,
  hosts: int,
  rank: int,
  holder: str,
  limits: epochs.EpochLimits,
  tls: tls_lib.ClientTls | None = None,
) -> None:
  """Joins an epoch once all of its hosts are there.

  A coordinator that dies meanwhile is looked for again, at the address that its
  successor publishes (where `spec` is a file).

  Args:
    spec: the coordinator's address, or `@` and the file that holds it.
    token: of the run.
    learner_id: of which learner.
    epoch: its number.
    hosts: ranks of it.
    rank: this one's.
    holder: `host:pid`, for messages to others.
    limits: how long to wait.
    tls: whom to believe, None for plain text.

  Raises:
    Refused: the epoch is over, or this rank another's.
    epochs.Lost: the others did not come, or went again.
    Unreachable: no coordinator within the limit.
  """
  deadline = time.monotonic() + limits.connect_s
  told = False
  while True:
    left_s = max(deadline - time.monotonic(), _RETRY_S)
    try:
      where = address.resolve(spec, left_s)
      with EpochsClient(where, token, tls) as coordinator:
        service = coordinator.gather(
          learner_id, epoch, hosts, rank, holder, left_s
        )
      break
    except Refused as error:
      if error.reason == "missing":
        raise epochs.Lost(str(error)) from None
      raise
    except Unreachable as error:
      if time.monotonic() >= deadline:
        raise
      if not told:
        _LOG.warning("%s; trying again for %.0f s", error, left_s)
      told = True
      time.sleep(_RETRY_S)
  epochs.connect(service, rank, hosts, limits)
