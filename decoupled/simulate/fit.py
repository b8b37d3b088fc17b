"""Finds the three constants that no paper gives.

Run it with `python -m decoupled.simulate.fit`. It takes two minutes and takes
the least sum of fourth powers of the errors in the ten data-parallel cells of
the published goodput table (it is the largest error that must be small), on a
grid, always with the same random failures. The twenty decoupled cells take no
part; they are predictions.
"""

import dataclasses
import itertools
from collections.abc import Iterable

from decoupled.simulate import table1
from decoupled.simulate.engine import simulate
from decoupled.simulate.scenario import Recovery

_SEED = 1
_INTERRUPTIONS = 12_000  # simulated per cell


def error_of(policy: str, recovery: Recovery, interruptions: int) -> float:
  """Sum over a policy's cells of fourth powers of differences in points."""
  total = 0.0
  for cell in table1.PUBLISHED:
    if cell.policy != policy:
      continue
    scenario = dataclasses.replace(
      table1.scenario(cell, interruptions), recovery=recovery
    )
    found = simulate(scenario, _SEED).goodput
    total += (100 * (found - cell.goodput)) ** 4
  return total


def rigid(
  candidates: Iterable[float] = range(72, 84),
  interruptions: int = 3 * _INTERRUPTIONS,
) -> float:
  """The best `restart_s`, whole seconds."""

  def error(seconds: float) -> float:
    recovery = Recovery(restart_s=seconds)
    return error_of("dp_rigid", recovery, interruptions)

  return min(candidates, key=error)


def elastic(
  stops: Iterable[float] = (18, 18.5, 19, 19.5, 20, 20.5),
  waits: Iterable[float] = range(40, 101, 10),
  interruptions: int = _INTERRUPTIONS,
) -> tuple[float, float]:
  """The best stop (down and up alike) and `rejoin_s`."""

  def error(pair: tuple[float, float]) -> float:
    stop, wait = pair
    recovery = Recovery(scale_down_s=stop, scale_up_s=stop, rejoin_s=wait)
    return error_of("dp_elastic", recovery, interruptions)

  return min(itertools.product(stops, waits), key=error)


def main() -> None:
  stop, wait = elastic()
  print(f"RIGID_RESTART_S = {rigid():.1f}")
  print(f"ELASTIC_STOP_S = {stop:.1f}")
  print(f"ELASTIC_REJOIN_S = {wait:.1f}")


if __name__ == "__main__":
  main()
