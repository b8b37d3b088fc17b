"""The projection to 64K GPUs against every figure it has to reproduce."""

import pytest

from decoupled.errors import ConfigError
from decoupled.simulate import projection, trainmover_64k
from decoupled.simulate.result import Cell, PresetResult, as_json

# GPUs, published MTTF in minutes, 1 - 4.45 min / MTTF in %, wasted GPUs.
_LOST = [
  (8_192, 216, 97.94, 169),
  (16_384, 108, 95.88, 675),
  (32_768, 54, 91.76, 2_700),
  (65_536, 27, 83.52, 10_801),
  (131_072, 14, 68.21, 41_662),
]


@pytest.fixture(scope="module")
def result() -> PresetResult:
  return trainmover_64k.run()


def _find(
  result: PresetResult, mode: str, quantity: str, subject: str, gpus: int
) -> Cell:
  (cell,) = [
    c
    for c in result.cells
    if (c.mode, c.quantity, c.chips) == (mode, quantity, gpus)
    and c.subject.endswith(subject)
  ]
  return cell


@pytest.mark.parametrize(("gpus", "minutes", "percent", "wasted"), _LOST)
def test_the_cost_of_restarts(
  gpus: int, minutes: int, percent: float, wasted: int
) -> None:
  share = projection.linear_ettr(4.45, minutes)
  assert round(100 * share, 2) == pytest.approx(percent)
  assert round(gpus * (1 - share)) == wasted
  assert projection.mttf_s(gpus) / 60 == pytest.approx(minutes, rel=0.04)


@pytest.mark.parametrize(
  ("stall", "share"),
  [(16.6, 0.972), (348, 0.42), (192, 0.68), (6.0, 0.99)],
)
def test_rebalancing_every_ten_minutes(stall: float, share: float) -> None:
  assert projection.linear_ettr(stall, 600) == pytest.approx(share, abs=5e-4)


def test_the_shares_agree_for_short_stalls_and_differ_for_long_ones() -> None:
  assert projection.ettr(1, 1e4) == pytest.approx(
    projection.linear_ettr(1, 1e4), abs=1e-7
  )
  assert projection.ettr(600, 600) == 0.5
  assert projection.linear_ettr(1200, 600) == -1.0
  assert projection.ettr(1200, 600) > 0


def test_the_literal_stall() -> None:
  assert projection.mean_stall_s(16.6, 21.1, 120) == pytest.approx(
    140.6, abs=0.1
  )


def test_detection_and_rollback_are_paid_after_failures_alone() -> None:
  base = projection.mean_stall_s(10, 20)
  more = projection.mean_stall_s(10, 20, detect_s=5, rollback_s=7)
  assert more - base == pytest.approx(12 * 8.9 / 9.9)


@pytest.mark.parametrize(
  ("subject", "quantity", "published"),
  [
    ("against TrainMover, no standby", "saved share", 0.55),
    ("against Parcae", "saved share", 0.88),
    ("against Parcae", "saved", 1.4e6),
    ("against Megatron-LM", "saved share", 0.91),
    ("against Megatron-LM", "saved", 2.1e6),
  ],
)
def test_calibrated_savings_at_64k(
  result: PresetResult, subject: str, quantity: str, published: float
) -> None:
  cell = _find(result, "calibrated", quantity, subject, 65_536)
  assert cell.published == published
  assert cell.simulated == pytest.approx(published, rel=0.05)
  assert cell.fitted


@pytest.mark.parametrize("gpus", [8_192, 131_072])
def test_calibrated_savings_elsewhere(result: PresetResult, gpus: int) -> None:
  found = [
    c for c in result.cells if c.mode == "calibrated" and c.chips == gpus
  ]
  targets = [c for c in found if c.published is not None]
  assert len(targets) == 2
  for cell in targets:
    assert cell.published is not None
    assert cell.simulated == pytest.approx(cell.published, rel=0.05)


@pytest.mark.parametrize(
  ("subject", "wasted"),
  [
    ("TrainMover, standby", 0.203e6),
    ("TrainMover, no standby", 0.449e6),
    ("Parcae", 1.669e6),
    ("Megatron-LM", 2.31e6),
  ],
)
def test_waste_at_64k(
  result: PresetResult, subject: str, wasted: float
) -> None:
  cell = _find(result, "calibrated", "wasted", subject, 65_536)
  assert cell.simulated == pytest.approx(wasted, rel=3e-3)


def test_the_literal_reading_is_not_what_was_published(
  result: PresetResult,
) -> None:
  wasted = _find(result, "literal", "wasted", "TrainMover, standby", 65_536)
  assert wasted.simulated == pytest.approx(0.957e6, rel=1e-3)
  saved = _find(result, "literal", "saved share", "no standby", 65_536)
  assert saved.published == 0.55
  assert saved.simulated < 0.3
  assert not saved.fitted


def test_both_formulas_are_shown(result: PresetResult) -> None:
  linear = _find(result, "literal", "1 - D/MTTF", "Megatron-LM", 131_072)
  right = _find(result, "literal", "MTTF/(MTTF+D)", "Megatron-LM", 131_072)
  assert linear.simulated < right.simulated


def test_what_the_paper_leaves_out_costs_more(result: PresetResult) -> None:
  for subject in trainmover_64k.CALIBRATED_S:
    literal = _find(result, "literal", "MTTF/(MTTF+D)", subject, 65_536)
    complete = _find(result, "complete", "MTTF/(MTTF+D)", subject, 65_536)
    assert complete.simulated < literal.simulated


def test_quick_is_the_same_at_64k_only(result: PresetResult) -> None:
  quick = trainmover_64k.run(quick=True)
  assert {c.chips for c in quick.cells} == {65_536}
  assert list(quick.cells) == [c for c in result.cells if c.chips == 65_536]


def test_json_has_the_fixed_keys(result: PresetResult) -> None:
  table = as_json(result)
  assert {"preset", "cells", "constants", "wall_s"} <= set(table)
  wanted = {"policy", "learners", "chips", "simulated", "published"}
  assert wanted | {"fitted", "low", "high"} <= set(table["cells"][0])
  assert table["constants"]["calibrated_standby_stall_s"] == 29.7


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_times_have_to_be_above_zero(value: float) -> None:
  with pytest.raises(ConfigError, match=r"between_s = .* must be above 0"):
    projection.ettr(1.0, value)


def test_an_unknown_policy_is_no_cell() -> None:
  with pytest.raises(ConfigError, match="must be one of dp_rigid"):
    Cell("best", 1, 1, 0.5, None, False, 0.5, 0.5)


@pytest.mark.parametrize(
  ("load", "servers", "blocked"),
  [(1.0, 1, 0.5), (2.0, 2, 0.4), (10.0, 10, 0.21458), (3.0, 0, 1.0)],
)
def test_erlangs_loss_formula(
  load: float, servers: int, blocked: float
) -> None:
  assert projection.erlang_b(load, servers) == pytest.approx(blocked, rel=1e-4)


def test_the_best_pool_is_where_one_more_no_longer_pays() -> None:
  per_s, back_s, saved, host = 1 / 200, 3600.0, 30_000.0, 4
  best, served = projection.best_pool(per_s, back_s, saved, host)

  def worth(standbys: int) -> float:
    empty = projection.erlang_b(per_s * back_s, standbys)
    return per_s * saved * (1 - empty) - host * standbys

  assert best == max(range(200), key=worth)
  assert served == pytest.approx(1 - projection.erlang_b(per_s * back_s, best))
  assert projection.best_pool(per_s, back_s, 1.0, host) == (0, 0.0)
