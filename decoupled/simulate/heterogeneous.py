"""Learners of two speeds: what a quorum of all costs, and what grace repairs.

Eight learners, four of them 18 % slower, each with its own deviation of 10 %:
a standard deviation of its step time, held for ten minutes at a time. Nobody
fails. Nothing here is fitted.
"""

import math
import time

from decoupled.simulate.engine import repeat
from decoupled.simulate.outcome import Summary
from decoupled.simulate.result import Cell, PresetResult
from decoupled.simulate.scenario import Failures, Scenario

GAP = 0.18
SPREAD = 0.10
_EACH = 4  # learners of each kind
_CHIPS = 1024  # of each learner
# Quorum, grace, published goodput (Decoupled DiLoCo, section 6.5 of our notes).
_ROWS = ((2 * _EACH, True, 0.84), (1, False, 1.0), (1, True, 1.0))


def scenario(quorum: int, grace: bool, days: float) -> Scenario:
  """The job with that quorum, as the paper runs it: nobody extracts early."""
  return Scenario(
    chips=2 * _EACH * _CHIPS,
    learners=2 * _EACH,
    quorum=quorum,
    grace=grace,
    days=days,
    speeds=(1.0,) * _EACH + (1.0 + GAP,) * _EACH,
    speed_spread=SPREAD,
    early_slack=math.inf,
    failures=Failures(mtbi_chip_days=math.inf),
  )


def run(
  *, repeats: int = 4, seed: int = 0, quick: bool = False
) -> PresetResult:
  """Goodput and participation of the three settings."""
  began = time.perf_counter()
  cells = []
  for quorum, grace, published in _ROWS:
    job = scenario(quorum, grace, 1.0 if quick else 7.0)
    cells.extend(_cells(job, repeat(job, repeats, seed), published))
  return PresetResult(
    preset="heterogeneous",
    cells=tuple(cells),
    constants={"speed_gap": GAP, "speed_spread": SPREAD},
    wall_s=time.perf_counter() - began,
    note=(
      "goodput counts each learner's work against its own speed. The 10 % "
      "are read as a standard deviation per learner, held for 10 minutes. "
      "Participation has no published figure; that K = 1 without grace "
      "merges few is why its model is worse."
    ),
  )


def _cells(job: Scenario, found: Summary, published: float) -> list[Cell]:
  # Once all are there, nobody is left to wait for.
  all_needed = job.quorum == job.learners
  grace = " with grace" if job.grace and not all_needed else ""
  label = f"K = {job.quorum}{grace}"
  goodput = Cell(
    policy=job.policy,
    learners=job.learners,
    chips=job.chips,
    simulated=found.goodput,
    published=published,
    fitted=False,
    low=found.goodput_low,
    high=found.goodput_high,
    subject=label,
  )
  participation = Cell(
    policy=job.policy,
    learners=job.learners,
    chips=job.chips,
    simulated=found.participation,
    published=None,
    fitted=False,
    low=found.participation_low,
    high=found.participation_high,
    subject=label,
    quantity="participation",
  )
  return [goodput, participation]
