"""Training time with extra chips for a part of the run.

A job of four learners gets one, two, four or twelve more while it processes a
share of its tokens. Its time, relative to no extra chips, is

  (1 - share) + share x goodput(N) / ((1 + extra) x goodput((1 + extra) N))

with the goodputs simulated. The share is in no source: it is read off one
published cell (+100 %, decoupled), which is marked as fitted.

What is not predicted: a data-parallel job that grows also changes its batch,
or splits it finer, and reshards over slower links; the published times rise
above 1 for that reason. No source gives those costs, so here data-parallel
only pays for its interruptions, and its cells are a lower bound.
"""

import time

from decoupled.simulate.engine import repeat
from decoupled.simulate.outcome import Summary
from decoupled.simulate.result import Cell, PresetResult
from decoupled.simulate.scenario import Scenario

SHARE = 0.5
_CHIPS = 150_000
_LEARNERS = 4
# Extra learners, published times of data-parallel and decoupled jobs.
_ROWS = (
  (0, 1.00, 1.00),
  (1, 1.07, 0.90),
  (2, 1.09, 0.83),
  (4, 1.02, 0.75),
  (12, 0.80, 0.62),
)
_FITTED_ROW = 4


def relative_time(extra: float, goodput: float, grown: float) -> float:
  """The formula above.

  Args:
    extra: extra chips / chips.
    goodput: without them.
    grown: with them.
  """
  return 1 - SHARE + SHARE * goodput / ((1 + extra) * grown)


def run(
  *, repeats: int = 3, seed: int = 0, quick: bool = False
) -> PresetResult:
  """Both policies at all five sizes."""
  began = time.perf_counter()
  cells = []
  for policy, column in (("dp_elastic", 1), ("decoupled", 2)):
    base: Summary | None = None
    for row in _ROWS:
      job = _scenario(policy, row[0], quick)
      found = repeat(job, repeats, seed)
      base = base or found
      cells.append(_cell(job, base, found, row[0], row[column]))
  return PresetResult(
    preset="scavenging",
    cells=tuple(cells),
    constants={"scavenged_share_of_tokens": SHARE},
    wall_s=time.perf_counter() - began,
    note=(
      "the share of tokens is read off the decoupled +100 % cell; the other "
      "decoupled cells are predictions. Data-parallel cells leave out what a "
      "changed batch and slower links cost, which no source gives: they are a "
      "lower bound, not a prediction."
    ),
  )


def _scenario(policy: str, more: int, quick: bool) -> Scenario:
  chips = _CHIPS * (_LEARNERS + more) // _LEARNERS
  interruptions = 500 if quick else 3000
  learners = 1 if policy == "dp_elastic" else _LEARNERS + more
  return Scenario(
    policy=policy,
    chips=chips,
    learners=learners,
    days=interruptions * Scenario().failures.mtbi_chip_days / chips,
    sampled_rounds=100,
  )


def _cell(
  job: Scenario, base: Summary, found: Summary, more: int, published: float
) -> Cell:
  extra = more / _LEARNERS

  def relative(grown: float) -> float:
    return relative_time(extra, base.goodput, grown) if more else 1.0

  data_parallel = job.policy == "dp_elastic"
  return Cell(
    policy=job.policy,
    learners=job.learners,
    chips=job.chips,
    simulated=relative(found.goodput),
    published=published,
    fitted=not data_parallel and more == _FITTED_ROW,
    low=relative(found.goodput_high),
    high=relative(found.goodput_low),
    note="lower bound, not a prediction" if data_parallel and more else "",
    subject=f"+{100 * extra:.0f} %",
    quantity="relative time",
  )
