"""The kill matrix: each fault at each point, of learners and of the syncer.

`make test-matrix` runs it; the default suite has a part of it (test_quick).
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.matrix import invariants
from tests.matrix.boots import LEARNERS, boot, chain
from tests.matrix.points import LEARNER, ONCE, START, SYNCER, TRAINING
from tests.run.processes import Processes

pytestmark = pytest.mark.matrix


@pytest.mark.timeout(1800)
def test_learners(tmp_path: Path, processes: Processes) -> None:
  """Three learners, each with its part of the points, side by side."""
  chains = {f"learner/{i}": _of(LEARNER[i::LEARNERS]) for i in range(LEARNERS)}
  job = boot(tmp_path, processes, chains)
  invariants.ended_by_signal(job)
  invariants.check(job)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", [0, 1])
def test_syncer(tmp_path: Path, processes: Processes, part: int) -> None:
  faults = [
    fault
    for point in SYNCER[part::2]
    for fault in chain(
      [point], ("cut", "kill", "stop"), 1 if point in ONCE else 3
    )
  ]
  if part:  # what only a syncer passes that has died before
    # and saved: after the death in a merge
    faults[8:8] = ["syncer.restored:kill:1", "syncer.restored:stop:1"]
  job = boot(tmp_path, processes, {"syncer": faults})
  invariants.ended_by_signal(job)
  invariants.check(job)


ROUNDS = 60


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
  "chains",
  [
    {
      "learner/0": ["link.drained:kill:1"],
      "learner/1": ["link.drained:cut:1"],
      "syncer": ["syncer.ended:cut:1"],
    },
    {
      "learner/0": ["learner.finished:kill:1"],
      "learner/1": ["learner.finished:term:1"],
      "learner/2": ["learner.finished:stop:1"],
      "syncer": ["syncer.draining:stop:1", "syncer.ended:stop:1"],
    },
    {
      "learner/0": ["link.drained:term:1"],
      "learner/1": ["link.drained:stop:1"],
      "learner/2": ["learner.finished:cut:1"],
    },
    {"syncer": ["syncer.draining:kill:1", "syncer.draining:cut:1"]},
    {"syncer": ["syncer.ended:kill:1"]},
  ],
  ids=["drained", "finished", "leaving", "draining", "ended"],
)
def test_the_end(
  tmp_path: Path, processes: Processes, chains: dict[str, list[str]]
) -> None:
  job = boot(tmp_path, processes, chains, ROUNDS)
  invariants.ended_by_itself(job, ROUNDS)
  invariants.check(job)


def _of(points: Sequence[str]) -> list[str]:
  """Four faults at each point.

  What is passed once a connection is passed again after a death only: a cut may
  be healed by gRPC alone, and a stop that is short is not noticed. What is also
  passed by each fragment at the start waits until training: the runner gives
  up a process that dies again and again before it is ready.
  """
  found: list[str] = []
  later: list[str] = []
  for point in points:
    if point in ONCE:
      found += chain([point], ("kill", "term", "cut"), 1)
      later += chain([point], ("stop",), 1)
      continue
    passing = TRAINING if point in START else 3
    found += chain([point], ("cut", "kill"), passing)
    found, later = found + later, []
    found += chain([point], ("term", "stop"), passing)
  return found
