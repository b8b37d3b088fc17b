"""The server: where it listens, what it refuses, how it drives the rounds."""

import asyncio
import socket
import threading
import time
import zlib

import grpc
import pytest

from decoupled.errors import ConfigError, Refused, Unreachable
from decoupled.syncer.service import serve
from decoupled.types import Contribution, Phase
from decoupled.wire import chunks, credentials, messages
from decoupled.wire.address import Address
from decoupled.wire.client import AdminClient, GrpcLearnerWire
from decoupled.wire.messages import Encoding
from decoupled.wire.proto.decoupled.v1 import (
  fragments_pb2,
  fragments_pb2_grpc,
  membership_pb2,
  membership_pb2_grpc,
)
from tests.wire import fakes
from tests.wire.fakes import TOKEN, FakeJob, FakeRounds, Server, wait_until


@pytest.fixture
def server():
  with Server() as running:
    yield running


@pytest.fixture
def store(server):
  with credentials.channel(server.address, TOKEN, bulk=True) as channel:
    yield fragments_pb2_grpc.FragmentStoreStub(channel)


def joined(server, learner_id=0):
  wire = GrpcLearnerWire(server.address, TOKEN)
  wire.hello(fakes.hello(learner_id))
  losses = []
  wire.listen(lambda said: None, losses.append)
  wait_until(
    lambda: any(
      learner.learner_id == learner_id
      for learner in server.service.status().learners
    ),
    "the control stream",
  )
  return wire, losses


# --- where it listens ------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_port_zero_becomes_the_real_one(host):
  with Server(bind=host) as server:
    assert server.address.port > 0
    assert server.address.host == host
    wire = GrpcLearnerWire(str(server.address), TOKEN)
    assert wire.hello(fakes.hello()).run_id == "run"
    wire.close()


def test_a_taken_port_is_said_in_one_line():
  with Server() as first:
    with (
      pytest.raises(ConfigError, match="already in use") as caught,
      Server(port=first.address.port),
    ):
      pass
    assert str(first.address) in str(caught.value)
    assert "\n" not in str(caught.value)
    with socket.create_connection(("127.0.0.1", first.address.port), 5):
      pass


def test_a_host_that_is_not_here_is_said_in_one_line():
  with pytest.raises(ConfigError, match=r"198\.51\.100\.1") as caught:
    Server(bind="198.51.100.1", tls=object()).__enter__()
  assert "\n" not in str(caught.value)


def test_a_server_insists_on_having_a_token():
  with pytest.raises(ConfigError, match="token"):
    credentials.TokenCheck("")


# --- tokens ----------------------------------------------------------------


@pytest.mark.parametrize(
  "metadata",
  [
    (),
    (("authorization", "Bearer "),),
    (("authorization", TOKEN),),
    (("authorization", f"Bearer {TOKEN}x"),),
    (("authorization", f"Bearer {TOKEN[:-1]}"),),
    (("authorization", "Bearer x"), ("authorization", f"Bearer {TOKEN}")),
  ],
  ids=["none", "empty", "bare", "longer", "shorter", "two"],
)
def test_every_call_needs_the_exact_token(server, metadata):
  with credentials.channel(server.address, TOKEN) as channel:
    member = membership_pb2_grpc.MembershipStub(channel)
    store = fragments_pb2_grpc.FragmentStoreStub(channel)
    options = {"timeout": 10, "metadata": metadata}
    silent = threading.Event()

    def never():
      silent.wait(10)
      yield fragments_pb2.Chunk()

    calls = [
      lambda: member.Hello(membership_pb2.HelloRequest(), **options),
      lambda: member.Contract(membership_pb2.ContractRequest(), **options),
      lambda: member.Drain(membership_pb2.DrainRequest(), **options),
      lambda: member.Status(membership_pb2.StatusRequest(), **options),
      lambda: member.Expect(membership_pb2.ExpectRequest(), **options),
      lambda: member.Swap(membership_pb2.SwapRequest(), **options),
      lambda: next(member.Control(iter(()), **options)),
      lambda: next(store.Fetch(fragments_pb2.FetchRequest(), **options)),
      lambda: store.Contribute(never(), **options),
    ]
    for call in calls:
      with pytest.raises(grpc.RpcError) as caught:
        call()
      assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
      assert TOKEN not in caught.value.details()
    silent.set()
  assert not server.rounds.calls


# --- contributions ---------------------------------------------------------


def parts(fragment=0, arrays=None, size=None, encoding=None):
  """The chunks of a contribution; whatever is given replaces the truth."""
  arrays = fakes.arrays(fragment) if arrays is None else arrays
  sent = Contribution(0, fakes.header(fragment), ())
  size = chunks.size(arrays) if size is None else size
  yield messages.contribution_to(sent, Encoding("float32", None, size))
  for piece in chunks.split(arrays, credentials.CHUNK_BYTES):
    yield fragments_pb2.Chunk(
      data=fragments_pb2.Data(crc32=piece.crc32, data=piece.data)
    )


def damaged(stream):
  """Flips one bit of the second chunk of data."""
  for i, part in enumerate(stream):
    if i == 2:
      data = bytearray(part.data.data)
      data[7] ^= 1
      part.data.data = bytes(data)
    yield part


def endless(stream):
  """Repeats the last chunk for ever."""
  crc = 0
  for part in stream:
    crc = part.data.crc32
    yield part
  while True:
    crc = zlib.crc32(part.data.data, crc)
    yield fragments_pb2.Chunk(
      data=fragments_pb2.Data(crc32=crc, data=part.data.data)
    )


def two_headers(stream):
  yield next(stream)
  yield from parts()


@pytest.mark.parametrize(
  ("stream", "reason"),
  [
    (damaged(parts()), "checksum"),
    (endless(parts()), "shape"),
    (list(parts())[:-1], "incomplete"),
    (parts(size=5), "shape"),
    (parts(size=2**40), "shape"),
    (parts(arrays=fakes.arrays(1)), "shape"),
    (two_headers(parts()), "malformed"),
    (list(parts())[1:], "malformed"),
    ([], "malformed"),
    ([fragments_pb2.Chunk()], "malformed"),
  ],
  ids=["flipped bit", "endless", "too short", "announced too short",
       "announced too long", "another fragment", "two headers", "no header",
       "nothing", "empty chunk"],
)  # fmt: skip
def test_bad_streams_never_reach_the_rounds(server, store, stream, reason):
  reply = store.Contribute(
    iter(stream), timeout=15, metadata=credentials.metadata(TOKEN)
  )
  assert reply.refusal == reason
  assert reply.message
  assert not server.rounds.contributions
  good = store.Contribute(
    parts(), timeout=15, metadata=credentials.metadata(TOKEN)
  )
  assert good.refusal == ""
  assert len(server.rounds.contributions) == 1


def test_an_unknown_fragment_is_refused(server, store):
  sent = Contribution(0, fakes.header(9), ())
  header = messages.contribution_to(sent, Encoding("float32", None, 4))
  reply = store.Contribute(
    iter([header]), timeout=15, metadata=credentials.metadata(TOKEN)
  )
  assert reply.refusal == "fragment"
  assert server.events.seen[0][1]["fragment"] == 9


def test_a_sender_that_freezes_is_given_up():
  go = threading.Event()

  def freezing():
    stream = parts()
    yield next(stream)
    yield next(stream)
    go.wait(fakes.LIMIT_S)

  with (
    Server(transfer_s=0.2) as server,
    credentials.channel(server.address, TOKEN) as channel,
  ):
    stub = fragments_pb2_grpc.FragmentStoreStub(channel)
    reply = stub.Contribute(
      freezing(), timeout=15, metadata=credentials.metadata(TOKEN)
    )
    assert reply.refusal == "timeout"
    assert not server.service._store._busy
    go.set()


def test_transfers_of_one_learner_are_bounded(server, store):
  go = threading.Event()
  started = []

  def waiting():
    stream = parts()
    yield next(stream)
    started.append(1)
    go.wait(fakes.LIMIT_S)
    yield from stream

  options = {"timeout": 30, "metadata": credentials.metadata(TOKEN)}
  calls = [store.Contribute.future(waiting(), **options) for _ in range(8)]
  busy = server.service._store._busy
  wait_until(lambda: busy[(0, 0)] == 8, "eight transfers")
  assert store.Contribute(parts(), **options).refusal == "busy"
  go.set()
  assert [call.result(fakes.LIMIT_S).refusal for call in calls] == [""] * 8


def test_big_messages_are_not_read(server):
  with credentials.channel(server.address, TOKEN) as channel:
    stub = membership_pb2_grpc.MembershipStub(channel)
    big = membership_pb2.DrainRequest(why="x" * 3_000_000)
    stub.Drain(big, timeout=10, metadata=credentials.metadata(TOKEN))
    assert len(server.rounds.did("drain")[0][1]) == messages.MAX_TEXT
  options = [("grpc.max_send_message_length", -1)]
  with grpc.insecure_channel(
    credentials.target(server.address), options
  ) as channel:
    stub = membership_pb2_grpc.MembershipStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
      stub.Drain(
        membership_pb2.DrainRequest(why="x" * 5_000_000),
        timeout=10,
        metadata=credentials.metadata(TOKEN),
      )
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# --- control streams -------------------------------------------------------


def test_a_silent_stream_is_closed():
  with (
    Server(open_s=0.1) as server,
    credentials.channel(server.address, TOKEN) as channel,
  ):
    stub = membership_pb2_grpc.MembershipStub(channel)
    go = threading.Event()

    def silent():
      go.wait(fakes.LIMIT_S)
      yield from ()

    call = stub.Control(silent(), metadata=credentials.metadata(TOKEN))
    with pytest.raises(grpc.RpcError) as caught:
      next(call)
    go.set()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "said nothing for 0.1 s" in caught.value.details()


def test_a_stream_opens_with_a_heartbeat(server):
  with credentials.channel(server.address, TOKEN) as channel:
    stub = membership_pb2_grpc.MembershipStub(channel)
    first = membership_pb2.LearnerMessage(leave=membership_pb2.Leave())
    call = stub.Control(iter([first]), metadata=credentials.metadata(TOKEN))
    with pytest.raises(grpc.RpcError, match="opens with a heartbeat"):
      next(call)
  assert not server.rounds.calls


def test_the_number_of_learners_is_bounded():
  with Server(max_learners=2) as server:
    wires = [joined(server, i)[0] for i in range(2)]
    third = GrpcLearnerWire(server.address, TOKEN)
    third.hello(fakes.hello(2))
    losses = []
    third.listen(lambda said: None, losses.append)
    wait_until(lambda: losses, "the refusal")
    assert "2 learners already" in losses[0]
    for wire in (*wires, third):
      wire.close()


# --- driving the rounds ----------------------------------------------------


def test_merges_run_one_at_a_time_beside_the_loop(server):
  wire, losses = joined(server)
  jobs = [FakeJob(), FakeJob()]
  server.on_loop(lambda: server.rounds.jobs.extend(jobs))
  wait_until(lambda: jobs[0].thread, "the first merge")
  beats = len(server.rounds.heartbeats)
  wait_until(
    lambda: len(server.rounds.heartbeats) > beats + 3,
    "heartbeats while a merge runs",
  )
  assert jobs[0].thread.startswith("merge")
  assert not jobs[1].thread
  jobs[0].go.set()
  wait_until(lambda: jobs[1].thread, "the second merge")
  assert server.rounds.merged_jobs == jobs[:1]
  jobs[1].go.set()
  wait_until(lambda: server.rounds.merged_jobs == jobs, "both merges")
  third = FakeJob()
  third.go.set()
  server.on_loop(lambda: server.rounds.jobs.append(third))
  wait_until(lambda: server.rounds.merged_jobs[2:] == [third], "a third")
  wire.close()
  assert not losses


def test_a_failed_merge_ends_the_service(server):
  class Broken(FakeJob):
    def run(self):
      raise ZeroDivisionError("no weights")

  server.on_loop(lambda: server.rounds.jobs.append(Broken()))
  with pytest.raises(ZeroDivisionError, match="no weights"):
    server.run(server.service.finished())


def test_a_tick_comes_when_it_is_due(server):
  def soon():
    server.rounds.due = time.monotonic() + 0.05

  ticks = server.rounds.ticks
  server.on_loop(soon)
  wait_until(lambda: server.rounds.did("due"), "the tick")
  wait_until(lambda: server.rounds.due == float("inf"), "quiet")
  assert server.rounds.ticks < ticks + 20, "it spins"


def test_after_the_end_it_waits_for_the_learners_to_hear(server):
  wire, losses = joined(server)

  def end():
    server.rounds.ended = True
    server.rounds.phase = Phase.ENDED
    server.rounds.generation += 1

  server.on_loop(end)
  waiting = threading.Thread(
    target=lambda: server.run(server.service.finished())
  )
  waiting.start()
  beats = len(server.rounds.heartbeats)
  wait_until(lambda: len(server.rounds.heartbeats) > beats + 2, "heartbeats")
  assert waiting.is_alive()
  wire.leave()
  waiting.join(fakes.LIMIT_S)
  assert not waiting.is_alive()
  assert not losses


def test_a_learner_that_never_leaves_is_not_waited_for():
  with Server(linger_s=0.1) as server:
    wire, _ = joined(server)
    server.on_loop(lambda: setattr(server.rounds, "ended", True))
    server.run(server.service.finished())
    wire.close()


def test_a_run_that_is_handed_over_is_not_waited_for():
  with Server(linger_s=600) as server:
    wire, _ = joined(server)
    server.on_loop(server.service.hand_over)
    server.run(server.service.finished())
    assert server.rounds.did("hand_over")
    wire.close()


def test_serve_publishes_and_returns_the_traffic():
  rounds, seen = FakeRounds(), []

  def started(address, service):
    seen.append(address)
    rounds.ended = True

  traffic = asyncio.run(
    asyncio.wait_for(
      serve(rounds, Address("127.0.0.1", 0), TOKEN, started=started), 20
    )
  )
  assert seen[0].port > 0
  assert traffic.bytes_up == 0


# --- the operator ----------------------------------------------------------


def test_status_drain_and_expect(server):
  wire, _ = joined(server)
  wire.report(fakes.report(4))
  wait_until(lambda: server.rounds.reports, "the report")
  with AdminClient(server.address, TOKEN) as admin:
    status = admin.status()
    assert (status.run_id, status.phase) == ("run", Phase.TRAINING)
    (learner,) = status.learners
    assert (learner.learner_id, learner.holder) == (0, "here:1")
    assert (learner.step, learner.tokens) == (4, 40)
    assert 0 <= learner.silent_s < 60
    assert admin.drain("enough") is Phase.DRAINING
    assert server.rounds.did("drain") == [("drain", "enough")]
    admin.expect(1, 30.0)
    assert server.rounds.did("expect") == [("expect", 1, 30.0)]
    with pytest.raises(Refused, match="limit"):
      admin.expect(1, -1)
  wire.close()


def test_an_operator_is_told_which_syncer_is_not_there():
  with Server() as server:
    address = server.address
  with (
    AdminClient(address, TOKEN, limit_s=5) as admin,
    pytest.raises(Unreachable, match=str(address)),
  ):
    admin.status()
