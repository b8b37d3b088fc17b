"""The syncer's server: `Rounds` behind gRPC, until the run has ended."""

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable

import grpc
import grpc.aio

from decoupled.clock import Clock, MonotonicClock
from decoupled.errors import ConfigError
from decoupled.syncer.assembly import Assemblies
from decoupled.syncer.control import Membership, Traffic
from decoupled.syncer.driver import Driver, JobT, RoundsLike
from decoupled.syncer.relay import Relay
from decoupled.syncer.seating import Seating
from decoupled.syncer.settings import Limits
from decoupled.syncer.transfers import TRANSFERS_PER_LEARNER, FragmentStore
from decoupled.syncer.waiting import Waiting
from decoupled.types import EventSink
from decoupled.wire import credentials
from decoupled.wire.address import Address
from decoupled.wire.proto.decoupled.v1 import (
  donations_pb2_grpc,
  fragments_pb2_grpc,
  membership_pb2_grpc,
  pool_pb2_grpc,
  seats_pb2_grpc,
)
from decoupled.wire.status import JobStatus

# Of one learner: control, hello, seat, fetches, a state given and one taken.
_CALLS_BESIDE_TRANSFERS = 7


class Service:
  """Serves one run; make it, and use it, on one running event loop.

  Args:
    rounds: the state machine.
    token: of the run.
    clock: whose times `rounds` is given.
    events: where refusals go that never reach `rounds`.
    max_learners: control streams at one time.
    transfer_s: how long the transfer of one fragment may take.
    open_s: how long a control stream may take to say whose it is.
    hosts_s: how long a host's claim waits for the learner's other hosts.
    linger_s: how long, after the end, learners may take to hear of it.
    limits: of the hosts of one learner.
    tls: credentials of the server, None for plain text.
    guard: see `Driver`.
  """

  def __init__(
    self,
    rounds: RoundsLike[JobT],
    token: str,
    *,
    clock: Clock | None = None,
    events: EventSink | None = None,
    max_learners: int = 1024,
    transfer_s: float = 30.0,
    open_s: float = 10.0,
    hosts_s: float = 45.0,
    linger_s: float = 10.0,
    limits: Limits | None = None,
    tls: grpc.ServerCredentials | None = None,
    guard: Callable[[], None] = lambda: None,
  ):
    self.traffic = Traffic()
    self._linger_s = linger_s
    self._tls = tls
    self._driver = Driver(
      rounds,
      clock or MonotonicClock(),
      self._changed,
      guard,
    )
    parts = Assemblies(events)
    self._membership = Membership(
      self._driver, self.traffic, parts, max_learners, open_s, hosts_s
    )
    self._store = FragmentStore(
      self._driver, self.traffic, parts, transfer_s, events
    )
    per_learner = TRANSFERS_PER_LEARNER + _CALLS_BESIDE_TRANSFERS
    self._server = credentials.server(token, max_learners * per_learner)
    membership_pb2_grpc.add_MembershipServicer_to_server(
      self._membership, self._server
    )
    fragments_pb2_grpc.add_FragmentStoreServicer_to_server(
      self._store, self._server
    )
    self._relay = Relay(self._driver, self.traffic, transfer_s)
    donations_pb2_grpc.add_DonationsServicer_to_server(
      self._relay, self._server
    )
    self._waiting = Waiting(self._driver, self._store, open_s)
    pool_pb2_grpc.add_PoolServicer_to_server(self._waiting, self._server)
    self._seating = Seating(self._driver, limits or Limits(), open_s)
    seats_pb2_grpc.add_SeatsServicer_to_server(self._seating, self._server)
    self._running: asyncio.Task[None] | None = None

  def _changed(self) -> None:
    self._membership.changed()
    self._waiting.changed()
    self._seating.changed()

  async def start(self, bind: Address) -> Address:
    """Begins to listen.

    Args:
      bind: where; port 0 takes any free one.

    Returns:
      The real address.

    Raises:
      ConfigError: plain text beyond this machine, or the port is taken.
    """
    if not bind.is_loopback and self._tls is None:
      raise ConfigError(
        f"{bind} can be reached from other machines, where the run token and "
        "the model would travel in plain text: make certificates with "
        "`decoupled certs --out DIR`, then say --tls_cert DIR/server.pem "
        "--tls_key DIR/server.key; or listen at 127.0.0.1 or [::1]"
      )
    _probe(bind)
    try:
      port = credentials.add_port(self._server, bind, self._tls)
    except RuntimeError as error:
      raise ConfigError(f"cannot listen at {bind}: {error}") from None
    await self._server.start()
    self._running = asyncio.create_task(self._driver.run())
    return Address(bind.host, port)

  async def finished(self) -> None:
    """Returns when the run has ended and the learners have heard of it.

    Or when it is left to a successor, whom they look for once this one is gone.

    Raises:
      Exception: what a merge raised; merging is over.
    """
    assert self._running is not None
    await self._running
    if self._driver.rounds.handed_over:
      return
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(self._linger_s):
        await self._membership.all_gone()
        await self._waiting.all_gone()
        await self._seating.all_gone()

  async def stop(self, grace_s: float = 1.0) -> None:
    """Stops listening; calls under way have `grace_s` to finish."""
    if self._running is not None:
      self._running.cancel()
    self._seating.close()
    await self._server.stop(grace_s)
    self._store.close()

  def hand_over(self, limit_s: float = math.inf) -> None:
    """Leaves the run to a successor; to be called on this loop.

    Args:
      limit_s: where the run is at its end: for that, and half as long again
        for its announcement.
    """
    self._linger_s = min(self._linger_s, limit_s / 2)
    self._driver.call(self._driver.rounds.hand_over, limit_s)

  def status(self) -> JobStatus:
    return self._membership.status()


async def serve(
  rounds: RoundsLike[JobT],
  bind: Address,
  token: str,
  *,
  started: Callable[[Address, Service], None] | None = None,
  clock: Clock | None = None,
  events: EventSink | None = None,
  max_learners: int = 1024,
  transfer_s: float = 30.0,
  linger_s: float = 10.0,
  hosts_s: float = 45.0,
  limits: Limits | None = None,
  tls: grpc.ServerCredentials | None = None,
  guard: Callable[[], None] = lambda: None,
) -> Traffic:
  """Serves a run from beginning to end.

  Args:
    rounds: the state machine.
    bind: where to listen.
    token: of the run.
    started: called once it listens, with the real address and the service;
      the place to publish the one and to hand the other to signal handlers.
    clock: see `Service`, also for the rest.

  Returns:
    The bytes that went over the wire.
  """
  service = Service(
    rounds,
    token,
    clock=clock,
    events=events,
    max_learners=max_learners,
    transfer_s=transfer_s,
    linger_s=linger_s,
    hosts_s=hosts_s,
    limits=limits,
    tls=tls,
    guard=guard,
  )
  try:
    address = await service.start(bind)
    if started is not None:
      started(address, service)
    await service.finished()
  finally:
    await service.stop()
  return service.traffic


def _probe(bind: Address) -> None:
  """Says in one line why an address cannot be had, before gRPC tries."""
  try:
    found = socket.getaddrinfo(
      bind.host, bind.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, where = found[0]
    with socket.socket(family, kind, protocol) as trial:
      trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      trial.bind(where)
  except OSError as error:
    raise ConfigError(
      f"cannot listen at {bind}: {error.strerror}; choose another port, or "
      "port 0 for any free one"
    ) from None
