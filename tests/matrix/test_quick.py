"""A part of the kill matrix that is quick enough for every change."""

from pathlib import Path

import pytest

from tests.matrix import invariants
from tests.matrix.boots import boot
from tests.run.processes import Processes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fault_of_each_kind_in_each_role(
  tmp_path: Path, processes: Processes
) -> None:
  job = boot(
    tmp_path,
    processes,
    {
      "learner/0": ["link.adopting:stop:20:5", "wire.half_sent:kill:30"],
      "learner/1": ["link.landed:cut:20", "checkpoint.file:term:3"],
      "syncer": ["syncer.half_received:cut:60", "syncer.merged:kill:60"],
    },
  )
  invariants.ended_by_signal(job)
  invariants.check(job)
