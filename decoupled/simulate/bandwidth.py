"""Gbit/s of data-parallel and decoupled jobs, from `traffic`'s formulas.

Five billion parameters and steps of one second, the size that the published
decoupled figures agree with (its int4 and 8-bit cells are marked as fitted
for that). No source gives size, precision or algorithm behind the published
data-parallel figures; a ring of bfloat16 gradients has their order only.
"""

import time

from decoupled.algorithm.policy import Exchange
from decoupled.simulate import traffic
from decoupled.simulate.result import Cell, PresetResult

PARAMS = 5e9
STEP_S = 1.0
SITES = 8
_GIGA = 1e9
# Published by codec and by what they are of; Gbit/s.
_DATA_PARALLEL = (
  ("8 datacentres", 198.0),
  ("steps of 1 s", 104.0),
)
_DECOUPLED = {"int8": 1.7, "int4": 0.84}


def run(
  *, repeats: int = 1, seed: int = 0, quick: bool = False
) -> PresetResult:
  """Formulas only: nothing is random, so no argument changes anything."""
  del repeats, seed, quick
  began = time.perf_counter()
  rule = Exchange()
  ring = traffic.data_parallel_bps(
    PARAMS, traffic.CODEC_BITS["bfloat16"], SITES, STEP_S
  )
  cells = [
    _cell("dp_elastic", subject, ring, published, "bfloat16 ring")
    for subject, published in _DATA_PARALLEL
  ]
  round_s = rule.H / rule.P * STEP_S
  for codec, bits in traffic.CODEC_BITS.items():
    rate = traffic.learner_bps(PARAMS, bits, rule, round_s)
    note = f"1/{ring / rate:.0f} of data-parallel"
    cells.append(_cell("decoupled", codec, rate, _DECOUPLED.get(codec), note))
  return PresetResult(
    preset="bandwidth",
    cells=tuple(cells),
    constants={
      "params": PARAMS,
      "step_s": STEP_S,
      "sites": SITES,
      "H": rule.H,
      "P": rule.P,
    },
    wall_s=time.perf_counter() - began,
    note=(
      "Gbit/s per learner (site) and direction. Published reductions are 60 "
      "to 242 times; size and precision behind the data-parallel figures are "
      "in no source."
    ),
  )


def _cell(
  policy: str, subject: str, bps: float, published: float | None, note: str
) -> Cell:
  rate = bps / _GIGA
  return Cell(
    policy=policy,
    learners=1 if policy.startswith("dp_") else SITES,
    chips=0,
    simulated=rate,
    published=published,
    fitted=policy == "decoupled" and published is not None,
    low=rate,
    high=rate,
    note=note,
    subject=subject,
    quantity="bandwidth",
    unit="Gbit/s",
  )
