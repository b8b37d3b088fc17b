"""The kill matrix: each fault at each point, of learners and of the syncer.

`make test-matrix` runs it; the default suite has a part of it (test_quick).
"""

from pathlib import Path

import pytest

from tests.matrix import invariants
from tests.matrix.boots import LEARNERS, boot, chain
from tests.run.processes import Processes

pytestmark = pytest.mark.matrix

CHECKPOINT = (
  "checkpoint.begun",
  "checkpoint.half_written",
  "checkpoint.file",
  "checkpoint.before_commit",
  "checkpoint.committed",
)
LEARNER = (
  "link.joined",
  "link.before_report",
  "link.after_report",
  "link.extracting",
  "link.landed",
  "link.pull_received",
  "link.staged",
  "link.adopting",
  "wire.half_sent",
  "wire.half_received",
  *CHECKPOINT,
)
SYNCER = (
  "syncer.granted",
  "syncer.report_received",
  "syncer.half_received",
  "syncer.received",
  "syncer.half_sent",
  "syncer.merging",
  "syncer.merged",
  "syncer.before_broadcast",
  "syncer.renewing",
  *CHECKPOINT,
)
# passed once at each connection: a cut first, and a start after each death
ONCE = ("link.joined", "syncer.granted")
# at the end of a run each point is passed once
LEARNER_END = ("link.drained", "learner.finished")
SYNCER_END = ("syncer.draining", "syncer.ended")


@pytest.mark.timeout(1800)
def test_learners(tmp_path: Path, processes: Processes) -> None:
  """Three learners, each with its part of the points, side by side."""
  chains = {
    f"learner/{i}": [
      fault
      for point in LEARNER[i::LEARNERS]
      for fault in chain(
        [point],
        ("cut", "kill", "term", "stop"),
        1 if point in ONCE else 3,
      )
    ]
    for i in range(LEARNERS)
  }
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
  if part:
    faults.append("syncer.restored:stop:1")  # passed after a kill
  job = boot(tmp_path, processes, {"syncer": faults})
  invariants.ended_by_signal(job)
  invariants.check(job)
