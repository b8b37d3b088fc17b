"""What learner and syncer say to each other, as plain immutable data.

Both directions of control are *whole state*: a `Report` says everything a
learner holds, an `Announcement` everything the syncer wants of one learner.
A lost, repeated or late message is therefore healed by the next one, and
`seq` lets the receiver drop what arrives out of order.

Arrays are host NumPy arrays throughout. A fragment's arrays are listed in the
order of its units; a unit is a whole tensor or one layer of a stacked tensor.
"""

import dataclasses
import enum
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

Arrays: TypeAlias = tuple[np.ndarray, ...]
Lines: TypeAlias = tuple[tuple[str, str], ...]  # name or key -> value


class Role(enum.StrEnum):
  """How a tensor is merged (design section 4.11)."""

  WEIGHT = "weight"  # trainable: RDA (or average) and the outer step
  EMBEDDING = "embedding"  # trainable: weighted average and the outer step
  STATISTIC = "statistic"  # float state: weighted mean, no momentum
  LOCAL = "local"  # integers, keys, caches: never sent


@dataclasses.dataclass(frozen=True)
class TensorSpec:
  """One tensor of the model as the wire knows it.

  Attributes:
    name: path of the leaf, joined by `/`.
    shape: full shape; axis 0 is the layer axis when `stacked`.
    dtype: NumPy name, such as `float32`.
    role: how it is merged.
    stacked: whether axis 0 enumerates scanned layers, which are then
      fragmented one by one.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  role: Role = Role.WEIGHT
  stacked: bool = False


class Unit(NamedTuple):
  """The smallest thing that is synchronised: a tensor, or one layer of it."""

  tensor: str
  layer: int | None = None


@dataclasses.dataclass(frozen=True)
class Manifest:
  """Which unit belongs to which fragment, and who owns each fragment.

  Attributes:
    tensors: every tensor that is sent, in the order of the learner's tree.
    fragments: per fragment its units.
    owners: per fragment the address of the syncer that owns it ("" = the one
      that was dialled).
  """

  tensors: tuple[TensorSpec, ...]
  fragments: tuple[tuple[Unit, ...], ...]
  owners: tuple[str, ...] = ()

  def spec(self, name: str) -> TensorSpec:
    return self._by_name[name]

  @property
  def _by_name(self) -> dict[str, TensorSpec]:
    cached = self.__dict__.get("_index")
    if cached is None:
      cached = {spec.name: spec for spec in self.tensors}
      object.__setattr__(self, "_index", cached)
    return cached

  def shape(self, unit: Unit) -> tuple[int, ...]:
    shape = self.spec(unit.tensor).shape
    return shape if unit.layer is None else shape[1:]

  def size(self, fragment: int) -> int:
    """Number of parameters in a fragment."""
    return sum(
      int(np.prod(self.shape(unit))) for unit in self.fragments[fragment]
    )

  def shares(self) -> tuple[float, ...]:
    """Per fragment its share of all parameters; sums to 1."""
    sizes = [self.size(p) for p in range(len(self.fragments))]
    return tuple(size / sum(sizes) for size in sizes)


class Version(NamedTuple):
  """(term, round) that last wrote a fragment; ordered; NO_VERSION is lowest."""

  term: int
  round: int


NO_VERSION = Version(0, -1)


class CopyId(NamedTuple):
  """Names the bytes of one extraction: the same id is always the same bytes.

  Round 0 of a term is the seeding of version 0.
  """

  incarnation: int
  term: int
  round: int
  fragment: int
  attempt: int


@dataclasses.dataclass(frozen=True)
class CopyHeader:
  """A host copy of one fragment that a learner holds.

  Attributes:
    copy: its id.
    base: version of the fragment that the learner had adopted.
    steps: inner steps on this fragment since that adoption.
    tokens: tokens likewise.
    total_tokens: the incarnation's tokens at the extraction (for accounting).
  """

  copy: CopyId
  base: Version
  steps: int
  tokens: int
  total_tokens: int


class Claim(NamedTuple):
  """A unit of the corpus in a learner's hands (design section 5).

  Attributes:
    place: of the unit in the endless sequence of epochs.
    offset: how many of its sequences were trained on.
    done: all of them were.
  """

  place: int
  offset: int = 0
  done: bool = False


class Stage(enum.StrEnum):
  """What a learner is doing; named in messages about who is missing."""

  JOINING = "joining"
  TRAINING = "training"
  PAUSED = "paused"
  DRAINED = "drained"  # has stopped stepping and acknowledges the drain


@dataclasses.dataclass(frozen=True)
class Report:
  """Everything the syncer needs to know of a learner; replaces the last one.

  Attributes:
    learner_id: who.
    incarnation: under which fencing number.
    seq: rises with each report of an incarnation.
    stage: what it is doing.
    step: inner steps of this incarnation.
    tokens: tokens of this incarnation.
    schedule_step: its step of the learning-rate schedule.
    copies: host copies that exist.
    versions: the version it holds of each fragment.
    position: data position (unit, offset) after `step`.
    sent_at_s: its own monotonic clock.
    step_ends_s: when steps finished since the last report, on that clock.
    loss: last training loss read (NaN: none yet).
    claims: the units it holds, and those it finished and still has listed.
    wants: how many unfinished units it would like to hold.
    unclaimed: units begun without a claim, for want of a syncer.
    tokens_before: tokens of this process before this incarnation.
    tokens_alone: those of them that no earlier report told of.
    host: rank of the host that speaks.
  """

  learner_id: int
  incarnation: int
  seq: int
  stage: Stage
  step: int
  tokens: int
  schedule_step: int
  copies: tuple[CopyHeader, ...]
  versions: tuple[Version, ...]
  position: tuple[int, int] = (0, 0)
  sent_at_s: float = 0.0
  step_ends_s: tuple[float, ...] = ()
  loss: float = float("nan")
  claims: tuple[Claim, ...] = ()
  wants: int = 0
  unclaimed: int = 0
  tokens_before: int = 0
  tokens_alone: int = 0
  host: int = 0


@dataclasses.dataclass(frozen=True)
class Heartbeat:
  """Sign of life from a thread of its own; says nothing about progress."""

  learner_id: int
  incarnation: int
  sent_at_s: float
  host: int = 0


class Phase(enum.StrEnum):
  """Where the run is."""

  WAITING = "waiting"  # for learners, or for version 0
  TRAINING = "training"
  DRAINING = "draining"
  ENDED = "ended"


@dataclasses.dataclass(frozen=True)
class OpenRound:
  """A round that wants contributions."""

  version: Version  # the version that closing it will write
  fragment: int
  base: Version  # what a contribution must be based on


@dataclasses.dataclass(frozen=True)
class Announcement:
  """Everything the syncer wants of one learner; replaces the last one.

  Attributes:
    term: the syncer's term.
    seq: rises with each announcement to this incarnation.
    phase: where the run is.
    open: rounds that are open.
    next_round: the round that will open next.
    next_open_in_s: when, at the earliest, seconds from sending.
    pace_s: running length of a round, 0 while unknown.
    versions: newest version of each fragment; a learner fetches what it lacks.
    wanted: copies to send now (repeats are harmless).
    refused: copies to drop, each with its reason.
    common_step: the run's step of the learning-rate schedule (design 4.10).
    note: what the syncer is waiting for, in a sentence ("" = nothing).
    donate: request to give its optimizer state to a joiner, 0 for none.
    claims: the units that it holds, and none but these; None: the syncer has
      not yet heard what this incarnation holds.
    data_ended: no unit is left that anybody could claim.
    relieved: a standby is prepared to take its place: stop, and leave.
  """

  term: int
  seq: int
  phase: Phase
  open: tuple[OpenRound, ...]
  next_round: int
  next_open_in_s: float
  pace_s: float
  versions: tuple[Version, ...]
  wanted: tuple[CopyId, ...] = ()
  refused: tuple[tuple[CopyId, str], ...] = ()
  common_step: int = 0
  note: str = ""
  donate: int = 0
  claims: tuple[Claim, ...] | None = None
  data_ended: bool = False
  relieved: bool = False


class Slice(NamedTuple):
  """A box of one unit: `start` to `stop`, exclusive, on every axis.

  `unit` is its number in the fragment.
  """

  unit: int
  start: tuple[int, ...]
  stop: tuple[int, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

  @property
  def within(self) -> tuple[slice, ...]:
    """What it is of the unit's array."""
    return tuple(map(slice, self.start, self.stop))


@dataclasses.dataclass(frozen=True)
class Contribution:
  """One learner's data for one round: parameters, never a difference.

  Attributes:
    learner_id: whose.
    header: of the copy.
    arrays: the fragment's units; of a part, what `slices` says, in its order.
    host: rank of the host that sends.
    slices: of a learner of several hosts the part that this host sends, ()
      where it is the whole.
  """

  learner_id: int
  header: CopyHeader
  arrays: Arrays
  host: int = 0
  slices: tuple[Slice, ...] = ()


@dataclasses.dataclass(frozen=True)
class MergedFragment:
  """A global fragment on its way to one learner.

  Attributes:
    fragment: which.
    version: its version.
    arrays: float32 parameters as every learner of this version decodes them.
    included: the copy of this learner that the merge used, if any.
    common_step: the run's schedule step at this version.
    restored: the version comes from a snapshot or ends the run: adopt it by
      overwriting, whatever the adoption rule says.
    base: the version that this one replaced (NO_VERSION: none).
  """

  fragment: int
  version: Version
  arrays: Arrays
  included: CopyId | None
  common_step: int
  restored: bool = False
  base: Version = NO_VERSION


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One array of an optimizer's state.

  Attributes:
    path: its place in the tree, joined by `/`.
    shape: its whole shape, over all devices.
    dtype: NumPy name, such as `float32`.
  """

  path: str
  shape: tuple[int, ...]
  dtype: str

  def __str__(self) -> str:
    return f"{self.path} {self.dtype}[{','.join(map(str, self.shape))}]"

  @property
  def nbytes(self) -> int:
    return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class StateHeader:
  """What a donor says of the state that follows.

  Attributes:
    request: the request of the announcement that asked for it.
    donor: the learner that gives.
    incarnation: its fencing number.
    step: inner steps of its process when the copy was made.
    schedule_step: its step of the learning-rate schedule then.
    leaves: the arrays, in the order in which they come.
  """

  request: int
  donor: int
  incarnation: int
  step: int
  schedule_step: int
  leaves: tuple[Leaf, ...]


PROTOCOL_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Hello:
  """A learner's claim of an id.

  Attributes:
    learner_id: the id, or -1 for any free one.
    holder: who claims it, as `host:pid`, named to a second claimant.
    run_id: the run it believes it joins ("" = whichever).
    tensors: what it would send; must equal the run's once that is known.
    contract: `key -> value` lines that must agree with the run's.
    hosts: number of hosts of the learner.
    previous: incarnation it held before a broken connection, 0 if none.
    protocol: version of the wire protocol.
    gives_state: whether it can give its optimizer state to a joiner.
    host: rank of the host that speaks, below `hosts`.
    epoch: of the hosts' common JAX job; hosts of one claim are of one epoch.
    program: `name -> value` lines of what shapes its executables beside the
      contract: a standby that takes its id over must have the same.
  """

  learner_id: int
  holder: str
  run_id: str
  tensors: tuple[TensorSpec, ...]
  contract: tuple[tuple[str, str], ...] = ()
  hosts: int = 1
  previous: int = 0
  protocol: int = PROTOCOL_VERSION
  gives_state: bool = False
  host: int = 0
  epoch: int = 0
  program: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class RunContract:
  """What the peers of a run agree on, as its syncer says it.

  Attributes:
    run_id: the run.
    phase: where it is.
    lines: `key -> value`.
    manifest: how the model is cut; None until the first learner has joined.
  """

  run_id: str
  phase: Phase
  lines: tuple[tuple[str, str], ...]
  manifest: Manifest | None = None


@dataclasses.dataclass(frozen=True)
class Standing:
  """What a standby says of itself; replaces what it said before.

  Attributes:
    name: as its runner calls it, such as `standby/0`.
    holder: `host:pid`; the claim that it makes later has the same.
    run_id: the run whose contract it has.
    contract: `key -> value` lines it was built for.
    program: as in `Hello`.
    fingerprint: of both, for people.
    missing: what it still does before it is ready ("" = it is).
    declined: the newest offer that it could not take, 0 for none.
    prepared: the newest offer that it has prepared for, 0 for none.
    protocol: version of the wire protocol.
  """

  name: str
  holder: str
  run_id: str
  contract: tuple[tuple[str, str], ...]
  program: tuple[tuple[str, str], ...]
  fingerprint: str
  missing: str = ""
  declined: int = 0
  prepared: int = 0
  protocol: int = PROTOCOL_VERSION


# What a learner says when it leaves since a standby takes its place.
HANDED_OVER = "handed over"


class Offer(NamedTuple):
  """A learner id, or the seat of one of its hosts, for a standby to claim."""

  number: int  # rises with each offer of a syncer
  learner_id: int
  prepare: int = 0  # incarnation that still trains, 0: claim the id now
  rank: int = 0


@dataclasses.dataclass(frozen=True)
class Sitting:
  """What a host of a learner of several says of itself, as whole state.

  Attributes:
    learner_id: whose host it is.
    rank: its seat.
    hosts: of the learner.
    holder: `host:pid`.
    epoch: that it is in, 0 for none.
    left: the newest epoch that has broken under it, 0 for none.
    ready: the epoch that it is about to connect to, 0 for none.
    stepped: the newest epoch in which it has finished a step, 0 for none.
    address: where it serves the copies that it holds.
    copies: (epoch, step) of each of them.
    protocol: version of the wire protocol.
  """

  learner_id: int
  rank: int
  hosts: int
  holder: str
  epoch: int = 0
  left: int = 0
  ready: int = 0
  stepped: int = 0
  address: str = ""
  copies: tuple[tuple[int, int], ...] = ()
  protocol: int = PROTOCOL_VERSION


class Seat(NamedTuple):
  """A host's seat, as its peers need to know it; `holder` "" is nobody."""

  holder: str
  address: str = ""
  copies: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class SeatWord:
  """Everything the syncer has to say to the hosts of one learner.

  Attributes:
    epoch: the newest one that was proposed.
    state: what has become of it (`syncer.seats.State`).
    why: in a sentence.
    seats: by rank.
    phase: of the run.
  """

  epoch: int
  state: str
  why: str
  seats: tuple[Seat, ...]
  phase: Phase


@dataclasses.dataclass(frozen=True)
class PoolWord:
  """Everything the syncer has to say to one standby; replaces the last word.

  Attributes:
    run_id: the run.
    phase: where it is.
    versions: newest version of each fragment; none before the model is cut.
    offer: the id to claim or prepare for, None to go on waiting.
    heartbeat_s: how often to say something.
  """

  run_id: str
  phase: Phase
  versions: tuple[Version, ...]
  offer: Offer | None
  heartbeat_s: float


@dataclasses.dataclass(frozen=True)
class Welcome:
  """The syncer's answer to an accepted claim.

  Attributes:
    learner_id: the id granted.
    incarnation: the fencing number granted.
    run_id: the run.
    term: the syncer's term.
    manifest: fragments and owners.
    contract: the run's contract, `key -> value`.
    lease_s: silence after which the claim lapses.
    heartbeat_s: how often to show life.
    position: data position at which to go on.
    has_history: the run has merged parameters; never start it from fresh ones.
  """

  learner_id: int
  incarnation: int
  run_id: str
  term: int
  manifest: Manifest
  contract: tuple[tuple[str, str], ...]
  lease_s: float
  heartbeat_s: float
  position: tuple[int, int]
  has_history: bool


class EventSink(Protocol):
  """Where notable facts go; `observe.events` writes them to events.jsonl."""

  def emit(self, kind: str, **fields: object) -> None: ...
