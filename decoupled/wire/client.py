"""The gRPC wire: a learner's connection to its syncer, and the operator's."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import numpy as np

from decoupled import faults
from decoupled.clock import Clock, MonotonicClock
from decoupled.errors import DecoupledError, Refused, Unreachable
from decoupled.types import (
  NO_VERSION,
  PROTOCOL_VERSION,
  Announcement,
  Arrays,
  Contribution,
  Hello,
  Manifest,
  MergedFragment,
  Phase,
  Report,
  RunContract,
  Sitting,
  Standing,
  StateHeader,
  Version,
  Welcome,
)
from decoupled.wire import address as address_lib
from decoupled.wire import chunks, codecs, credentials, messages, states
from decoupled.wire import tls as tls_lib
from decoupled.wire.address import Address
from decoupled.wire.messages import Encoding
from decoupled.wire.pool import PoolStream
from decoupled.wire.proto.decoupled.v1 import (
  donations_pb2,
  donations_pb2_grpc,
  fragments_pb2,
  fragments_pb2_grpc,
  membership_pb2,
  membership_pb2_grpc,
  pool_pb2,
  pool_pb2_grpc,
  seats_pb2,
  seats_pb2_grpc,
)
from decoupled.wire.seats import SeatStream
from decoupled.wire.status import JobStatus
from decoupled.wire.stream import ControlStream, Outbox

_LEAVE_S = 2.0
_SHORTEST_S = 0.1
_MOVED = object()
_AGAIN_S = 0.2  # before a call whose answer was lost is made again
_CHECK_S = 0.5  # a connection that is not there by then: is it TLS?
_LOOK_S = 0.25  # how often a call that waits looks whether the syncer moved


class GrpcLearnerWire:
  """Implements `link.wire.LearnerWire` over gRPC.

  Control and bulk have channels, hence TCP connections, of their own. After a
  loss the channels reconnect by themselves; say `hello` and `listen` again.

  Args:
    address: of the syncer.
    token: of the run.
    connect_s: how long `hello` tries.
    transfer_s: how long the transfer of one fragment may take.
    clock: of the times that are sent; the same as that of reports.
    tls: whom to believe, None for plain text.
    moved: the address that a syncer has published by now, None if none has;
      asked while `hello` waits, since another syncer may have taken over.
  """

  def __init__(
    self,
    address: Address | str,
    token: str,
    *,
    connect_s: float = 60.0,
    transfer_s: float = 30.0,
    clock: Clock | None = None,
    tls: tls_lib.ClientTls | None = None,
    moved: Callable[[], Address | None] = lambda: None,
  ):
    self._address = _address(address)
    self._token = token
    self._tls = tls
    self._moved = moved
    self._connect_s = connect_s
    self._transfer_s = transfer_s
    self._clock = clock or MonotonicClock()
    self._metadata = credentials.metadata(token)
    self._channels: list[grpc.Channel] = []
    self._former: list[grpc.Channel] = []
    self._dial()
    self._outbox = Outbox()
    self._stream: ControlStream | None = None
    self._welcome: Welcome | None = None
    self._codec = "float32"
    self._host = 0

  def hello(self, hello: Hello) -> Welcome:
    """Claims a learner id; see `LearnerWire`."""
    request = messages.hello_to(hello)
    self._host = hello.host
    reply = self._ask(lambda: self._membership.Hello, request)
    welcome = messages.welcome_from(reply)
    self._welcome = welcome
    codec = dict(welcome.contract).get("Exchange.codec", "float32")
    self._codec = codec.strip("'\"")
    return welcome

  def contract(self, holder: str) -> RunContract:
    """What peers of the run agree on; waits for the syncer as `hello` does.

    Args:
      holder: who asks, as `host:pid`.

    Raises:
      Refused: the syncer declined, with its reason.
      Unreachable: nobody answered, or TLS does not work; the message says.
    """
    request = membership_pb2.ContractRequest(
      protocol=PROTOCOL_VERSION, holder=holder
    )
    reply = self._ask(lambda: self._membership.Contract, request)
    return messages.run_contract_from(reply)

  def _ask(self, method: Callable[[], Any], request: Any) -> Any:
    """The answer to a first call, wherever the syncer moves meanwhile."""
    deadline = time.monotonic() + self._connect_s
    reply = None
    while reply is None:
      self._follow()
      if self._connect_bulk(deadline):
        reply = self._call(method(), request, deadline)
    return reply

  def _dial(self) -> None:
    """Makes the channels; those before the last ones are closed.

    Others may be about to call on the last ones, and must find them open.
    """
    for channel in self._former:
      channel.close()
    self._former = self._channels
    self.peer = str(self._address)
    tls = self._tls.credentials if self._tls else None
    self._channels = [
      credentials.channel(self._address, self._token, tls),
      credentials.channel(self._address, self._token, tls, bulk=True),
    ]
    self._membership = membership_pb2_grpc.MembershipStub(self._channels[0])
    self._store = fragments_pb2_grpc.FragmentStoreStub(self._channels[1])
    self._donations = donations_pb2_grpc.DonationsStub(self._channels[1])
    self._pool = pool_pb2_grpc.PoolStub(self._channels[0])
    self._followed = pool_pb2_grpc.PoolStub(self._channels[1])

  def _elsewhere(self) -> Address | None:
    """Where the syncer is now, None if that is where it was."""
    address = self._moved()
    return None if address == self._address else address

  def _follow(self) -> None:
    """Dials the syncer's new address, if it has one."""
    address = self._elsewhere()
    if address is not None:
      self._address = address
      self._dial()

  def _connect_bulk(self, deadline: float) -> bool:
    """Waits for the bulk connection, before anything is claimed.

    After a loss it would otherwise still sit out its backoff, and the first
    transfers of the new incarnation would fail at once.

    Returns:
      False if the syncer has moved meanwhile.
    """
    ready = grpc.channel_ready_future(self._channels[1])
    try:
      return self._await(ready, deadline, self._check_tls) is not _MOVED
    finally:
      ready.cancel()

  def _check_tls(self) -> None:
    """Raises Unreachable if TLS is what keeps the connection from coming."""
    said = tls_lib.fault(self._address, self._tls)
    if said:
      raise Unreachable(said)

  def _call(self, method: Any, request: Any, deadline: float) -> Any:
    """The answer to a call; None where it is to be made again.

    The syncer may have moved, or died, or the connection broke while it was
    answering: the answer is lost then, not the run.
    """
    call: Any = method.future(
      request,
      timeout=max(_SHORTEST_S, deadline - time.monotonic()),
      metadata=self._metadata,
      wait_for_ready=True,
    )
    try:
      reply = self._await(call, deadline + _SHORTEST_S)
    except grpc.RpcError as error:
      broke = error.code() is grpc.StatusCode.UNAVAILABLE
      if broke and time.monotonic() + _AGAIN_S < deadline:
        time.sleep(_AGAIN_S)
        return None
      raise failure(error, self._address, self._connect_s) from None
    finally:
      call.cancel()
    return None if reply is _MOVED else reply

  def _await(
    self,
    future: Any,
    deadline: float,
    check: Callable[[], None] = lambda: None,
  ) -> Any:
    """What a future yields, or _MOVED.

    Args:
      future: the one.
      deadline: until when.
      check: called now and then while it has yet to come.

    Raises:
      Unreachable: neither has happened by the deadline.
    """
    check_at = time.monotonic() + _CHECK_S
    while self._elsewhere() is None:
      if time.monotonic() >= check_at:
        check()
        check_at = time.monotonic() + 4 * _CHECK_S
      left_s = deadline - time.monotonic()
      try:
        return future.result(timeout=max(0.0, min(_LOOK_S, left_s)))
      except grpc.FutureTimeoutError:
        if left_s <= 0:
          said = _no_answer(self._address, self._connect_s)
          raise Unreachable(said) from None
    return _MOVED

  def listen(
    self,
    on_announcement: Callable[[Announcement], None],
    on_lost: Callable[[str], None],
  ) -> None:
    """Opens the control stream; see `LearnerWire`."""
    if self._stream is not None:
      self._stream.close()
    self._stream = ControlStream(
      self._open_control,
      self._outbox,
      self._granted,
      self._host,
      self._clock,
      lambda error: str(failure(error, self._address, self._connect_s)),
      on_announcement,
      on_lost,
    )

  def _open_control(
    self, outgoing: Iterator[membership_pb2.LearnerMessage]
  ) -> Any:
    return self._membership.Control(outgoing, metadata=self._metadata)

  def report(self, report: Report) -> None:
    """Hands over the newest report; see `LearnerWire`."""
    self._outbox.put(report)

  def contribute(self, contribution: Contribution, base: Arrays | None) -> str:
    """Sends one copy; see `LearnerWire`."""
    if base is not None and contribution.slices:
      base = tuple(base[s.unit][s.within] for s in contribution.slices)
    payload = codecs.encode(self._codec, contribution.arrays, base)
    header = contribution.header
    encoding = Encoding(
      self._codec,
      header.base if codecs.is_delta(payload) else None,
      chunks.size(payload),
    )
    try:
      reply = self._store.Contribute(
        _stream_of(messages.contribution_to(contribution, encoding), payload),
        timeout=self._transfer_s,
        metadata=self._metadata,
      )
    except grpc.RpcError as error:
      raise failure(error, self._address, self._transfer_s) from None
    return reply.refusal

  def fetch(
    self, fragment: int, held: Version, base: Arrays | None
  ) -> MergedFragment:
    """Gets the newest version of a fragment; see `LearnerWire`."""
    request = fragments_pb2.FetchRequest(
      learner_id=self._granted.learner_id,
      incarnation=self._granted.incarnation,
      fragment=fragment,
      held=messages.version_to(NO_VERSION if base is None else held),
    )
    call: Any = self._store.Fetch(
      request, timeout=self._transfer_s, metadata=self._metadata
    )
    return self._down(call, fragment, held, base, self._granted.manifest)

  def follow(
    self,
    manifest: Manifest,
    fragment: int,
    held: Version,
    base: Arrays | None,
  ) -> MergedFragment:
    """As `fetch`, for a standby, which has claimed nothing.

    Args:
      manifest: of the run.
      fragment: which.
      held: the version that the standby holds.
      base: that version's arrays, None for none.
    """
    request = pool_pb2.FollowRequest(
      fragment=fragment,
      held=messages.version_to(NO_VERSION if base is None else held),
    )
    call: Any = self._followed.Follow(
      request, timeout=self._transfer_s, metadata=self._metadata
    )
    return self._down(call, fragment, held, base, manifest)

  def pool(self, standing: Standing) -> PoolStream:
    """Enters the pool of standbys."""
    return PoolStream(
      lambda said: self._pool.Wait(said, metadata=self._metadata),
      standing,
      lambda error: failure(error, self._address, self._connect_s),
    )

  def seat(self, sitting: Sitting, beat_s: float) -> SeatStream:
    """Sits down as a host of a learner of several; stays until closed."""

    def opened(said: Iterator[seats_pb2.Sitting]) -> Any:
      self._follow()
      stub = seats_pb2_grpc.SeatsStub(self._channels[0])
      return stub.Sit(said, metadata=self._metadata)

    return SeatStream(
      opened,
      sitting,
      beat_s,
      lambda error: failure(error, self._address, self._connect_s),
    )

  def _down(
    self,
    call: Any,
    fragment: int,
    held: Version,
    base: Arrays | None,
    manifest: Manifest,
  ) -> MergedFragment:
    try:
      return self._receive(call, fragment, held, base, manifest)
    except grpc.RpcError as error:
      raise failure(error, self._address, self._transfer_s) from None
    finally:
      call.cancel()

  def _receive(
    self,
    call: Any,
    fragment: int,
    held: Version,
    base: Arrays | None,
    manifest: Manifest,
  ) -> MergedFragment:
    first = next(call, None)
    if first is None:
      raise messages.malformed("a fragment without anything in it")
    merged, encoding = messages.fragment_from(first)
    if merged.fragment != fragment:
      raise messages.malformed(
        f"fragment {merged.fragment} came instead of {fragment}"
      )
    if encoding.base not in (None, held):
      raise messages.malformed(
        f"a delta against {encoding.base}, {held} is what this learner holds"
      )
    faults.reached("wire.half_received")
    shapes = [manifest.shape(unit) for unit in manifest.fragments[fragment]]
    dtype: np.dtype[Any] = (
      codecs.FULL if encoding.base is None else codecs.DELTA
    )
    assembly = chunks.Assembly(shapes, dtype)
    for part in call:
      data = messages.data_from(part)
      assembly.add(data.data, data.crc32)
    arrays = codecs.decode(encoding.codec, assembly.finish(), base)
    return dataclasses.replace(merged, arrays=arrays)

  def take_state(
    self, own: tuple[int, int] | None = None
  ) -> contextlib.AbstractContextManager[states.Incoming]:
    """Asks for a donor's optimizer state; ask again for another donor's.

    Blocks while it comes; the syncer ends a transfer that does not move.

    Args:
      own: the learner and incarnation whose own state it is to be, for the
        standby that prepares to take its place, which has claimed nothing.

    Raises:
      Refused: `no_donor`: nobody (else) can give one; `donor`: this one
        failed; or what came was damaged.
      Unreachable: the syncer is gone.
    """
    granted = (
      (self._granted.learner_id, self._granted.incarnation)
      if own is None
      else own
    )
    return self._taken(
      donations_pb2.TakeRequest(
        learner_id=granted[0], incarnation=granted[1], own=own is not None
      )
    )

  @contextlib.contextmanager
  def _taken(
    self, request: donations_pb2.TakeRequest
  ) -> Iterator[states.Incoming]:
    call: Any = self._donations.Take(request, metadata=self._metadata)
    try:
      yield states.Incoming(call)
    except grpc.RpcError as error:
      raise failure(error, self._address, self._transfer_s) from None
    finally:
      call.cancel()

  def give_state(
    self, header: StateHeader, arrays: Iterable[np.ndarray]
  ) -> None:
    """Sends this learner's optimizer state; blocks until it is passed on.

    Args:
      header: names the request.
      arrays: the leaves in the header's order, whole; they are asked for one
        at a time, by a thread of the call's own.

    Raises:
      Refused: nobody waits for it any more.
      Unreachable: the syncer is gone.
    """
    try:
      reply = self._donations.Give(
        states.outgoing(header, arrays), metadata=self._metadata
      )
    except grpc.RpcError as error:
      raise failure(error, self._address, self._transfer_s) from None
    if reply.refusal:
      raise Refused(reply.refusal, reply.message)

  def ask_for_swap(self, limit_s: float) -> str:
    """Asks for a standby to take this learner's place; returns its name.

    Raises:
      Refused: nobody can, or the run has something else to do.
      Unreachable: no answer within the limit.
    """
    request = membership_pb2.SwapRequest(learner_id=self._granted.learner_id)
    try:
      reply = self._membership.Swap(
        request, timeout=limit_s, metadata=self._metadata
      )
    except grpc.RpcError as error:
      raise failure(error, self._address, limit_s) from None
    return str(reply.standby)

  def leave(self, why: str = "") -> None:
    """Says goodbye, then ends the control stream."""
    stream, self._stream = self._stream, None
    if stream is not None:
      stream.leave(why, _LEAVE_S)

  def close(self) -> None:
    """Releases connections and threads."""
    stream, self._stream = self._stream, None
    if stream is not None:
      stream.close()
    for channel in (*self._former, *self._channels):
      channel.close()

  @property
  def _granted(self) -> Welcome:
    if self._welcome is None:
      raise RuntimeError("say hello first")
    return self._welcome


class AdminClient:
  """The operator's calls on a running job.

  Args:
    address: of the syncer.
    token: of the run.
    limit_s: how long a call may take.
    tls: whom to believe, None for plain text.
  """

  def __init__(
    self,
    address: Address | str,
    token: str,
    *,
    limit_s: float = 5.0,
    tls: tls_lib.ClientTls | None = None,
  ):
    self._address = _address(address)
    self._limit_s = limit_s
    self._tls = tls
    self._metadata = credentials.metadata(token)
    self._channel = credentials.channel(
      self._address, token, tls.credentials if tls else None
    )
    self._stub = membership_pb2_grpc.MembershipStub(self._channel)

  def status(self) -> JobStatus:
    """The run at a glance; raises Refused, Unreachable."""
    request = membership_pb2.StatusRequest()
    return messages.status_from(self._call(self._stub.Status, request))

  def drain(self, why: str) -> Phase:
    """Asks for the end of the run, in order; returns where it now is."""
    request = membership_pb2.DrainRequest(why=why)
    return messages.phase_from(self._call(self._stub.Drain, request).phase)

  def expect(self, learner_id: int, limit_s: float) -> None:
    """Says that a learner is being restarted: do not end without it."""
    request = membership_pb2.ExpectRequest(
      learner_id=learner_id, limit_s=limit_s
    )
    self._call(self._stub.Expect, request)

  def swap(self, learner_id: int, limit_s: float | None = None) -> str:
    """Has a standby take a learner's place; returns its name when it has.

    Args:
      learner_id: whose.
      limit_s: for all of it; None is that of any call.

    Raises:
      Refused: it cannot be, or was given up; the learner trains on.
      Unreachable: no answer within the limit.
    """
    request = membership_pb2.SwapRequest(learner_id=learner_id, wait=True)
    return str(self._call(self._stub.Swap, request, limit_s).standby)

  def close(self) -> None:
    self._channel.close()

  def __enter__(self) -> "AdminClient":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _call(
    self,
    method: Callable[..., Any],
    request: Any,
    limit_s: float | None = None,
  ) -> Any:
    limit_s = limit_s or self._limit_s
    try:
      return method(request, timeout=limit_s, metadata=self._metadata)
    except grpc.RpcError as error:
      if error.code() is grpc.StatusCode.UNAVAILABLE:
        said = tls_lib.fault(self._address, self._tls)
        if said:
          raise Unreachable(said) from None
      raise failure(error, self._address, limit_s) from None


def failure(
  error: grpc.RpcError, address: Address, limit_s: float, who: str = "syncer"
) -> DecoupledError:
  """What a failed call means to the learner and to whoever reads the log."""
  code, details = error.code(), error.details() or ""
  if code is grpc.StatusCode.FAILED_PRECONDITION:
    reason, _, message = details.partition(": ")
    return Refused(reason, message or reason)
  if code is grpc.StatusCode.UNAUTHENTICATED:
    return Refused(
      "unauthenticated",
      f"the {who} at {address} does not accept this run token: use the token "
      "file of its run (--token_file)",
    )
  if code is grpc.StatusCode.UNIMPLEMENTED:
    return Refused(
      "protocol",
      f"what listens at {address} does not speak decoupled.v1: check the "
      "address, and install the same release on both sides",
    )
  if code is grpc.StatusCode.DEADLINE_EXCEEDED:
    return Unreachable(_no_answer(address, limit_s, who))
  return Unreachable(
    f"the {who} at {address} cannot be reached ({details or code.name})"
  )


def _no_answer(address: Address, limit_s: float, who: str = "syncer") -> str:
  return (
    f"no {who} answered at {address} within {limit_s:g} s: is it running, "
    "and is the address right?"
  )


def _address(address: Address | str) -> Address:
  if isinstance(address, Address):
    return address
  return address_lib.parse(address)


def _stream_of(
  header: fragments_pb2.Chunk, payload: codecs.Payload
) -> Iterator[fragments_pb2.Chunk]:
  yield header
  faults.reached("wire.half_sent")
  for piece in chunks.split(payload, credentials.CHUNK_BYTES):
    data = fragments_pb2.Data(crc32=piece.crc32, data=piece.data)
    yield fragments_pb2.Chunk(data=data)
