"""Faults of a donation: of who gives, of who receives, and of what is between.

A donation happens when a learner comes back, so each fault has a death for its
occasion (see `boots`). Who has failed to give is not asked again by the same
joiner: after two failures in a row none of two others is left, and the joiner
goes on from its own checkpoint. The invariants know when that is right.
"""

from pathlib import Path

import pytest

from tests.matrix import invariants
from tests.matrix.boots import LONG_S, SHORT_S, boot
from tests.matrix.points import DONOR, JOINER, RELAY
from tests.run.processes import Processes

ASKED, DONATING = DONOR


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_donors_and_joiners(tmp_path: Path, processes: Processes) -> None:
  job = boot(
    tmp_path,
    processes,
    {
      # the first to come back finds both others armed, and none left
      "learner/2": [
        f"{JOINER}:kill:3",
        f"{JOINER}:stop:3:{SHORT_S}",
        f"{JOINER}:term:3",
        f"{JOINER}:cut:3",
        f"{JOINER}:stop:3:{LONG_S}",
      ],
      "learner/0": [
        f"{DONATING}:kill:1",
        f"{DONATING}:stop:1:{SHORT_S}",
        f"{ASKED}:term:1",
        f"{ASKED}:cut:1",
        f"{DONATING}:stop:1:{LONG_S}",
      ],
      "learner/1": [
        f"{DONATING}:kill:1",
        f"{ASKED}:stop:1:{LONG_S}",
        f"{ASKED}:kill:1",
        f"{DONATING}:term:1",
        f"{DONATING}:cut:1",
      ],
    },
    occasions=True,
  )
  invariants.ended_by_signal(job)
  invariants.check(job)
  sources = [e["state_source"] for e in job.of("ready")]
  assert {"donor", "checkpoint"} <= set(sources)
  assert {e["ok"] for e in job.of("donation")} == {True, False}


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_the_relay(tmp_path: Path, processes: Processes) -> None:
  faults = [
    f"{RELAY}:{action}" for action in ("cut:2", "kill:2", "term:2", "stop:2:1")
  ]
  job = boot(tmp_path, processes, {"syncer": faults}, occasions=True)
  invariants.ended_by_signal(job)
  invariants.check(job)
