"""A learner and its syncer over real gRPC on loopback."""

import dataclasses
import threading
import time
from concurrent import futures

import grpc
import numpy as np
import pytest

from decoupled.errors import Refused, Unreachable
from decoupled.link.wire import LearnerWire
from decoupled.types import NO_VERSION, Contribution, Phase, Version
from decoupled.wire import codecs, credentials, messages
from decoupled.wire.address import Address
from decoupled.wire.client import GrpcLearnerWire
from decoupled.wire.stream import Outbox
from tests.wire import fakes
from tests.wire.fakes import TOKEN, FakeRounds, Server, wait_until
from tests.wire.relay import Relay


class Listener:
  """Keeps what the wire says."""

  def __init__(self):
    self.announcements = []
    self.losses = []
    self.hold = threading.Event()
    self.hold.set()

  def announced(self, said):
    self.announcements.append(said)
    assert self.hold.wait(fakes.LIMIT_S)

  def lost(self, why):
    self.losses.append(why)

  def newest(self):
    return self.announcements[-1] if self.announcements else None


@pytest.fixture
def server():
  with Server() as running:
    yield running


@pytest.fixture
def connect():
  """Makes wires, and closes them."""
  made = []

  def make(address, token=TOKEN, **options):
    wire: LearnerWire = GrpcLearnerWire(address, token, **options)
    made.append(wire)
    return wire

  yield make
  for wire in made:
    wire.close()


def join(wire, learner_id=0, **changes):
  """Says hello and listens."""
  listener = Listener()
  welcome = wire.hello(fakes.hello(learner_id, **changes))
  wire.listen(listener.announced, listener.lost)
  wait_until(lambda: listener.announcements, "the first announcement")
  return welcome, listener


# --- joining ---------------------------------------------------------------


def test_hello_is_answered_with_the_run(server, connect):
  wire = connect(str(server.address))
  assert wire.peer == str(server.address)
  hello = fakes.hello(previous=7)
  welcome = wire.hello(hello)
  assert server.rounds.did("hello") == [("hello", hello)]
  assert welcome.manifest == fakes.MANIFEST
  assert (welcome.incarnation, welcome.position) == (1, (3, 4))


def test_the_contract_is_there_for_who_has_nothing_to_show(server, connect):
  run = connect(server.address).contract("here:1")
  assert run.run_id == "run"
  assert run.phase is Phase.TRAINING
  assert dict(run.lines) == {"Exchange.H": "24", "run.seed": "7"}
  assert not server.rounds.calls


def test_a_second_claim_is_refused_naming_the_first(server, connect):
  connect(server.address).hello(fakes.hello())
  with pytest.raises(Refused, match="held by here:1") as caught:
    connect(server.address).hello(fakes.hello())
  assert caught.value.reason == "claimed"


def test_a_hello_whose_answer_is_lost_is_said_again(server, connect):
  grant, heard = server.rounds.hello, []

  def cut_once(now, hello):
    heard.append(hello)
    if len(heard) == 1:
      relay.cut()
    server.rounds.members.clear()  # as the syncer does for the same holder
    return grant(now, hello)

  server.rounds.hello = cut_once
  with Relay(server.address) as relay:
    welcome = connect(relay.address, connect_s=fakes.LIMIT_S).hello(
      fakes.hello()
    )
  assert welcome.incarnation == len(heard) == 2


def test_another_protocol_is_refused_by_name(server, connect):
  with pytest.raises(Refused, match="wire protocol 2, this syncer 1") as caught:
    connect(server.address).hello(fakes.hello(protocol=2))
  assert caught.value.reason == "protocol"
  assert not server.rounds.calls


def test_a_malformed_hello_is_refused(server, connect):
  with pytest.raises(Refused, match="hosts") as caught:
    connect(server.address).hello(fakes.hello(hosts=0))
  assert caught.value.reason == "malformed"
  assert not server.rounds.calls


def test_without_the_token_nothing_happens(server, connect):
  wire = connect(server.address, "another-token-0123456789")
  contribution = Contribution(0, fakes.header(0), fakes.arrays(0))
  honest = connect(server.address)
  welcome = honest.hello(fakes.hello())
  wire._welcome = welcome
  before = list(server.rounds.calls)
  for call in (
    lambda: wire.hello(fakes.hello(1)),
    lambda: wire.contribute(contribution, None),
    lambda: wire.fetch(0, NO_VERSION, None),
  ):
    with pytest.raises(Refused, match="run token") as caught:
      call()
    assert caught.value.reason == "unauthenticated"
  listener = Listener()
  wire.listen(listener.announced, listener.lost)
  wait_until(lambda: listener.losses, "the refusal of the control stream")
  assert "run token" in listener.losses[0]
  assert server.rounds.calls == before
  assert not server.rounds.contributions
  assert not server.rounds.heartbeats


def test_nobody_there_is_said_after_the_limit(connect):
  with Server() as server:
    address = server.address
  wire = connect(address, connect_s=0.4)
  with pytest.raises(Unreachable, match=str(address)):
    wire.hello(fakes.hello())


def test_hello_waits_for_a_syncer_that_is_about_to_start(connect):
  with Server() as server:
    address = server.address
  wire = connect(address, connect_s=fakes.LIMIT_S)
  welcomes = []
  thread = threading.Thread(
    target=lambda: welcomes.append(wire.hello(fakes.hello()))
  )
  thread.start()
  with Server(port=address.port):
    thread.join(fakes.LIMIT_S)
    assert len(welcomes) == 1


def test_something_else_at_the_address_is_named(connect):

  other = grpc.server(futures.ThreadPoolExecutor(1))
  port = other.add_insecure_port("127.0.0.1:0")
  other.start()
  try:
    wire = connect(Address("127.0.0.1", port))
    with pytest.raises(Refused, match=r"does not speak decoupled\.v1"):
      wire.hello(fakes.hello())
  finally:
    other.stop(0).wait()


# --- control ---------------------------------------------------------------


def test_heartbeats_go_on_while_the_main_thread_is_busy(server, connect):
  wire = connect(server.address)
  join(wire)
  seen = len(server.rounds.heartbeats)
  deadline = time.monotonic() + fakes.LIMIT_S
  while len(server.rounds.heartbeats) < seen + 8:  # never lets go willingly
    assert time.monotonic() < deadline
  beats = server.rounds.heartbeats
  assert all(beat.incarnation == 1 for beat in beats)
  times = [beat.sent_at_s for beat in beats]
  assert times == sorted(times)


def test_reports_arrive_and_no_step_is_lost(server, connect):
  wire = connect(server.address)
  join(wire)
  for seq in range(1, 301):
    wire.report(fakes.report(seq))
  reports = server.rounds.reports
  wait_until(lambda: reports and reports[-1].seq == 300, "the last report")
  ends = [end for report in reports for end in report.step_ends_s]
  assert ends == [float(seq) for seq in range(1, 301)]


def test_waiting_reports_are_merged_within_bounds():
  outbox = Outbox()
  for seq in range(1, 201):
    outbox.put(fakes.report(seq))
  assert outbox._report.seq == 200
  assert outbox._report.step_ends_s == tuple(float(s) for s in range(1, 201))
  many = tuple(float(i) for i in range(messages.MAX_STEP_ENDS))
  outbox.put(fakes.report(201, step_ends_s=many))
  assert outbox._report.step_ends_s == many


def test_reports_of_an_older_incarnation_stay_but_keep_their_times():
  outbox = Outbox()
  outbox.put(fakes.report(1, incarnation=1))
  with Server() as server:
    wire = GrpcLearnerWire(server.address, TOKEN)
    wire._outbox = outbox
    server.rounds.incarnations = 1
    welcome, _ = join(wire)
    assert welcome.incarnation == 2
    beats = server.rounds.heartbeats
    wait_until(lambda: len(beats) > 2, "heartbeats")
    assert not server.rounds.reports
    wire.report(fakes.report(2, incarnation=2))
    wait_until(lambda: server.rounds.reports, "the report")
    assert server.rounds.reports[0].step_ends_s == (1.0, 2.0)
    wire.close()


def bump(rounds):
  rounds.generation += 1


def test_a_slow_listener_gets_the_newest_only(server, connect):
  wire = connect(server.address)
  _, listener = join(wire)
  listener.hold.clear()
  server.on_loop(lambda: bump(server.rounds))
  wait_until(lambda: len(listener.announcements) > 1, "a held announcement")
  for _ in range(200):
    server.on_loop(lambda: bump(server.rounds))
  last = server.rounds.generation
  wait_until(
    lambda: wire._stream._newest and wire._stream._newest.next_round == last,
    "the newest announcement to wait",
  )
  before = len(listener.announcements)
  listener.hold.set()
  wait_until(lambda: listener.newest().next_round == last, "the newest")
  assert len(listener.announcements) == before + 1


def test_a_reader_that_does_not_read_costs_no_backlog(server):
  """The syncer stops writing when a stream's window is full."""
  wire = GrpcLearnerWire(server.address, TOKEN)
  welcome = wire.hello(fakes.hello())
  server.rounds.padding = 4000
  said = wire._outbox.messages(wire, welcome, 0, wire._clock)
  call = wire._open_control(said)
  wait_until(lambda: server.rounds.heartbeats, "the stream")
  for _ in range(1500):
    server.on_loop(lambda: bump(server.rounds))
  last = server.rounds.generation
  written = server.rounds.announced
  assert written < 750, "6 MB were written to somebody who does not read"
  for message in call:
    if message.next_round == last:
      break
  assert server.rounds.announced <= written + 5
  wire._outbox.stop(wire)
  call.cancel()
  wire.close()


def test_a_fenced_learner_is_told_why(server, connect):
  wire = connect(server.address)
  _, listener = join(wire)
  server.rounds.fenced = True
  wait_until(lambda: listener.losses, "the loss")
  assert listener.losses == ["learner 0 has a newer incarnation"]
  assert server.rounds.did("disconnected") == [("disconnected", 0, 1)]


def test_a_member_that_is_gone_is_cut_off_at_the_next_news(server, connect):
  wire = connect(server.address)
  _, listener = join(wire)

  def lapse():
    server.rounds.members.clear()
    bump(server.rounds)

  server.on_loop(lapse)
  wait_until(lambda: listener.losses, "the loss")
  assert "newer incarnation" in listener.losses[0] or (
    "lease ran out" in listener.losses[0]
  )


def test_a_newer_incarnation_ends_the_older_ones_stream(server, connect):
  old, new = connect(server.address), connect(server.address)
  _, first = join(old)
  welcome, second = join(new, previous=1)
  wait_until(lambda: first.losses, "the end of the older stream")
  assert "incarnation 2" in first.losses[0]
  assert welcome.incarnation == 2
  assert not second.losses
  assert not server.rounds.did("disconnected")
  assert [s.incarnation for s in server.service.status().learners] == [2]


@pytest.mark.parametrize(
  "bad", [{"seq": -1}, {"learner_id": 5}, {"versions": (Version(-1, 0),)}]
)
def test_a_malformed_report_ends_the_stream(server, connect, bad):
  wire = connect(server.address)
  _, listener = join(wire)
  wire.report(dataclasses.replace(fakes.report(1), **bad))
  wait_until(lambda: listener.losses, "the loss")
  assert "malformed" in listener.losses[0]
  assert not server.rounds.reports
  assert server.rounds.did("disconnected")


# --- leaving and losing ----------------------------------------------------


def test_leaving_is_told_and_is_no_loss(server, connect):
  wire = connect(server.address)
  _, listener = join(wire)
  wire.report(fakes.report(1))
  wire.leave("done")
  assert server.rounds.did("leave") == [("leave", 0, 1)]
  assert [r.seq for r in server.rounds.reports] == [1]
  wire.close()
  assert not listener.losses
  assert not server.rounds.did("disconnected")


def test_closing_without_leaving_is_a_death(server, connect):
  wire = connect(server.address)
  _, listener = join(wire)
  wire.close()
  wait_until(lambda: server.rounds.did("disconnected"), "the disconnection")
  assert not listener.losses
  assert not server.rounds.did("leave")


def test_a_cut_connection_is_noticed_on_both_sides(server, connect):
  with Relay(server.address) as relay:
    wire = connect(relay.address)
    _, listener = join(wire)
    relay.cut()
    wait_until(lambda: listener.losses, "the loss")
    wait_until(lambda: server.rounds.did("disconnected"), "the disconnection")
    assert str(relay.address) in listener.losses[0]
    welcome, again = join(wire, previous=1)
    assert welcome.incarnation == 2
    wire.report(fakes.report(1, incarnation=2))
    wait_until(lambda: server.rounds.reports, "a report after the loss")
    assert wire.fetch(0, NO_VERSION, None).version == Version(1, 0)
    assert len(listener.losses) == 1
    assert not again.losses


def test_a_network_that_swallows_everything_is_noticed(monkeypatch, connect):
  quick = {
    "grpc.keepalive_time_ms": 200,
    "grpc.http2.ping_timeout_ms": 500,
    "grpc.http2.min_ping_interval_without_data_ms": 10,
  }
  for name in ("CLIENT_OPTIONS", "SERVER_OPTIONS"):
    options = getattr(credentials, name)
    changed = tuple((key, quick.get(key, value)) for key, value in options)
    assert changed != options
    monkeypatch.setattr(credentials, name, changed)
  with Server() as server, Relay(server.address) as relay:
    wire = connect(relay.address)
    _, listener = join(wire)
    relay.freeze()
    wait_until(lambda: listener.losses, "the loss")
    assert "ping timeout" in listener.losses[0]


def test_a_wire_is_usable_with_the_next_syncer(connect):
  with Server() as server:
    wire = connect(server.address)
    _, listener = join(wire)
  wait_until(lambda: listener.losses, "the loss")
  with pytest.raises(Unreachable):
    wire.fetch(0, NO_VERSION, None)
  with Server(port=server.address.port) as second:
    join(wire)
    merged = wire.fetch(0, NO_VERSION, None)
    np.testing.assert_array_equal(merged.arrays[0], fakes.arrays(0)[0])
    assert second.rounds.did("hello")


# --- bulk ------------------------------------------------------------------


def test_control_and_bulk_use_connections_of_their_own(server, connect):
  with Relay(server.address) as relay:
    wire = connect(relay.address)
    join(wire)
    wire.fetch(0, NO_VERSION, None)
    wire.contribute(Contribution(0, fakes.header(1), fakes.arrays(1)), None)
    assert len({pair.port for pair in relay.pairs}) == 2
    control, bulk = sorted(pair.bytes_seen for pair in relay.pairs)
    assert bulk > 7_000_000
    assert control < 100_000


def test_fetching_several_megabytes(server, connect):
  wire = connect(server.address)
  join(wire)
  merged = wire.fetch(1, NO_VERSION, None)
  assert sum(a.nbytes for a in merged.arrays) == 5_600_000
  expected = server.rounds.fetch(0, 0, 1, 1)
  assert dataclasses.replace(merged, arrays=()) == dataclasses.replace(
    expected, arrays=()
  )
  for ours, theirs in zip(merged.arrays, expected.arrays, strict=True):
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs)
  assert server.service.traffic.bytes_down >= 5_600_000


@pytest.mark.parametrize("accepted", ["", "base"])
def test_contributing_several_megabytes(server, connect, accepted):
  wire = connect(server.address)
  join(wire)
  server.rounds.refusal = accepted
  sent = Contribution(0, fakes.header(0), fakes.arrays(0, seed=5))
  assert wire.contribute(sent, None) == accepted
  (got,) = server.rounds.contributions
  assert got.header == sent.header
  for ours, theirs in zip(got.arrays, sent.arrays, strict=True):
    np.testing.assert_array_equal(ours, theirs)
  assert server.service.traffic.bytes_up >= 2_000_000


def test_many_transfers_at_once(server, connect):
  wire = connect(server.address)
  join(wire)
  results = []

  def transfer(fragment):
    sent = Contribution(0, fakes.header(fragment), fakes.arrays(fragment))
    results.append(wire.contribute(sent, None))
    results.append(wire.fetch(fragment, NO_VERSION, None).fragment)

  threads = [threading.Thread(target=transfer, args=(i % 2,)) for i in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(fakes.LIMIT_S)
  assert sorted(map(str, results)) == sorted(["", "0", "", "1"] * 3)


def test_what_the_syncer_does_not_have_is_refused(server, connect):
  wire = connect(server.address)
  join(wire)
  with pytest.raises(Refused, match="no fragment 7") as caught:
    wire.fetch(7, NO_VERSION, None)
  assert caught.value.reason == "fragment"


def test_below_float32_deltas_go_both_ways(connect):
  rounds = FakeRounds("bfloat16")
  with Server(rounds) as server:
    wire = connect(server.address)
    join(wire)
    first = wire.fetch(0, NO_VERSION, None)
    moved = tuple(a + np.float32(0.01) for a in first.arrays)
    server.on_loop(lambda: rounds.advance(0, moved))
    before = server.service.traffic.bytes_down
    second = wire.fetch(0, first.version, first.arrays)
    assert server.service.traffic.bytes_down - before < 1_200_000
    assert second.version == Version(1, 1)
    for ours, theirs in zip(second.arrays, rounds.current[0], strict=True):
      np.testing.assert_array_equal(ours, theirs)

    before = server.service.traffic.bytes_up
    trained = tuple(a * np.float32(1.01) for a in second.arrays)
    sent = Contribution(0, fakes.header(0, second.version), trained)
    assert wire.contribute(sent, second.arrays) == ""
    assert server.service.traffic.bytes_up - before < 1_200_000
    expected = codecs.decode(
      "bfloat16",
      codecs.encode("bfloat16", trained, second.arrays),
      second.arrays,
    )
    for ours, theirs in zip(
      rounds.contributions[0].arrays, expected, strict=True
    ):
      np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("why", ["missed a version", "lost its base"])
def test_who_lacks_the_base_gets_float32_with_the_same_bits(connect, why):
  rounds = FakeRounds("bfloat16")
  with Server(rounds) as server:
    wire = connect(server.address)
    join(wire)
    first = wire.fetch(0, NO_VERSION, None)
    for _ in range(2 if why == "missed a version" else 1):
      moved = tuple(a + np.float32(0.01) for a in rounds.current[0])
      server.on_loop(lambda to=moved: rounds.advance(0, to))
    before = server.service.traffic.bytes_down
    base = first.arrays if why == "missed a version" else None
    newest = wire.fetch(0, first.version, base)
    assert server.service.traffic.bytes_down - before >= 2_000_000
    for ours, theirs in zip(newest.arrays, rounds.current[0], strict=True):
      np.testing.assert_array_equal(ours, theirs)


def test_a_delta_against_what_is_no_longer_there_is_refused(connect):
  rounds = FakeRounds("bfloat16")
  with Server(rounds) as server:
    wire = connect(server.address)
    join(wire)
    base = rounds.current[0]
    sent = Contribution(0, fakes.header(0, Version(1, 0)), base)
    server.on_loop(lambda: rounds.advance(0, base))
    assert wire.contribute(sent, base) == "base"
    assert not rounds.contributions
    ((kind, fields),) = server.events.seen
    assert (kind, fields["reason"], fields["tokens"]) == ("refused", "base",
                                                          300)  # fmt: skip


def test_phase_and_versions_are_announced(server, connect):
  wire = connect(server.address)
  _, listener = join(wire)

  def end():
    server.rounds.phase = Phase.ENDED
    bump(server.rounds)

  server.on_loop(end)
  wait_until(lambda: listener.newest().phase is Phase.ENDED, "the end")
