"""Donors, joiners and the syncer between them fail while a state moves.

A storm keeps learners joining, so that there is always somebody to give to.
"""

from pathlib import Path

import pytest

from tests.matrix import invariants
from tests.matrix.boots import LEARNERS, boot
from tests.run.processes import Processes


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_donors_and_joiners(tmp_path: Path, processes: Processes) -> None:
  ways = ("cut:1", "kill:1", "term:1", "stop:1:1")
  both = [
    f"donor.{what}:{way}" for way in ways for what in ("donating", "receiving")
  ]
  chains = {f"learner/{i}": both for i in range(LEARNERS)}
  chains["syncer"] = [f"syncer.relaying:{way}" for way in (*ways[:2], ways[3])]
  job = boot(tmp_path, processes, chains, 0, "--chaos=storm 200/h seed 1")
  invariants.ended_by_signal(job)
  invariants.check(job)
