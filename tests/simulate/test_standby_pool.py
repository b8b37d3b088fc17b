"""How many standbys are enough, against the recovered heat map."""

import pytest

from decoupled.simulate import projection, standby_pool


def _figures(quantity: str) -> list[float]:
  result = standby_pool.run()
  return [c.simulated for c in result.cells if c.quantity == quantity]


def test_the_best_number_of_standbys_by_size() -> None:
  assert _figures("best standbys") == [0, 1, 2, 2, 4, 7]


def test_what_the_best_pool_gains() -> None:
  gains = _figures("net gain")
  assert gains[0] == 0
  assert gains[1:] == pytest.approx(
    [240, 1_472, 3_289, 13_198, 50_980], rel=5e-4
  )


def test_cells_match_what_was_published() -> None:
  for cell in standby_pool.run().cells:
    assert cell.fitted
    if cell.published is not None:
      assert cell.simulated == pytest.approx(cell.published, rel=5e-4)


def test_one_standby_catches_nearly_all_at_64k_and_less_beyond() -> None:
  """1 - p^2 of failures find a single standby ready."""
  for gpus, covered in ((65_536, 0.96), (131_072, 0.88)):
    between = standby_pool.HEAT_MAP[gpus][0]
    worth = gpus * standby_pool.SAVED_S / between
    gain = projection.standby_gain(
      gpus, 1, between, standby_pool.SAVED_S, standby_pool.BACK_S
    )
    assert (gain + 8) / worth == pytest.approx(covered, abs=5e-3)


def test_a_pool_that_is_not_there_saves_nothing() -> None:
  assert projection.standby_gain(65_536, 0, 1620.0, 300.0, 360.0) == 0


def test_more_failures_never_want_fewer_standbys() -> None:
  counts = [
    projection.best_standbys(65_536, between, 300.0, 360.0)
    for between in (1e6, 1e5, 1e4, 3e3, 1e3, 3e2)
  ]
  assert counts == sorted(counts)
