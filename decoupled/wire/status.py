"""A running job at a glance, as the syncer answers `status`."""

import dataclasses

from decoupled.types import Phase, Stage


@dataclasses.dataclass(frozen=True)
class LearnerStatus:
  """A connected learner.

  Attributes:
    learner_id: who.
    incarnation: under which fencing number.
    holder: `host:pid`.
    hosts: number of hosts.
    stage: what it is doing.
    step: inner steps of this incarnation.
    tokens: tokens of this incarnation.
    silent_s: seconds since it was last heard.
  """

  learner_id: int
  incarnation: int
  holder: str
  hosts: int
  stage: Stage
  step: int
  tokens: int
  silent_s: float


@dataclasses.dataclass(frozen=True)
class StandbyStatus:
  """A standby in the pool.

  Attributes:
    name: as its runner calls it.
    holder: `host:pid`.
    fingerprint: of what it has compiled.
    missing: what it still does before it is ready ("" = it is).
    since_s: how long it has been so, seconds.
  """

  name: str
  holder: str
  fingerprint: str
  missing: str
  since_s: float


@dataclasses.dataclass(frozen=True)
class JobStatus:
  """A run.

  Attributes:
    run_id: which.
    phase: where it is.
    bytes_up: from learners to this syncer so far.
    bytes_down: the other way.
    learners: those connected.
    standbys: those in the pool.
    vacant: a sentence for each id that has lost its learner.
  """

  run_id: str
  phase: Phase
  bytes_up: int
  bytes_down: int
  learners: tuple[LearnerStatus, ...]
  standbys: tuple[StandbyStatus, ...] = ()
  vacant: tuple[str, ...] = ()
