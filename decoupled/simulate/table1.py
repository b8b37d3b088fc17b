"""The published goodput table: five sizes, six ways of training.

One interruption per chip and year; 150k to 2.4M chips. Three constants are
fitted to the data-parallel cells (see `fit`), the decoupled cells follow.
"""

import dataclasses
import time
from collections.abc import Sequence

from decoupled.simulate import scenario as settings
from decoupled.simulate.engine import repeat
from decoupled.simulate.result import Cell, PresetResult
from decoupled.simulate.scenario import Scenario

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
# Percent at those sizes, by policy and learners (Decoupled DiLoCo, Table 1).
_PERCENT = {
  ("dp_rigid", 1): (72, 57, 38, 27, 18),
  ("dp_elastic", 1): (88, 80, 69, 58, 40),
  ("decoupled", 2): (94, 88, 80, 70, 54),
  ("decoupled", 4): (96, 93, 89, 82, 73),
  ("decoupled", 8): (98, 96, 94, 88, 80),
  ("decoupled", 16): (99, 98, 96, 93, 86),
}
_MOST_DAYS = 60.0


@dataclasses.dataclass(frozen=True)
class Published:
  """A cell as published; goodput as a fraction."""

  policy: str
  learners: int
  chips: int
  goodput: float


PUBLISHED = tuple(
  Published(policy, learners, chips, percent / 100)
  for (policy, learners), row in _PERCENT.items()
  for chips, percent in zip(CHIPS, row, strict=True)
)


def scenario(cell: Published, interruptions: int) -> Scenario:
  """A cell's job, long enough for about so many interruptions."""
  mtbi = Scenario().failures.mtbi_chip_days
  return Scenario(
    policy=cell.policy,
    learners=cell.learners,
    chips=cell.chips,
    days=min(_MOST_DAYS, interruptions * mtbi / cell.chips),
    sampled_rounds=200,
  )


def run(
  *,
  repeats: int = 4,
  seed: int = 0,
  quick: bool = False,
  cells: Sequence[Published] = PUBLISHED,
) -> PresetResult:
  """Simulates the cells.

  Args:
    repeats: simulations of each.
    seed: of all.
    quick: fewer interruptions in each simulation.
    cells: which of them.
  """
  began = time.perf_counter()
  found = []
  for cell in cells:
    # One job as a whole is noisier than the mean over many learners.
    interruptions = 12_000 if cell.learners == 1 else 3000
    job = scenario(cell, interruptions // (5 if quick else 1))
    summary = repeat(job, repeats, seed)
    found.append(
      Cell(
        policy=cell.policy,
        learners=cell.learners,
        chips=cell.chips,
        simulated=summary.goodput,
        published=cell.goodput,
        fitted=cell.policy.startswith("dp_"),
        low=summary.goodput_low,
        high=summary.goodput_high,
      )
    )
  return PresetResult(
    preset="table1",
    cells=tuple(found),
    constants={
      "rigid_restart_s": settings.RIGID_RESTART_S,
      "elastic_stop_s": settings.ELASTIC_STOP_S,
      "elastic_rejoin_s": settings.ELASTIC_REJOIN_S,
    },
    wall_s=time.perf_counter() - began,
    note=(
      "the three constants are fitted to the data-parallel cells only; the "
      "decoupled cells are predictions. Return of failed chips (10 minutes "
      "on average) and slices of 64 chips are assumed; they cost 0.1 %."
    ),
  )
