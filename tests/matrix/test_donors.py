"""Donors, joiners and the syncer between them fail while a state moves.

A learner that dies joins again, and a joiner asks for a state: each death here
is the occasion for the next fault.
"""

from pathlib import Path

import pytest

from tests.matrix import invariants
from tests.matrix.boots import boot
from tests.run.processes import Processes


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_donors_and_joiners(tmp_path: Path, processes: Processes) -> None:
  chains = {
    "learner/0": ["donor.donating:kill:1"],
    "learner/1": [
      "link.adopting:kill:30",
      "donor.receiving:kill:2",
      "donor.receiving:cut:2",
      "link.adopting:kill:30",
      "donor.receiving:stop:2:1",
      "link.adopting:kill:30",
      "donor.receiving:term:2",
    ],
    "learner/2": ["donor.donating:cut:1"],
    "syncer": ["syncer.relaying:cut:2", "syncer.relaying:kill:2"],
  }
  job = boot(tmp_path, processes, chains)
  invariants.ended_by_signal(job)
  invariants.check(job)
