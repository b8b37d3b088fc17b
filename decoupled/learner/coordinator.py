"""`decoupled coordinator`: where the hosts of learners meet to form epochs.

A small process that is no rank of any job, so that every rank may die. It runs
one coordination service of JAX for each epoch that is forming or has formed. It
may die, too: hosts that have formed an epoch do not need it (see `epochs`),
and the next epoch is formed at whichever address its successor publishes.
"""

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import grpc
import grpc.aio

from decoupled.errors import ConfigError, Refused, Unreachable
from decoupled.launch import affinity, folders
from decoupled.launch.options import CoordinatorOptions
from decoupled.launch.termination import Termination
from decoupled.learner import epochs
from decoupled.wire import credentials, tls
from decoupled.wire.address import Address, parse, publish_address, reachable
from decoupled.wire.proto.decoupled.v1 import epochs_pb2 as pb
from decoupled.wire.proto.decoupled.v1 import epochs_pb2_grpc as pb_grpc
from decoupled.wire.refusals import refuse

_LOG = logging.getLogger("decoupled.coordinator")
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

_MAX_CALLS = 4096
_MAX_EPOCHS = 1024
_MAX_HOSTS = 65536
_MAX_WAIT_S = 3600.0
_TRIES = 8  # for a port that nobody else takes first


class Service(Protocol):
  """A running coordination service."""

  bind: str

  def close(self) -> None: ...


@dataclasses.dataclass(eq=False)
class _Epoch:
  """An epoch that is forming or has formed.

  Attributes:
    number: it rises.
    hosts: ranks of it.
    service: its coordination service.
    here: who has come, by rank.
    settled: done once all have come, failed once it is over.
  """

  number: int
  hosts: int
  service: Service
  here: dict[int, str]
  settled: asyncio.Future[None]


class Table:
  """The epochs of all learners; on one event loop.

  Args:
    start: starts a coordination service for so many hosts.
    end: ends one, without waiting for it.
    max_epochs: services at one time.
  """

  def __init__(
    self,
    start: Callable[[int], Service],
    end: Callable[[Service], object],
    max_epochs: int = _MAX_EPOCHS,
  ):
    self._start = start
    self._end = end
    self._max_epochs = max_epochs
    self._open: dict[int, dict[int, _Epoch]] = {}

  def open(self, learner_id: int, number: int, hosts: int) -> _Epoch:
    """The epoch, started if it is not there; older ones wait for no rank.

    Raises:
      Refused: `malformed`; `old_epoch`: a newer one is there; `hosts`: it has
        another number of hosts; `full`.
    """
    if learner_id < 0 or number < 0 or not 1 <= hosts <= _MAX_HOSTS:
      raise Refused(
        "malformed", f"epoch {number} of learner {learner_id} of {hosts} hosts"
      )
    mine = self._open.get(learner_id, {})
    newest = max(mine, default=-1)
    if number < newest:
      raise Refused(
        "old_epoch",
        f"epoch {number} of learner {learner_id} is over, epoch {newest} is "
        "open: ask the syncer which one to join",
      )
    found = mine.get(number)
    if found is None:
      return self._begin(learner_id, number, hosts)
    if found.hosts != hosts:
      raise Refused(
        "hosts",
        f"epoch {number} of learner {learner_id} has {found.hosts} hosts, not "
        f"{hosts}: give every host the same --num_processes",
      )
    return found

  def _begin(self, learner_id: int, number: int, hosts: int) -> _Epoch:
    running = sum(map(len, self._open.values()))
    if running >= self._max_epochs:
      raise Refused(
        "full",
        f"{running} epochs are open, no more than {self._max_epochs} may be: "
        "close those of learners that have ended",
      )
    epoch = _Epoch(
      number,
      hosts,
      self._start(hosts),
      here={},
      settled=asyncio.get_running_loop().create_future(),
    )
    mine = self._open.setdefault(learner_id, {})
    for older in mine.values():
      _tell(
        older,
        Refused(
          "old_epoch",
          f"epoch {older.number} of learner {learner_id} is over before it "
          f"formed: epoch {number} has been opened",
        ),
      )
    mine[number] = epoch
    _LOG.info(
      "epoch %d of learner %d: %d hosts meet at %s",
      *(number, learner_id, hosts, epoch.service.bind),
    )
    return epoch

  async def gather(
    self,
    learner_id: int,
    number: int,
    hosts: int,
    rank: int,
    holder: str,
    limit_s: float,
  ) -> _Epoch:
    """Waits until every rank has asked for this epoch.

    Raises:
      Refused: as `open`; `claimed`: another process has this rank; `missing`:
        with the ranks that have not come by the limit.
    """
    epoch = self.open(learner_id, number, hosts)
    if not 0 <= rank < hosts:
      raise Refused("malformed", f"rank {rank} of {hosts} hosts")
    other = epoch.here.setdefault(rank, holder)
    if other != holder:
      raise Refused(
        "claimed",
        f"rank {rank} of epoch {number} of learner {learner_id} is held by "
        f"{other}, not by {holder}",
      )
    if len(epoch.here) == hosts:
      # Whoever is here has left the older ones: they are zombies' now.
      _tell(epoch, None)
      self.close(learner_id, number - 1)
    try:
      await asyncio.wait_for(asyncio.shield(epoch.settled), limit_s)
    except TimeoutError:
      if epoch.here.get(rank) == holder:
        del epoch.here[rank]
      missing = sorted(set(range(hosts)) - set(epoch.here) - {rank})
      raise Refused(
        "missing",
        f"epoch {number} of learner {learner_id} has not formed within "
        f"{limit_s:g} s: rank {', '.join(map(str, missing)) or '(none)'} of "
        f"{hosts} has not come",
      ) from None
    return epoch

  def close(self, learner_id: int, upto: int) -> int:
    """Ends a learner's epochs up to a number; returns how many there were."""
    mine = self._open.get(learner_id, {})
    over = [mine.pop(number) for number in sorted(mine) if number <= upto]
    if not mine:
      self._open.pop(learner_id, None)
    for epoch in over:
      _tell(epoch, Refused("old_epoch", f"epoch {epoch.number} is closed"))
      self._end(epoch.service)
    return len(over)

  def close_all(self) -> None:
    for learner_id in list(self._open):
      self.close(learner_id, max(self._open[learner_id]))


def _tell(epoch: _Epoch, error: Refused | None) -> None:
  if epoch.settled.done():
    return
  if error is None:
    epoch.settled.set_result(None)
    return
  epoch.settled.set_exception(error)
  epoch.settled.exception()  # nobody may be waiting


class Coordinator(pb_grpc.EpochsServicer):
  """Serves `decoupled.v1.Epochs`."""

  def __init__(self, table: Table):
    self._table = table

  async def Open(
    self, request: pb.OpenRequest, context: Context
  ) -> pb.OpenReply:
    try:
      epoch = self._table.open(request.learner_id, request.epoch, request.hosts)
    except Refused as error:
      await refuse(context, error)
    return pb.OpenReply(address=epoch.service.bind)

  async def Gather(
    self, request: pb.GatherRequest, context: Context
  ) -> pb.OpenReply:
    limit_s = request.limit_s
    try:
      if not 0 < limit_s <= _MAX_WAIT_S:
        raise Refused("malformed", f"a wait of {limit_s} s")
      epoch = await self._table.gather(
        request.epoch.learner_id,
        request.epoch.epoch,
        request.epoch.hosts,
        request.rank,
        request.holder,
        limit_s,
      )
    except Refused as error:
      await refuse(context, error)
    return pb.OpenReply(address=epoch.service.bind)

  async def Close(
    self, request: pb.CloseRequest, context: Context
  ) -> pb.CloseReply:
    del context
    closed = self._table.close(request.learner_id, request.epoch)
    return pb.CloseReply(closed=closed)


def run(options: CoordinatorOptions) -> int:
  """Serves until it is told to end; returns the exit status.

  Raises:
    DecoupledError: with the line that the user reads.
  """
  folders.prepare(options.workdir)
  end = Termination("coordinator", options.grace_s)
  try:
    asyncio.run(_serve(options, end))
    end.ended("ended")
    return end.status
  finally:
    end.close()


async def _serve(options: CoordinatorOptions, end: Termination) -> None:
  bind = parse(options.bind)
  shown = None
  if options.tls_cert is not None and options.tls_key is not None:
    shown = tls.server(options.tls_cert, options.tls_key)
  if shown is None and not bind.is_loopback:
    raise ConfigError(
      f"{bind} can be reached from other machines, where the run token would "
      "travel in plain text: say --tls_cert and --tls_key (`decoupled certs`)"
    )
  path = options.token_file or options.workdir / "run.token"
  table = Table(
    lambda hosts: _start(bind.host, hosts), epochs.close_in_background
  )
  server = credentials.server(credentials.read_token(path), _MAX_CALLS)
  pb_grpc.add_EpochsServicer_to_server(Coordinator(table), server)
  try:
    port = credentials.add_port(server, bind, shown)
  except RuntimeError as error:
    raise ConfigError(f"cannot listen at {bind}: {error}") from None
  await server.start()
  loop, told = asyncio.get_running_loop(), asyncio.Event()

  def leave() -> None:
    with contextlib.suppress(RuntimeError):  # the loop is over already
      loop.call_soon_threadsafe(told.set)

  end.on_request = leave
  end.something_to_lose()
  listens = Address(bind.host, port)
  publish_address(options.workdir / "coordinator.address", reachable(listens))
  affinity.release()
  _LOG.info("coordinator listens at %s", listens)
  await told.wait()
  table.close_all()
  await server.stop(1.0)


def _start(host: str, hosts: int) -> epochs.Service:
  """A service at a free port of the interface that the coordinator has."""
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  for last in range(_TRIES, 0, -1):
    with socket.socket(family) as probe:
      probe.bind((host, 0))
      port = probe.getsockname()[1]
    try:
      service = epochs.Service(str(Address(host, port)), hosts)
    except Unreachable as error:
      if last == 1:
        raise Refused("no_port", str(error)) from None
      continue
    service.bind = str(reachable(Address(host, port)))
    return service
  raise AssertionError("unreachable")
