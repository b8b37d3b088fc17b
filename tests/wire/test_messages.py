"""What goes in comes out; what is malformed never gets further."""

import contextlib
import math

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from decoupled.errors import Refused
from decoupled.types import (
  NO_VERSION,
  Announcement,
  Claim,
  Contribution,
  CopyHeader,
  CopyId,
  Heartbeat,
  Hello,
  Manifest,
  MergedFragment,
  OpenRound,
  Phase,
  Report,
  Role,
  Stage,
  TensorSpec,
  Unit,
  Version,
  Welcome,
)
from decoupled.wire import messages
from decoupled.wire.messages import Encoding
from decoupled.wire.proto.decoupled.v1 import fragments_pb2, membership_pb2
from decoupled.wire.status import JobStatus, LearnerStatus

count = st.integers(0, 2**50)
small = st.integers(0, 1000)
seconds = st.floats(0, 1e6)
text = st.text(max_size=20)
version = st.builds(Version, count, st.integers(-1, 2**50))
copy = st.builds(CopyId, count, count, count, small, small)
header = st.builds(CopyHeader, copy, version, count, count, count)


def tuples(of):
  return st.lists(of, max_size=4).map(tuple)


tensor = st.builds(
  TensorSpec,
  name=text,
  shape=st.lists(small, min_size=1, max_size=4).map(tuple),
  dtype=st.sampled_from(["float32", "bfloat16"]),
  role=st.sampled_from(Role),
  stacked=st.booleans(),
)
tensors = st.lists(tensor, max_size=4, unique_by=lambda t: t.name).map(tuple)
contract = tuples(st.tuples(text, text))
learner = st.integers(0, messages.MAX_LEARNERS)
claim = st.builds(Claim, count, count, st.booleans())


@given(
  st.builds(
    Hello,
    learner_id=st.integers(-1, 1000),
    holder=text,
    run_id=text,
    tensors=tensors,
    contract=contract,
    hosts=st.integers(1, 64),
    previous=count,
    gives_state=st.booleans(),
  )
)
def test_hello(hello):
  assert messages.hello_from(messages.hello_to(hello)) == hello


@given(
  st.builds(
    Report,
    learner,
    count,
    count,
    st.sampled_from(Stage),
    count,
    count,
    count,
    tuples(header),
    tuples(version),
    st.tuples(count, count),
    seconds,
    tuples(seconds),
    st.floats(allow_nan=False),
    tuples(claim),
    small,
    count,
    count,
    count,
  )
)
def test_report(report):
  assert messages.report_from(messages.report_to(report)) == report


def test_a_loss_that_is_not_there_yet_stays_nan():
  message = membership_pb2.Report(
    stage=membership_pb2.STAGE_JOINING, loss=math.nan
  )
  assert math.isnan(messages.report_from(message).loss)


@given(
  st.builds(
    Announcement,
    count,
    count,
    st.sampled_from(Phase),
    tuples(st.builds(OpenRound, version, small, version)),
    count,
    st.one_of(seconds, st.just(math.inf)),
    seconds,
    tuples(version),
    tuples(copy),
    tuples(st.tuples(copy, text)),
    count,
    text,
    count,
    st.none() | tuples(claim),
  )
)
def test_announcement(said):
  assert messages.announcement_from(messages.announcement_to(said)) == said


def test_the_end_of_the_data_is_told_with_the_units():
  said = Announcement(
    1, 1, Phase.TRAINING, (), 1, 0.0, 0.0, (), claims=(), data_ended=True
  )
  assert messages.announcement_from(messages.announcement_to(said)) == said


def test_more_units_than_a_learner_may_hold_are_refused():
  message = membership_pb2.Report(stage=membership_pb2.STAGE_TRAINING)
  message.claims.extend(
    membership_pb2.Claim(place=i) for i in range(messages.MAX_CLAIMS + 1)
  )
  with pytest.raises(Refused, match=r"report\.claims has 257 entries"):
    messages.report_from(message)


@given(st.builds(Heartbeat, learner, count, seconds))
def test_heartbeat(beat):
  assert messages.heartbeat_from(messages.heartbeat_to(beat)) == beat


def manifest():
  return Manifest(
    (
      TensorSpec("a", (3, 4), "float32", Role.EMBEDDING),
      TensorSpec("b", (2, 5), "float32", stacked=True),
    ),
    ((Unit("b", 0), Unit("a")), (Unit("b", 1),)),
    ("", "[::1]:4000"),
  )


def test_welcome():
  welcome = Welcome(
    3, 4, "run", 5, manifest(), (("k", "v"),), 5.0, 1.0, (6, 7), True
  )
  assert messages.welcome_from(messages.welcome_to(welcome)) == welcome


@given(
  learner,
  header,
  st.sampled_from([None, True]),
  count,
)
def test_contribution(learner_id, its_header, delta, size):
  sent = Contribution(learner_id, its_header, ())
  encoding = Encoding("bfloat16", delta and its_header.base, size)
  message = messages.contribution_to(sent, encoding)
  assert messages.contribution_from(message) == (sent, encoding)


@given(small, version, st.one_of(st.none(), copy), count, st.booleans())
def test_fragment(fragment, its_version, included, step, restored):
  sent = MergedFragment(
    fragment, its_version, (), included, step, restored, NO_VERSION
  )
  encoding = Encoding("float32", None, 12)
  message = messages.fragment_to(sent, encoding)
  assert messages.fragment_from(message) == (sent, encoding)


def test_status():
  one = LearnerStatus(0, 2, "here:1", 1, Stage.PAUSED, 5, 50, 0.25)
  status = JobStatus("run", Phase.DRAINING, 7, 8, (one,))
  assert messages.status_from(messages.status_to(status)) == status


def hello_with(**fields):
  return membership_pb2.HelloRequest(**{"hosts": 1, **fields})


def tensors_named(*names):
  return [
    membership_pb2.TensorSpec(
      name=name, shape=[2], dtype="float32", role=membership_pb2.ROLE_WEIGHT
    )
    for name in names
  ]


@pytest.mark.parametrize(
  ("message", "says"),
  [
    (hello_with(learner_id=-2), "learner_id"),
    (hello_with(learner_id=2**30), "learner_id"),
    (hello_with(hosts=0), "hosts"),
    (hello_with(previous=-1), "previous"),
    (hello_with(holder="x" * 5000), "holder"),
    (hello_with(tensors=tensors_named("a", "a")), "one name"),
    (hello_with(tensors=[membership_pb2.TensorSpec(role=99)]), "role"),
    (hello_with(tensors=[membership_pb2.TensorSpec(shape=[-1], role=1)]),
     "shape"),
    (hello_with(tensors=[membership_pb2.TensorSpec(shape=[1] * 99)]), "shape"),
    (hello_with(tensors=[membership_pb2.TensorSpec(role=1, stacked=True)]),
     "stacked"),
    (hello_with(contract=[membership_pb2.ContractLine()] * 5000), "contract"),
  ],
)  # fmt: skip
def test_malformed_hellos(message, says):
  with pytest.raises(Refused, match=says) as caught:
    messages.hello_from(message)
  assert caught.value.reason == "malformed"
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "fields",
  [
    {"stage": 0},
    {"stage": 77},
    {"stage": 1, "learner_id": -1},
    {"stage": 1, "seq": -1},
    {"stage": 1, "tokens": -5},
    {"stage": 1, "sent_at_s": math.nan},
    {"stage": 1, "step_ends_s": [math.nan]},
    {"stage": 1, "step_ends_s": [0.0] * (messages.MAX_STEP_ENDS + 1)},
  ],
)
def test_malformed_reports(fields):
  with pytest.raises(Refused) as caught:
    messages.report_from(membership_pb2.Report(**fields))
  assert caught.value.reason == "malformed"


def test_malformed_manifests():
  good = messages.manifest_to(manifest())
  good.fragments[0].units[0].layer = 2
  with pytest.raises(Refused, match=r"unit\.layer"):
    messages.manifest_from(good)
  good.fragments[0].units[0].tensor = "c"
  with pytest.raises(Refused, match="'c'"):
    messages.manifest_from(good)


def test_malformed_streams():
  chunk = fragments_pb2.Chunk
  data = chunk(data=fragments_pb2.Data())
  for parse in (messages.contribution_from, messages.fragment_from):
    with pytest.raises(Refused, match="header"):
      parse(data)
    with pytest.raises(Refused, match="header"):
      parse(chunk())
  with pytest.raises(Refused, match="second header"):
    messages.data_from(chunk(fragment=fragments_pb2.FragmentHeader()))
  with pytest.raises(Refused, match="codec"):
    messages.encoding_from(fragments_pb2.Encoding(codec=9))
  with pytest.raises(Refused, match="kind"):
    messages.encoding_from(fragments_pb2.Encoding(codec=1))
  with pytest.raises(Refused, match="delta in float32"):
    messages.encoding_from(fragments_pb2.Encoding(codec=1, kind=2))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_parsed_or_refused(data):
  """No other exception than these two ever reaches the service."""
  try:
    message = membership_pb2.LearnerMessage.FromString(data)
  except DecodeError:
    return
  for parse, field in (
    (messages.report_from, message.report),
    (messages.heartbeat_from, message.heartbeat),
  ):
    with contextlib.suppress(Refused):
      parse(field)
