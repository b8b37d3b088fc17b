"""Between the messages of `types.py` and those on the network.

What arrives is checked before anything else sees it: counts and lengths are
bounded, numbers in range, enumerations known. A failed check is
`Refused("malformed", ...)`, naming the field.
"""

import math
from collections.abc import Iterable, Sequence, Sized
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (bfloat16 and others get their names)
import numpy as np

from decoupled.errors import Refused
from decoupled.types import (
  Announcement,
  Claim,
  Contribution,
  CopyHeader,
  CopyId,
  Heartbeat,
  Hello,
  Leaf,
  Manifest,
  MergedFragment,
  Offer,
  OpenRound,
  Phase,
  PoolWord,
  Report,
  Role,
  RunContract,
  Seat,
  SeatWord,
  Sitting,
  Slice,
  Stage,
  Standing,
  StateHeader,
  TensorSpec,
  Unit,
  Version,
  Welcome,
)
from decoupled.wire.proto.decoupled.v1 import common_pb2 as common_pb
from decoupled.wire.proto.decoupled.v1 import donations_pb2 as donations_pb
from decoupled.wire.proto.decoupled.v1 import fragments_pb2 as fragments_pb
from decoupled.wire.proto.decoupled.v1 import membership_pb2 as membership_pb
from decoupled.wire.proto.decoupled.v1 import pool_pb2 as pool_pb
from decoupled.wire.proto.decoupled.v1 import seats_pb2 as seats_pb
from decoupled.wire.status import JobStatus, LearnerStatus, StandbyStatus

MAX_LEARNERS = 1 << 16
MAX_STANDBYS = 1 << 16
MAX_FRAGMENTS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_LINES = 1 << 12
MAX_STEP_ENDS = 1 << 14
MAX_TEXT = 1 << 12
MAX_CLAIMS = 1 << 8
MAX_RANK = 32
MAX_HOSTS = 1 << 12
MAX_SLICES = 1 << 16
MAX_COPIES = 64

_CODECS = {
  "float32": fragments_pb.CODEC_FLOAT32,
  "bfloat16": fragments_pb.CODEC_BFLOAT16,
}
_ROLES = {
  Role.WEIGHT: membership_pb.ROLE_WEIGHT,
  Role.EMBEDDING: membership_pb.ROLE_EMBEDDING,
  Role.STATISTIC: membership_pb.ROLE_STATISTIC,
  Role.LOCAL: membership_pb.ROLE_LOCAL,
}
_STAGES = {
  Stage.JOINING: membership_pb.STAGE_JOINING,
  Stage.TRAINING: membership_pb.STAGE_TRAINING,
  Stage.PAUSED: membership_pb.STAGE_PAUSED,
  Stage.DRAINED: membership_pb.STAGE_DRAINED,
}
_PHASES = {
  Phase.WAITING: membership_pb.PHASE_WAITING,
  Phase.TRAINING: membership_pb.PHASE_TRAINING,
  Phase.DRAINING: membership_pb.PHASE_DRAINING,
  Phase.ENDED: membership_pb.PHASE_ENDED,
}
_CODEC_OF = {number: codec for codec, number in _CODECS.items()}
_ROLE_OF = {number: role for role, number in _ROLES.items()}
_STAGE_OF = {number: stage for stage, number in _STAGES.items()}
_PHASE_OF = {number: phase for phase, number in _PHASES.items()}


# --- checks ----------------------------------------------------------------


def malformed(what: str) -> Refused:
  return Refused("malformed", f"malformed message: {what}")


def _number(name: str, value: int, low: int = 0, high: int = 2**62) -> int:
  if not low <= value <= high:
    raise malformed(f"{name} = {value} is not within {low} and {high}")
  return value


def _seconds(name: str, value: float) -> float:
  if math.isnan(value):
    raise malformed(f"{name} is not a number")
  return value


def _text(name: str, value: str) -> str:
  if len(value) > MAX_TEXT:
    raise malformed(f"{name} has {len(value)} characters, limit {MAX_TEXT}")
  return value


def _at_most(name: str, values: Sized, limit: int) -> None:
  if len(values) > limit:
    raise malformed(f"{name} has {len(values)} entries, limit {limit}")


# --- names of versions and copies ------------------------------------------


def version_to(version: Version) -> common_pb.Version:
  return common_pb.Version(term=version.term, round=version.round)


def version_from(message: common_pb.Version) -> Version:
  return Version(
    _number("version.term", message.term),
    _number("version.round", message.round, low=-1),
  )


def copy_to(copy: CopyId) -> common_pb.CopyId:
  return common_pb.CopyId(
    incarnation=copy.incarnation,
    term=copy.term,
    round=copy.round,
    fragment=copy.fragment,
    attempt=copy.attempt,
  )


def copy_from(message: common_pb.CopyId) -> CopyId:
  return CopyId(
    _number("copy.incarnation", message.incarnation),
    _number("copy.term", message.term),
    _number("copy.round", message.round),
    _number("copy.fragment", message.fragment, high=MAX_FRAGMENTS),
    _number("copy.attempt", message.attempt),
  )


def header_to(header: CopyHeader) -> common_pb.CopyHeader:
  return common_pb.CopyHeader(
    copy=copy_to(header.copy),
    base=version_to(header.base),
    steps=header.steps,
    tokens=header.tokens,
    total_tokens=header.total_tokens,
  )


def header_from(message: common_pb.CopyHeader) -> CopyHeader:
  """Counters are passed on as they came: `checks` refuses them by name."""
  return CopyHeader(
    copy=copy_from(message.copy),
    base=version_from(message.base),
    steps=message.steps,
    tokens=message.tokens,
    total_tokens=message.total_tokens,
  )


# --- joining ---------------------------------------------------------------


def tensors_to(specs: Iterable[TensorSpec]) -> list[membership_pb.TensorSpec]:
  return [
    membership_pb.TensorSpec(
      name=spec.name,
      shape=spec.shape,
      dtype=spec.dtype,
      role=_ROLES[spec.role],
      stacked=spec.stacked,
    )
    for spec in specs
  ]


def tensor_from(message: membership_pb.TensorSpec) -> TensorSpec:
  _at_most("tensor.shape", message.shape, MAX_RANK)
  if message.role not in _ROLE_OF:
    raise malformed(f"tensor.role = {message.role}")
  if message.stacked and not message.shape:
    raise malformed(f"tensor {message.name!r} is stacked without an axis")
  return TensorSpec(
    name=_text("tensor.name", message.name),
    shape=tuple(_number("tensor.shape", n, high=2**40) for n in message.shape),
    dtype=_text("tensor.dtype", message.dtype),
    role=_ROLE_OF[message.role],
    stacked=message.stacked,
  )


def tensors_from(
  messages: Iterable[membership_pb.TensorSpec],
) -> tuple[TensorSpec, ...]:
  specs = tuple(tensor_from(message) for message in messages)
  _at_most("tensors", specs, MAX_TENSORS)
  if len({spec.name for spec in specs}) != len(specs):
    raise malformed("two tensors have one name")
  return specs


def contract_to(
  lines: Iterable[tuple[str, str]],
) -> list[membership_pb.ContractLine]:
  return [membership_pb.ContractLine(key=k, value=v) for k, v in lines]


def contract_from(
  messages: Iterable[membership_pb.ContractLine],
) -> tuple[tuple[str, str], ...]:
  lines = tuple(
    (_text("contract.key", m.key), _text("contract.value", m.value))
    for m in messages
  )
  _at_most("contract", lines, MAX_LINES)
  return lines


def manifest_to(manifest: Manifest) -> membership_pb.Manifest:
  owners = manifest.owners or ("",) * len(manifest.fragments)
  return membership_pb.Manifest(
    tensors=tensors_to(manifest.tensors),
    fragments=[
      membership_pb.Fragment(
        units=[
          membership_pb.Unit(tensor=unit.tensor, layer=unit.layer)
          for unit in units
        ],
        owner=owner,
      )
      for units, owner in zip(manifest.fragments, owners, strict=True)
    ],
  )


def manifest_from(message: membership_pb.Manifest) -> Manifest:
  _at_most("manifest.fragments", message.fragments, MAX_FRAGMENTS)
  tensors = tensors_from(message.tensors)
  specs = {spec.name: spec for spec in tensors}
  return Manifest(
    tensors=tensors,
    fragments=tuple(
      tuple(_unit_from(unit, specs) for unit in fragment.units)
      for fragment in message.fragments
    ),
    owners=tuple(_text("owner", f.owner) for f in message.fragments),
  )


def _unit_from(
  message: membership_pb.Unit, specs: dict[str, TensorSpec]
) -> Unit:
  spec = specs.get(message.tensor)
  if spec is None:
    raise malformed(f"manifest names no tensor {message.tensor!r}")
  if not message.HasField("layer"):
    return Unit(spec.name)
  layers = spec.shape[0] if spec.stacked else 0
  return Unit(spec.name, _number("unit.layer", message.layer, high=layers - 1))


def hello_to(hello: Hello) -> membership_pb.HelloRequest:
  return membership_pb.HelloRequest(
    protocol=hello.protocol,
    learner_id=hello.learner_id,
    holder=hello.holder,
    run_id=hello.run_id,
    tensors=tensors_to(hello.tensors),
    contract=contract_to(hello.contract),
    hosts=hello.hosts,
    previous=hello.previous,
    gives_state=hello.gives_state,
    host=hello.host,
    epoch=hello.epoch,
    program=contract_to(hello.program),
  )


def hello_from(message: membership_pb.HelloRequest) -> Hello:
  hosts = _number("hosts", message.hosts, 1, MAX_HOSTS)
  return Hello(
    learner_id=_number("learner_id", message.learner_id, -1, MAX_LEARNERS),
    holder=_text("holder", message.holder),
    run_id=_text("run_id", message.run_id),
    tensors=tensors_from(message.tensors),
    contract=contract_from(message.contract),
    hosts=hosts,
    previous=_number("previous", message.previous),
    protocol=message.protocol,
    gives_state=message.gives_state,
    host=_number("host", message.host, high=hosts - 1),
    epoch=_number("epoch", message.epoch),
    program=contract_from(message.program),
  )


def run_contract_to(said: RunContract) -> membership_pb.ContractReply:
  return membership_pb.ContractReply(
    run_id=said.run_id,
    phase=phase_to(said.phase),
    contract=contract_to(said.lines),
    manifest=None if said.manifest is None else manifest_to(said.manifest),
  )


def run_contract_from(message: membership_pb.ContractReply) -> RunContract:
  return RunContract(
    run_id=_text("run_id", message.run_id),
    phase=phase_from(message.phase),
    lines=contract_from(message.contract),
    manifest=(
      manifest_from(message.manifest) if message.HasField("manifest") else None
    ),
  )


def welcome_to(welcome: Welcome) -> membership_pb.Welcome:
  return membership_pb.Welcome(
    learner_id=welcome.learner_id,
    incarnation=welcome.incarnation,
    run_id=welcome.run_id,
    term=welcome.term,
    manifest=manifest_to(welcome.manifest),
    contract=contract_to(welcome.contract),
    lease_s=welcome.lease_s,
    heartbeat_s=welcome.heartbeat_s,
    position=position_to(welcome.position),
    has_history=welcome.has_history,
  )


def welcome_from(message: membership_pb.Welcome) -> Welcome:
  if not message.heartbeat_s > 0:
    raise malformed(f"heartbeat_s = {message.heartbeat_s}")
  return Welcome(
    learner_id=_learner("learner_id", message.learner_id),
    incarnation=_number("incarnation", message.incarnation),
    run_id=_text("run_id", message.run_id),
    term=_number("term", message.term),
    manifest=manifest_from(message.manifest),
    contract=contract_from(message.contract),
    lease_s=_seconds("lease_s", message.lease_s),
    heartbeat_s=message.heartbeat_s,
    position=position_from(message.position),
    has_history=message.has_history,
  )


def position_to(position: tuple[int, int]) -> membership_pb.Position:
  return membership_pb.Position(unit=position[0], offset=position[1])


def position_from(message: membership_pb.Position) -> tuple[int, int]:
  return (
    _number("position.unit", message.unit),
    _number("position.offset", message.offset),
  )


def _learner(name: str, value: int) -> int:
  return _number(name, value, high=MAX_LEARNERS)


def _host(name: str, value: int) -> int:
  return _number(name, value, high=MAX_HOSTS - 1)


# --- control ---------------------------------------------------------------


def heartbeat_to(heartbeat: Heartbeat) -> membership_pb.Heartbeat:
  return membership_pb.Heartbeat(
    learner_id=heartbeat.learner_id,
    incarnation=heartbeat.incarnation,
    sent_at_s=heartbeat.sent_at_s,
    host=heartbeat.host,
  )


def heartbeat_from(message: membership_pb.Heartbeat) -> Heartbeat:
  return Heartbeat(
    learner_id=_learner("heartbeat.learner_id", message.learner_id),
    incarnation=_number("heartbeat.incarnation", message.incarnation),
    sent_at_s=_seconds("heartbeat.sent_at_s", message.sent_at_s),
    host=_host("heartbeat.host", message.host),
  )


def report_to(report: Report) -> membership_pb.Report:
  return membership_pb.Report(
    learner_id=report.learner_id,
    incarnation=report.incarnation,
    seq=report.seq,
    stage=_STAGES[report.stage],
    step=report.step,
    tokens=report.tokens,
    schedule_step=report.schedule_step,
    copies=[header_to(header) for header in report.copies],
    versions=[version_to(version) for version in report.versions],
    position=position_to(report.position),
    sent_at_s=report.sent_at_s,
    step_ends_s=report.step_ends_s,
    loss=report.loss,
    claims=[claim_to(claim) for claim in report.claims],
    wants=report.wants,
    unclaimed=report.unclaimed,
    tokens_before=report.tokens_before,
    tokens_alone=report.tokens_alone,
    host=report.host,
  )


def report_from(message: membership_pb.Report) -> Report:
  _at_most("report.copies", message.copies, MAX_FRAGMENTS)
  _at_most("report.versions", message.versions, MAX_FRAGMENTS)
  _at_most("report.step_ends_s", message.step_ends_s, MAX_STEP_ENDS)
  _at_most("report.claims", message.claims, MAX_CLAIMS)
  if message.stage not in _STAGE_OF:
    raise malformed(f"report.stage = {message.stage}")
  return Report(
    learner_id=_learner("report.learner_id", message.learner_id),
    incarnation=_number("report.incarnation", message.incarnation),
    seq=_number("report.seq", message.seq),
    stage=_STAGE_OF[message.stage],
    step=_number("report.step", message.step),
    tokens=_number("report.tokens", message.tokens),
    schedule_step=_number("report.schedule_step", message.schedule_step),
    copies=tuple(header_from(header) for header in message.copies),
    versions=tuple(version_from(version) for version in message.versions),
    position=position_from(message.position),
    sent_at_s=_seconds("report.sent_at_s", message.sent_at_s),
    step_ends_s=tuple(
      _seconds("report.step_ends_s", end) for end in message.step_ends_s
    ),
    loss=message.loss,
    claims=tuple(claim_from(claim) for claim in message.claims),
    wants=_number("report.wants", message.wants),
    unclaimed=_number("report.unclaimed", message.unclaimed),
    tokens_before=_number("report.tokens_before", message.tokens_before),
    tokens_alone=_number("report.tokens_alone", message.tokens_alone),
    host=_host("report.host", message.host),
  )


def claim_to(claim: Claim) -> membership_pb.Claim:
  return membership_pb.Claim(
    place=claim.place, offset=claim.offset, done=claim.done
  )


def claim_from(message: membership_pb.Claim) -> Claim:
  return Claim(
    _number("claim.place", message.place),
    _number("claim.offset", message.offset),
    message.done,
  )


def claims_to(said: Announcement) -> membership_pb.Claims | None:
  if said.claims is None:
    return None
  return membership_pb.Claims(
    claims=[claim_to(claim) for claim in said.claims], ended=said.data_ended
  )


def claims_from(
  message: membership_pb.Announcement,
) -> tuple[Claim, ...] | None:
  if not message.HasField("data"):
    return None
  _at_most("announcement.data", message.data.claims, MAX_CLAIMS)
  return tuple(claim_from(claim) for claim in message.data.claims)


def announcement_to(said: Announcement) -> membership_pb.Announcement:
  return membership_pb.Announcement(
    term=said.term,
    seq=said.seq,
    phase=_PHASES[said.phase],
    open=[
      membership_pb.OpenRound(
        version=version_to(round_.version),
        fragment=round_.fragment,
        base=version_to(round_.base),
      )
      for round_ in said.open
    ],
    next_round=said.next_round,
    next_open_in_s=said.next_open_in_s,
    pace_s=said.pace_s,
    versions=[version_to(version) for version in said.versions],
    wanted=[copy_to(copy) for copy in said.wanted],
    refused=[
      membership_pb.RefusedCopy(copy=copy_to(copy), reason=reason)
      for copy, reason in said.refused
    ],
    common_step=said.common_step,
    note=said.note[:MAX_TEXT],
    donate=said.donate,
    data=claims_to(said),
    relieved=said.relieved,
  )


def announcement_from(message: membership_pb.Announcement) -> Announcement:
  for name in ("open", "versions", "wanted", "refused"):
    _at_most(f"announcement.{name}", getattr(message, name), MAX_FRAGMENTS)
  return Announcement(
    term=_number("announcement.term", message.term),
    seq=_number("announcement.seq", message.seq),
    phase=phase_from(message.phase),
    open=tuple(
      OpenRound(
        version_from(round_.version),
        _number("open.fragment", round_.fragment, high=MAX_FRAGMENTS),
        version_from(round_.base),
      )
      for round_ in message.open
    ),
    next_round=_number("announcement.next_round", message.next_round),
    next_open_in_s=_seconds("next_open_in_s", message.next_open_in_s),
    pace_s=_seconds("announcement.pace_s", message.pace_s),
    versions=tuple(version_from(version) for version in message.versions),
    wanted=tuple(copy_from(copy) for copy in message.wanted),
    refused=tuple(
      (copy_from(entry.copy), _text("refused.reason", entry.reason))
      for entry in message.refused
    ),
    common_step=_number("announcement.common_step", message.common_step),
    note=_text("announcement.note", message.note),
    donate=_number("announcement.donate", message.donate),
    claims=claims_from(message),
    data_ended=message.data.ended,
    relieved=message.relieved,
  )


def phase_to(phase: Phase) -> membership_pb.Phase.ValueType:
  return _PHASES[phase]


def phase_from(number: membership_pb.Phase.ValueType) -> Phase:
  if number not in _PHASE_OF:
    raise malformed(f"phase = {number}")
  return _PHASE_OF[number]


def status_to(status: JobStatus) -> membership_pb.StatusReply:
  return membership_pb.StatusReply(
    run_id=status.run_id,
    phase=_PHASES[status.phase],
    bytes_up=status.bytes_up,
    bytes_down=status.bytes_down,
    learners=[
      membership_pb.LearnerStatus(
        learner_id=learner.learner_id,
        incarnation=learner.incarnation,
        holder=learner.holder,
        hosts=learner.hosts,
        stage=_STAGES[learner.stage],
        step=learner.step,
        tokens=learner.tokens,
        silent_s=learner.silent_s,
      )
      for learner in status.learners
    ],
    standbys=[
      membership_pb.StandbyStatus(
        name=standby.name,
        holder=standby.holder,
        fingerprint=standby.fingerprint,
        missing=standby.missing,
        since_s=standby.since_s,
      )
      for standby in status.standbys
    ],
    vacant=status.vacant,
  )


def status_from(message: membership_pb.StatusReply) -> JobStatus:
  _at_most("status.learners", message.learners, MAX_LEARNERS)
  _at_most("status.standbys", message.standbys, MAX_STANDBYS)
  _at_most("status.vacant", message.vacant, MAX_LEARNERS)
  return JobStatus(
    run_id=_text("status.run_id", message.run_id),
    phase=phase_from(message.phase),
    bytes_up=message.bytes_up,
    bytes_down=message.bytes_down,
    learners=tuple(
      LearnerStatus(
        learner_id=learner.learner_id,
        incarnation=learner.incarnation,
        holder=_text("status.holder", learner.holder),
        hosts=learner.hosts,
        stage=_STAGE_OF.get(learner.stage, Stage.JOINING),
        step=learner.step,
        tokens=learner.tokens,
        silent_s=learner.silent_s,
      )
      for learner in message.learners
    ),
    standbys=tuple(
      StandbyStatus(
        name=_text("status.name", standby.name),
        holder=_text("status.holder", standby.holder),
        fingerprint=_text("status.fingerprint", standby.fingerprint),
        missing=_text("status.missing", standby.missing),
        since_s=_seconds("status.since_s", standby.since_s),
      )
      for standby in message.standbys
    ),
    vacant=tuple(_text("status.vacant", line) for line in message.vacant),
  )


# --- the pool --------------------------------------------------------------


def standing_to(standing: Standing) -> pool_pb.Standing:
  return pool_pb.Standing(
    protocol=standing.protocol,
    name=standing.name,
    holder=standing.holder,
    run_id=standing.run_id,
    contract=contract_to(standing.contract),
    program=contract_to(standing.program),
    fingerprint=standing.fingerprint,
    missing=standing.missing,
    declined=standing.declined,
    prepared=standing.prepared,
  )


def standing_from(message: pool_pb.Standing) -> Standing:
  return Standing(
    name=_text("standing.name", message.name),
    holder=_text("standing.holder", message.holder),
    run_id=_text("standing.run_id", message.run_id),
    contract=contract_from(message.contract),
    program=contract_from(message.program),
    fingerprint=_text("standing.fingerprint", message.fingerprint),
    missing=_text("standing.missing", message.missing),
    declined=_number("standing.declined", message.declined),
    prepared=_number("standing.prepared", message.prepared),
    protocol=message.protocol,
  )


def pool_word_to(word: PoolWord) -> pool_pb.PoolWord:
  offer = word.offer
  return pool_pb.PoolWord(
    run_id=word.run_id,
    phase=_PHASES[word.phase],
    versions=[version_to(version) for version in word.versions],
    offer=(
      None
      if offer is None
      else pool_pb.Offer(
        number=offer.number,
        learner_id=offer.learner_id,
        prepare=offer.prepare,
        rank=offer.rank,
      )
    ),
    heartbeat_s=word.heartbeat_s,
  )


def pool_word_from(message: pool_pb.PoolWord) -> PoolWord:
  _at_most("word.versions", message.versions, MAX_FRAGMENTS)
  offer = None
  if message.HasField("offer"):
    offer = Offer(
      _number("offer.number", message.offer.number),
      _learner("offer.learner_id", message.offer.learner_id),
      _number("offer.prepare", message.offer.prepare),
      _host("offer.rank", message.offer.rank),
    )
  return PoolWord(
    run_id=_text("word.run_id", message.run_id),
    phase=phase_from(message.phase),
    versions=tuple(version_from(version) for version in message.versions),
    offer=offer,
    heartbeat_s=_seconds("word.heartbeat_s", message.heartbeat_s),
  )


# --- seats -----------------------------------------------------------------


def sitting_to(sitting: Sitting) -> seats_pb.Sitting:
  return seats_pb.Sitting(
    protocol=sitting.protocol,
    learner_id=sitting.learner_id,
    rank=sitting.rank,
    hosts=sitting.hosts,
    holder=sitting.holder,
    epoch=sitting.epoch,
    left=sitting.left,
    ready=sitting.ready,
    stepped=sitting.stepped,
    address=sitting.address,
    copies=_packed(sitting.copies),
  )


def sitting_from(message: seats_pb.Sitting) -> Sitting:
  return Sitting(
    learner_id=_learner("sitting.learner_id", message.learner_id),
    rank=_host("sitting.rank", message.rank),
    hosts=_number("sitting.hosts", message.hosts, 1, MAX_HOSTS),
    holder=_text("sitting.holder", message.holder),
    epoch=_number("sitting.epoch", message.epoch),
    left=_number("sitting.left", message.left),
    ready=_number("sitting.ready", message.ready),
    stepped=_number("sitting.stepped", message.stepped),
    address=_text("sitting.address", message.address),
    copies=_unpacked("sitting.copies", message.copies),
    protocol=message.protocol,
  )


def seat_word_to(word: SeatWord) -> seats_pb.SeatWord:
  return seats_pb.SeatWord(
    epoch=word.epoch,
    state=word.state,
    why=word.why,
    seats=[
      seats_pb.Seat(
        holder=seat.holder, address=seat.address, copies=_packed(seat.copies)
      )
      for seat in word.seats
    ],
    phase=_PHASES[word.phase],
  )


def seat_word_from(message: seats_pb.SeatWord) -> SeatWord:
  _at_most("word.seats", message.seats, MAX_HOSTS)
  return SeatWord(
    epoch=_number("word.epoch", message.epoch),
    state=_text("word.state", message.state),
    why=_text("word.why", message.why),
    seats=tuple(
      Seat(
        _text("seat.holder", seat.holder),
        _text("seat.address", seat.address),
        _unpacked("seat.copies", seat.copies),
      )
      for seat in message.seats
    ),
    phase=phase_from(message.phase),
  )


def _packed(copies: Iterable[tuple[int, int]]) -> list[int]:
  return [epoch << 32 | step for epoch, step in copies]


def _unpacked(name: str, packed: Sequence[int]) -> tuple[tuple[int, int], ...]:
  _at_most(name, packed, MAX_COPIES)
  return tuple(divmod(_number(name, each), 1 << 32) for each in packed)


# --- fragments -------------------------------------------------------------


class Encoding(NamedTuple):
  """How the data of a stream is to be read.

  Attributes:
    codec: the run's codec.
    base: what a delta is relative to; None: float32 values in full.
    size: bytes of data.
  """

  codec: str
  base: Version | None
  size: int


def encoding_to(encoding: Encoding) -> fragments_pb.Encoding:
  message = fragments_pb.Encoding(
    codec=_CODECS[encoding.codec],
    kind=fragments_pb.PAYLOAD_KIND_FULL,
    size=encoding.size,
  )
  if encoding.base is not None:
    message.kind = fragments_pb.PAYLOAD_KIND_DELTA
    message.base.CopyFrom(version_to(encoding.base))
  return message


def encoding_from(message: fragments_pb.Encoding) -> Encoding:
  if message.codec not in _CODEC_OF:
    raise malformed(f"encoding.codec = {message.codec}")
  codec, base = _CODEC_OF[message.codec], None
  if message.kind == fragments_pb.PAYLOAD_KIND_DELTA:
    if codec == "float32":
      raise malformed("a delta in float32")
    base = version_from(message.base)
  elif message.kind != fragments_pb.PAYLOAD_KIND_FULL:
    raise malformed(f"encoding.kind = {message.kind}")
  return Encoding(codec, base, _number("encoding.size", message.size))


def contribution_to(
  contribution: Contribution, encoding: Encoding
) -> fragments_pb.Chunk:
  """The header of a contribution's stream."""
  return fragments_pb.Chunk(
    contribution=fragments_pb.ContributionHeader(
      learner_id=contribution.learner_id,
      header=header_to(contribution.header),
      encoding=encoding_to(encoding),
      host=contribution.host,
      slices=[
        fragments_pb.Slice(unit=s.unit, start=s.start, stop=s.stop)
        for s in contribution.slices
      ],
    )
  )


def contribution_from(
  message: fragments_pb.Chunk,
) -> tuple[Contribution, Encoding]:
  """The contribution, still without its arrays."""
  if message.WhichOneof("part") != "contribution":
    raise malformed("a contribution starts with its header")
  found = message.contribution
  encoding = encoding_from(found.encoding)
  header = header_from(found.header)
  if encoding.base not in (None, header.base):
    raise malformed("a contribution's delta is against its own base")
  _at_most("contribution.slices", found.slices, MAX_SLICES)
  said = Contribution(
    learner_id=_learner("contribution.learner_id", found.learner_id),
    header=header,
    arrays=(),
    host=_host("contribution.host", found.host),
    slices=tuple(_slice_from(box) for box in found.slices),
  )
  return said, encoding


def _slice_from(message: fragments_pb.Slice) -> Slice:
  """A box that is none, or lies outside its unit, is the store's to refuse."""
  _at_most("slice.start", message.start, MAX_RANK)
  if len(message.start) != len(message.stop):
    raise malformed("a slice whose ends have different ranks")
  return Slice(
    _number("slice.unit", message.unit),
    tuple(_number("slice.start", n, high=2**40) for n in message.start),
    tuple(_number("slice.stop", n, high=2**40) for n in message.stop),
  )


def fragment_to(
  merged: MergedFragment, encoding: Encoding
) -> fragments_pb.Chunk:
  """The header of a fetched fragment's stream."""
  return fragments_pb.Chunk(
    fragment=fragments_pb.FragmentHeader(
      fragment=merged.fragment,
      version=version_to(merged.version),
      included=None if merged.included is None else copy_to(merged.included),
      common_step=merged.common_step,
      restored=merged.restored,
      encoding=encoding_to(encoding),
      base=version_to(merged.base),
    )
  )


def fragment_from(
  message: fragments_pb.Chunk,
) -> tuple[MergedFragment, Encoding]:
  """The fragment, still without its arrays."""
  if message.WhichOneof("part") != "fragment":
    raise malformed("a fragment starts with its header")
  found = message.fragment
  included = copy_from(found.included) if found.HasField("included") else None
  merged = MergedFragment(
    fragment=_number("fragment", found.fragment, high=MAX_FRAGMENTS),
    version=version_from(found.version),
    arrays=(),
    included=included,
    common_step=_number("common_step", found.common_step),
    restored=found.restored,
    base=version_from(found.base),
  )
  return merged, encoding_from(found.encoding)


def data_from(
  message: fragments_pb.Chunk | donations_pb.StateChunk,
) -> fragments_pb.Data:
  """A chunk of data."""
  if message.WhichOneof("part") != "data":
    raise malformed("a second header within one stream")
  return message.data


# --- donations -------------------------------------------------------------


def state_header_to(header: StateHeader) -> donations_pb.StateChunk:
  """The first message of a donor's stream."""
  return donations_pb.StateChunk(
    header=donations_pb.StateHeader(
      request=header.request,
      donor=header.donor,
      incarnation=header.incarnation,
      step=header.step,
      schedule_step=header.schedule_step,
      leaves=[
        donations_pb.Leaf(path=leaf.path, shape=leaf.shape, dtype=leaf.dtype)
        for leaf in header.leaves
      ],
    )
  )


def state_header_from(message: donations_pb.StateChunk) -> StateHeader:
  if message.WhichOneof("part") != "header":
    raise malformed("a state starts with its header")
  found = message.header
  _at_most("state.leaves", found.leaves, MAX_TENSORS)
  return StateHeader(
    request=_number("state.request", found.request),
    donor=_learner("state.donor", found.donor),
    incarnation=_number("state.incarnation", found.incarnation),
    step=_number("state.step", found.step),
    schedule_step=_number("state.schedule_step", found.schedule_step),
    leaves=tuple(_leaf_from(leaf) for leaf in found.leaves),
  )


def _leaf_from(message: donations_pb.Leaf) -> Leaf:
  _at_most("leaf.shape", message.shape, MAX_RANK)
  try:
    np.dtype(message.dtype)
  except TypeError:
    raise malformed(f"leaf.dtype = {message.dtype[:100]!r}") from None
  return Leaf(
    path=_text("leaf.path", message.path),
    shape=tuple(_number("leaf.shape", n, high=2**40) for n in message.shape),
    dtype=_text("leaf.dtype", message.dtype),
  )
