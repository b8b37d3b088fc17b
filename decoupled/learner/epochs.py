"""The `jax.distributed` job of a learner of several hosts, epoch by epoch.

An epoch is one membership of the job. Its coordination service runs in a
process that is no rank (`Service`), so that any rank may die, rank 0 included.
Survivors catch the collective's error (`lost_peer`), bring what they need to
the host, `tear_down`, and `connect` to the next epoch in the same process, with
whoever holds the dead rank's id now.

This is the one module that calls private parts of JAX. What they do was seen on
JAX 0.10.2 and 0.12 (CPU, Gloo), and decides the order here:

- XLA reads XLA_FLAGS when the first backend is made, not at the import: the
  process sets its own time-out in `prepare`, whoever started it.
- A rank that loses the coordination service while it is connected to it is
  aborted from another thread, and nothing can catch that. The service is needed
  only while the job forms, up to the first run of every collective: then
  `settle` leaves it, and neither its end nor a heartbeat can hurt the rank.
- Connecting waits for all ranks. Beyond its limit it aborts the process, unless
  there is a callback; then it raises.
- Arrays keep their backend, and its memory, alive: drop them before
  `tear_down`; `released` says whether the memory is free.
"""

import contextlib
import dataclasses
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _xla_bridge
from jax._src.lib import _jax
from jax.extend import backend as _backend

from decoupled.errors import ConfigError, DecoupledError, Unreachable

_LOG = logging.getLogger("decoupled.epochs")

_TIMEOUT_FLAG = "--xla_cpu_collective_timeout_seconds"
# Who is dead is found out by closed connections, the collective's time-out and
# the syncer. The service must not judge: whom it believes dead, it aborts.
_NO_HEARTBEAT_S = 10_000_000
_SHUTDOWN_S = 1
_LOOK_MS = 200
# XLA adds this to the limit of the call that waits for the other ranks.
_XLA_SLACK_S = 5
_COLLECTIVE_BELOW_S = 40  # from here XLA ends the process itself
# Words in errors of a collective, or of its forming, that a peer has caused.
_LOST = (
  "gloo",
  "nccl",
  "coordination",
  "keyvalue",
  "connection reset",
  "connection closed",
  "deadline_exceeded",
  "socket closed",
)


# Backends of epochs that are over, for as long as something holds them.
_over: list[weakref.ref[Any]] = []


class Lost(DecoupledError):
  """An epoch cannot go on, or did not form: a peer is not there."""


@dataclasses.dataclass(frozen=True)
class EpochLimits:
  """How long an epoch may wait for a rank.

  Attributes:
    connect_s: for all ranks to connect.
    collective_s: for a peer that is connected and silent, inside one
      collective; whole seconds.
  """

  connect_s: float = 30.0
  collective_s: int = 3


class Service:
  """The coordination service of one epoch; in a process that is no rank.

  Args:
    bind: `host:port` to listen on; the port must be free.
    hosts: ranks of the job.

  Raises:
    Unreachable: it cannot listen there.
  """

  def __init__(self, bind: str, hosts: int):
    self.bind = bind
    self.hosts = hosts
    try:
      self._service: Any = _jax.get_distributed_runtime_service(
        bind,
        hosts,
        heartbeat_timeout=_NO_HEARTBEAT_S,
        cluster_register_timeout=_NO_HEARTBEAT_S,
        shutdown_timeout=_SHUTDOWN_S,
        recoverable=True,
      )
    except Exception as error:
      raise Unreachable(
        f"no coordination service can listen at {bind}: {error}"
      ) from None

  def close(self) -> None:
    """Ends it; takes seconds while ranks are connecting.

    A rank that has connected and not settled is aborted by this.
    """
    service, self._service = self._service, None
    if service is not None:
      service.shutdown()


def prepare(limits: EpochLimits) -> None:
  """Sets what JAX must know before the first backend of this process.

  Raises:
    ConfigError: a backend exists already, or a limit that XLA cannot keep.
  """
  if _xla_bridge.backends_are_initialized():
    raise ConfigError(
      "this process has used JAX before it joined the job of its learner: "
      "prepare epochs before anything else"
    )
  if not 1 <= limits.collective_s < _COLLECTIVE_BELOW_S:
    raise ConfigError(
      f"a collective's limit of {limits.collective_s} s: choose 1 to "
      f"{_COLLECTIVE_BELOW_S - 1} s, since XLA ends processes after "
      f"{_COLLECTIVE_BELOW_S} s"
    )
  flags = os.environ.get("XLA_FLAGS", "")
  if _TIMEOUT_FLAG not in flags:
    flag = f"{_TIMEOUT_FLAG}={limits.collective_s}"
    os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()
  jax.config.update("jax_enable_recoverability", True)
  # SIGTERM belongs to `launch.termination`, the end to the syncer.
  jax.config.update("jax_enable_preemption_service", False)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")


def connect(address: str, rank: int, hosts: int, limits: EpochLimits) -> None:
  """Joins an epoch and makes its backend; returns when all ranks are there.

  Args:
    address: `host:port` of the epoch's coordination service.
    rank: this process's, 0 to hosts − 1.
    hosts: ranks of the job.
    limits: how long to wait.

  Raises:
    Lost: not all ranks came within the limit, or one has gone again.
  """
  if jax.distributed.is_initialized():
    raise RuntimeError("tear_down() comes before the next epoch")
  if _xla_bridge.backends_are_initialized():
    raise RuntimeError("JAX was used before the epoch, which would be alone")
  began = time.monotonic()
  state = _distributed.global_state
  client = _jax.get_distributed_runtime_client(
    address,
    rank,
    init_timeout=max(1, round(limits.connect_s) - _XLA_SLACK_S),
    shutdown_timeout=_SHUTDOWN_S,
    heartbeat_timeout=_NO_HEARTBEAT_S,
    missed_heartbeat_callback=_aborted,
    shutdown_on_destruction=False,
    use_compression=True,
  )
  state.coordinator_address = address
  state.process_id, state.num_processes = rank, hosts
  try:
    client.connect()
    state.client = client
    found = jax.process_count()
  except Exception as error:
    state.client = client
    tear_down()
    raise Lost(
      f"rank {rank} of {hosts} waited {time.monotonic() - began:.1f} s for the "
      f"others at {address}: {_one_line(error)}"
    ) from None
  _LOG.info(
    "rank %d of %d is in the epoch at %s after %.2f s",
    *(rank, found, address, time.monotonic() - began),
  )


def together(name: str, limit_s: float, check: Callable[[], None]) -> None:
  """Returns once every rank of the epoch has come here; before `settle`.

  A collective would end with its time-out where ranks are seconds apart, as
  they are while they compile.

  Args:
    name: of the place; once an epoch.
    limit_s: for all to come.
    check: called while somebody is missing; raises where nobody will come.

  Raises:
    Lost: somebody has not come.
  """
  state = _distributed.global_state
  client: Any = state.client
  until = time.monotonic() + limit_s
  key = f"decoupled/{name}"
  try:
    client.key_value_set(f"{key}/{state.process_id}", "here")
  except Exception as error:
    raise Lost(f"rank {state.process_id}: {_one_line(error)}") from None
  for rank in range(state.num_processes):
    while True:
      try:
        client.blocking_key_value_get(f"{key}/{rank}", _LOOK_MS)
        break
      except Exception as error:
        check()
        if time.monotonic() > until:
          raise Lost(
            f"rank {rank} has not come to {name} within {limit_s:g} s: "
            f"{_one_line(error)}"
          ) from None


def settle() -> None:
  """Leaves the coordination service; the job goes on without it.

  To be called once every program with a collective has run, since collectives
  of new groups of devices cannot be formed afterwards (they raise, as after the
  loss of a peer). JAX's own barriers are over, too.
  """
  client = _distributed.global_state.client
  if client is not None:
    client.shutdown()


def tear_down() -> None:
  """Leaves the epoch: its connections, its backend, the backend's memory.

  Drop every array and executable before; `released` says whether none is left.
  """
  state = _distributed.global_state
  client, state.client = state.client, None
  _over.extend(weakref.ref(b) for b in _backends())
  # what a failed collective left behind raises here once more
  with contextlib.suppress(Exception):
    _backend.clear_backends()
  _xla_bridge._clear_backends()
  state.process_id, state.num_processes = 0, 1
  state.coordinator_address = None
  if client is not None:
    with contextlib.suppress(Exception):
      client.shutdown()
  del client
  gc.collect()


def released(limit_s: float = 0.0) -> bool:
  """Whether the backends of all epochs that are over are gone from memory.

  A collective that is still under way keeps its backend until its time-out;
  whatever else does, holds an array or an executable that it should not.

  Args:
    limit_s: how long to wait for that.
  """
  until = time.monotonic() + limit_s
  while True:
    gc.collect()
    _over[:] = [ref for ref in _over if ref() is not None]
    if not _over or time.monotonic() >= until:
      return not _over
    time.sleep(0.1)


def lost_peer(error: BaseException) -> bool:
  """Whether an error says that a peer is gone, rather than a wrong program."""
  if isinstance(error, Lost):
    return True
  if not isinstance(error, RuntimeError | ValueError):
    return False
  text = str(error).lower()
  return any(word in text for word in _LOST)


def _backends() -> list[Any]:
  if not _xla_bridge.backends_are_initialized():
    return []
  return list(_xla_bridge._backends.values())


def _aborted(*_: Any) -> None:
  """Only its being there matters: connecting raises instead of aborting."""


def _one_line(error: BaseException) -> str:
  text = " ".join(str(error).split())
  if "bad_cast" in text:  # what is left of a time-out that has a callback
    return "not all of them came"
  return text[:300]


def close_in_background(service: Service) -> threading.Thread:
  """Closes a service on a thread of its own, since that may take seconds."""
  thread = threading.Thread(
    target=service.close, name="epoch-close", daemon=True
  )
  thread.start()
  return thread
