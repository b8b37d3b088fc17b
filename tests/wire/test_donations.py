"""Optimizer state from a donor through the real syncer to a joiner."""

import contextlib
import dataclasses
import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from decoupled.algorithm.policy import Exchange, Outer
from decoupled.errors import Refused, Unreachable
from decoupled.learner.copies import Copies, compile_copy
from decoupled.learner.donor import Donor, leaves_of
from decoupled.learner.loop import Trained
from decoupled.learner.origin import Search
from decoupled.learner.step import TrainState
from decoupled.syncer.rounds import Plan, Rounds
from decoupled.syncer.settings import Limits
from decoupled.types import StateHeader
from decoupled.wire import messages
from decoupled.wire.client import GrpcLearnerWire
from decoupled.wire.credentials import CHUNK_BYTES
from decoupled.wire.proto.decoupled.v1 import donations_pb2
from tests.wire import fakes
from tests.wire.fakes import LIMIT_S, TOKEN, Events, Server, wait_until

LIMITS = Limits(lease_s=20.0, transfer_s=40.0, drain_s=40.0)


def make_rounds(events):
  return Rounds(
    Plan("run", learners=1),
    Exchange(H=2, P=2, tau=1),
    Outer(),
    LIMITS,
    1,
    events,
  )


@pytest.fixture
def syncer():
  events = Events()
  with Server(make_rounds(events), transfer_s=LIMITS.transfer_s) as running:
    running.seen = events.seen
    yield running


def mesh(devices):
  return Mesh(np.array(jax.devices()[:devices]), ("fsdp",))


def state_on(devices, seed=0):
  """Moments sharded over the devices, a counter on all of them."""
  rng = np.random.default_rng(seed)
  rows = NamedSharding(mesh(devices), P("fsdp"))
  everywhere = NamedSharding(mesh(devices), P())
  moment = rng.standard_normal((512, 640)).astype(np.float32)  # 2.5 chunks
  return {
    "count": jax.device_put(np.int32(41), everywhere),
    "half": jax.device_put(moment[:, :8].astype("bfloat16"), rows),
    "mu": jax.device_put(moment, rows),
    "nu": jax.device_put(moment**2, everywhere),
  }


def specs_of(state):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    state,
  )


class Learner:
  """A learner's connection, and a loop of one boundary after the other."""

  def __init__(self, syncer, learner_id, state=None, step=7):
    self.learner_id = learner_id
    self.wire = GrpcLearnerWire(syncer.address, TOKEN)
    hello = fakes.hello(learner_id, holder=f"h:{learner_id}", contract=())
    self.welcome = self.wire.hello(
      dataclasses.replace(hello, gives_state=state is not None)
    )
    self.welcome = dataclasses.replace(self.welcome, has_history=True)
    self.said, self.losses = [], []
    self.wire.listen(self.said.append, self.losses.append)
    if state is None:
      return
    self.give = self.wire.give_state
    copies = Copies(compile_copy(specs_of(state)))
    self.donor = Donor(self, learner_id, self._give, copies, state)
    self.copies = copies
    self.now = Trained(TrainState(None, state, None), 100 + step, (0, 0), step)
    report = fakes.report(step, self.welcome.incarnation)
    self.wire.report(dataclasses.replace(report, learner_id=learner_id))

    def stepped():
      member = syncer.rounds.membership.live.get(learner_id)
      return member is not None and member.stepped

    wait_until(stepped, "the syncer to hear of a step")

  def _give(self, header, arrays):
    self.give(header, arrays)

  @property
  def donation(self):
    asked = self.said[-1].donate if self.said else 0
    return (self.welcome.incarnation, asked) if asked else None

  def search(self, tmp_path, specs):
    return Search(self.wire.take_state, self.welcome, str(tmp_path), specs)

  def close(self):
    self.wire.close()


@pytest.fixture
def learner(syncer):
  made = []

  def make(*arguments, **options):
    made.append(Learner(syncer, *arguments, **options))
    return made[-1]

  yield make
  for one in made:
    one.close()


def drive(search, *donors):
  """Lets donors pass boundaries until the search is over."""

  def over():
    for one in donors:
      one.donor.after_step(one.now)
    return search.done()

  wait_until(over, "the end of the search")
  return search.result()


def donations(syncer):
  return [fields for kind, fields in syncer.seen if kind == "donation"]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_state_on_four_devices_is_the_same_on_fewer(
  syncer, learner, tmp_path, devices
):
  given = state_on(4)
  donor, joiner = learner(0, given), learner(1)
  wanted = specs_of(state_on(devices, seed=1))
  found = drive(joiner.search(tmp_path, wanted), donor)
  assert (found.source, found.donor, found.schedule_step) == ("donor", 0, 107)
  for name, leaf in found.opt_state.items():
    assert leaf.sharding == wanted[name].sharding, name
    assert leaf.dtype == given[name].dtype
    assert np.asarray(leaf).tobytes() == np.asarray(given[name]).tobytes()
  wait_until(lambda: donations(syncer), "the syncer's event")
  [event] = donations(syncer)
  assert (event["learner"], event["donor"], event["ok"]) == (1, 0, True)
  assert event["bytes"] == sum(leaf.nbytes for leaf in given.values())
  wait_until(lambda: donor.copies._held is None, "the copy to be freed")
  wait_until(lambda: donor.donation is None, "the request to be withdrawn")


def test_a_state_that_does_not_fit_is_refused_with_both_sides(
  syncer, learner, tmp_path, caplog
):
  donor, joiner = learner(0, state_on(1)), learner(1)
  wanted = specs_of(state_on(1))
  wanted["mu"] = jax.ShapeDtypeStruct((256, 640), np.float32)
  found = drive(joiner.search(tmp_path, wanted), donor)
  assert found.source == "fresh"
  assert "learner 0 has mu float32[512,640]" in caplog.text
  assert "this learner has mu float32[256,640]" in caplog.text
  assert "fresh optimizer moments" in caplog.text
  assert not donor.losses
  assert not joiner.losses


@pytest.mark.parametrize("spoil", ["nan", "damaged", "short"])
def test_what_is_bad_is_refused_and_the_next_donor_gives(
  syncer, learner, tmp_path, caplog, spoil, monkeypatch
):
  state = state_on(1)
  good, joiner = learner(0, state, step=3), learner(1)
  bad = learner(2, state, step=9)
  real = bad.give
  said = {
    "nan": "not finite",
    "damaged": "CRC-32",
    "short": "ended after",
  }[spoil]

  def give(header, arrays):
    whole = [array.copy() for array in arrays]
    if spoil == "nan":
      whole[2][300, 7] = np.nan
    elif spoil == "short":
      whole = whole[:-1]
    if spoil != "damaged":
      real(header, whole)
      return
    from decoupled.wire import chunks

    split = chunks.split

    def damaged(payload, size):
      for i, piece in enumerate(split(payload, size)):
        yield piece._replace(data=b"x" + piece.data[1:]) if i == 1 else piece

    with monkeypatch.context() as patch:
      patch.setattr(chunks, "split", damaged)
      real(header, whole)

  bad.give = give
  found = drive(joiner.search(tmp_path, specs_of(state)), good, bad)
  assert (found.source, found.donor) == ("donor", 0)
  assert said in caplog.text
  wait_until(lambda: len(donations(syncer)) == 2, "both events")
  failed, given = donations(syncer)
  assert (failed["donor"], given["donor"], given["ok"]) == (2, 0, True)
  if spoil != "nan":  # the syncer itself passes on no damage
    assert said in failed["error"]


def test_a_donor_that_dies_half_way_is_followed_by_the_next(
  syncer, learner, tmp_path, caplog
):
  state = state_on(1)
  good, joiner = learner(0, state, step=3), learner(1)
  dying = learner(2, state, step=9)
  real, half = dying.give, threading.Event()

  def give(header, arrays):
    def some():
      first = iter(arrays)
      yield next(first)
      yield np.zeros(2 * CHUNK_BYTES, np.uint8)
      half.set()
      assert threading.Event().wait(LIMIT_S) or True
      yield from first

    with contextlib.suppress(Refused, Unreachable):
      real(header, some())

  dying.give = give
  search = joiner.search(tmp_path, specs_of(state))
  dying_over = [False]

  def over():
    for one in (good, dying):
      one.donor.after_step(one.now)
    if half.is_set() and not dying_over[0]:
      dying_over[0] = True
      dying.close()
    return search.done()

  wait_until(over, "the next donor")
  found = search.result()
  assert (found.source, found.donor) == ("donor", 0)
  [failed] = [r.message for r in caplog.records if "asking on" in r.message]
  assert "learner 2" in failed


def test_a_donor_that_never_answers_is_given_up_and_nobody_is_left(
  syncer, learner, tmp_path, caplog
):
  state = state_on(1)
  learner(0, state)  # passes no boundary
  joiner = learner(1)
  search = joiner.search(tmp_path, specs_of(state))
  donors = syncer.rounds.donors
  wait_until(lambda: donors.asked_of(0), "the request")
  syncer.on_loop(lambda: donors.tick(donors.wake_at()))  # the limit passes
  wait_until(search.done, "the end of the search")
  assert search.result().source == "fresh"
  assert "learner 0 has moved nothing" in caplog.text
  assert "found no donor and has no checkpoint" in caplog.text


def test_the_syncer_holds_a_few_chunks_however_slow_the_joiner(syncer, learner):
  """A joiner that does not read stops its donor, not the syncer."""
  donor, joiner = learner(0, state_on(1)), learner(1)
  sent, size = [0], 64  # chunks; far more than windows and pipe hold

  def give(header, arrays):
    del arrays

    def chunks():
      for _ in range(size):
        sent[0] += 1
        yield np.zeros(CHUNK_BYTES, np.uint8)

    leaf = dataclasses.replace(
      header.leaves[2], shape=(size * CHUNK_BYTES,), dtype="uint8"
    )
    real(dataclasses.replace(header, leaves=(leaf,)), chunks())

  real, donor.give = donor.give, give
  thread_over = threading.Event()
  got = []

  def read():
    with joiner.wire.take_state() as incoming:
      assert thread_over.wait(LIMIT_S)
      got.extend(incoming.arrays())

  reader = threading.Thread(target=read)
  reader.start()

  def asked():
    donor.donor.after_step(donor.now)
    return sent[0] > 4

  wait_until(asked, "the first chunks")
  relay = syncer.service._relay
  steady = [-1, 0]

  def stands_still():
    steady[1] = steady[1] + 1 if steady[0] == sent[0] else 0
    steady[0] = sent[0]
    return steady[1] > 100

  wait_until(stands_still, "the donor to be slowed")
  assert sent[0] < size
  [pipe] = relay._pipes.values()
  assert len(pipe._parts) <= 4
  thread_over.set()
  reader.join(LIMIT_S)
  assert sum(array.nbytes for array in got) == size * CHUNK_BYTES


def test_a_stray_state_is_refused(syncer, learner):
  donor = learner(0, state_on(1))
  incarnation = donor.welcome.incarnation
  leaves = leaves_of(donor.now.state.opt_state)
  for number, owner, reason in (
    (5, incarnation, "late"),
    (5, incarnation + 1, "fenced"),
  ):
    header = StateHeader(number, 0, owner, 1, 1, leaves)
    with pytest.raises(Refused) as caught:
      donor.wire.give_state(header, [])
    assert caught.value.reason == reason


@pytest.mark.parametrize(
  "leaf",
  [
    donations_pb2.Leaf(path="a", shape=[-1], dtype="float32"),
    donations_pb2.Leaf(path="a", shape=[1] * 40, dtype="float32"),
    donations_pb2.Leaf(path="a" * 5000, shape=[1], dtype="float32"),
    donations_pb2.Leaf(path="a", shape=[1], dtype="float33"),
  ],
)
def test_a_malformed_header_gets_no_further(leaf):
  header = donations_pb2.StateHeader(leaves=[leaf])
  with pytest.raises(Refused) as caught:
    messages.state_header_from(donations_pb2.StateChunk(header=header))
  assert caught.value.reason == "malformed"


def test_a_header_comes_out_as_it_went_in():
  leaves = leaves_of(state_on(2))
  header = StateHeader(3, 2, 5, 11, 12, leaves)
  assert messages.state_header_from(messages.state_header_to(header)) == header
  assert leaves[1].dtype == "bfloat16"
