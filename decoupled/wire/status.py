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
class JobStatus:
  """A run.

  Attributes:
    run_id: which.
    phase: where it is.
    bytes_up: from learners to this syncer so far.
    bytes_down: the other way.
    learners: those connected.
  """

  run_id: str
  phase: Phase
  bytes_up: int
  bytes_down: int
  learners: tuple[LearnerStatus, ...]
