"""How many standbys are enough: the pool that gains most, by job size.

The two times were recovered from the authors' heat map, so all is fitted.
"""

import time

from decoupled.simulate import projection
from decoupled.simulate.result import Cell, PresetResult

BACK_S = 6.0 * 60  # tau
SAVED_S = 327.15  # T_saved, about a restart of 348 s less a swap of 21 s

# GPUs -> (MTTF in seconds as the heat map has it, best number of standbys, net
# equivalent GPUs at the best).
HEAT_MAP: dict[int, tuple[float, int, float | None]] = {
  1_024: (28 * 3600.0, 0, None),
  8_192: (3 * 3600.0, 1, 240.0),
  16_384: (3600.0, 2, 1_472.0),
  32_768: (54 * 60.0, 2, 3_289.0),
  65_536: (27 * 60.0, 4, 13_198.0),
  131_072: (14 * 60.0, 7, 50_980.0),
}


def run(
  *, repeats: int = 1, seed: int = 0, quick: bool = False
) -> PresetResult:
  """Evaluates the closed form; nothing is random and nothing slow."""
  del repeats, seed, quick
  started = time.perf_counter()
  cells = []
  for gpus, (between, best, gain) in HEAT_MAP.items():
    found = projection.best_standbys(gpus, between, SAVED_S, BACK_S)
    net = projection.standby_gain(gpus, found, between, SAVED_S, BACK_S)
    one = projection.standby_gain(gpus, 1, between, SAVED_S, BACK_S)
    note = f"one alone gains {max(0.0, one):,.0f}"
    cells += [
      _cell(gpus, "best standbys", "machines", found, best),
      _cell(gpus, "net gain", "equivalent GPUs", net, gain, note),
    ]
  return PresetResult(
    "standby_pool",
    tuple(cells),
    {
      "tau_s": BACK_S,
      "t_saved_s": SAVED_S,
      "gpus_per_standby": float(projection.GPUS_PER_NODE),
    }
    | {f"mttf_{gpus}_s": row[0] for gpus, row in HEAT_MAP.items()},
    time.perf_counter() - started,
    "both times were recovered from the published heat map",
  )


def _cell(
  gpus: int,
  quantity: str,
  unit: str,
  value: float,
  published: float | None,
  note: str = "",
) -> Cell:
  return Cell(
    policy="dp_rigid",
    learners=1,
    chips=gpus,
    simulated=float(value),
    published=None if published is None else float(published),
    fitted=True,
    low=float(value),
    high=float(value),
    note=note,
    quantity=quantity,
    unit=unit,
  )
