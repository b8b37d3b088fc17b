"""The presets of the algorithm's paper, on reduced sizes."""

import pytest

from decoupled.simulate import (
  bandwidth,
  fit,
  heterogeneous,
  scavenging,
  scenario,
  table1,
)
from decoupled.simulate.result import as_json


@pytest.fixture(scope="module")
def table():
  return table1.run(repeats=3, quick=True)


def errors(table, fitted):
  return [
    abs(cell.simulated - cell.published)
    for cell in table.cells
    if cell.fitted == fitted
  ]


def test_the_goodput_table_is_met_within_its_limits(table):
  assert len(table.cells) == 30
  assert len(errors(table, fitted=True)) == 10
  assert max(errors(table, fitted=True)) <= 0.04
  assert max(errors(table, fitted=False)) <= 0.05
  every = errors(table, fitted=True) + errors(table, fitted=False)
  assert sum(every) / 30 <= 0.02


def test_only_data_parallel_cells_are_fitted_by_three_constants(table):
  assert {c.policy for c in table.cells if c.fitted} == {
    "dp_rigid",
    "dp_elastic",
  }
  assert len(table.constants) == 3
  plain = as_json(table)
  assert {"preset", "cells", "constants", "wall_s"} <= plain.keys()
  assert plain["cells"][0].keys() >= {
    "policy",
    "learners",
    "chips",
    "simulated",
    "published",
    "fitted",
    "low",
    "high",
  }


def test_every_cell_lies_in_its_interval(table):
  for cell in table.cells:
    assert cell.low <= cell.simulated <= cell.high


def test_the_fit_finds_the_constants_among_worse_ones():
  few = 1500
  assert fit.rigid((50, scenario.RIGID_RESTART_S, 110), few) == (
    scenario.RIGID_RESTART_S
  )
  assert fit.elastic(
    (12.0, scenario.ELASTIC_STOP_S, 28.0),
    (10.0, scenario.ELASTIC_REJOIN_S, 400.0),
    few,
  ) == (scenario.ELASTIC_STOP_S, scenario.ELASTIC_REJOIN_S)


def test_grace_brings_in_everybody_at_full_goodput():
  found = heterogeneous.run(repeats=2, quick=True)
  goodput = {c.subject: c for c in found.cells if c.quantity == "goodput"}
  for cell in goodput.values():
    assert cell.simulated == pytest.approx(cell.published, abs=0.02)
    assert not cell.fitted
  merged = {
    c.subject: c.simulated for c in found.cells if c.quantity != "goodput"
  }
  assert merged["K = 8"] == pytest.approx(1.0)
  assert merged["K = 1 with grace"] > 0.9
  assert merged["K = 1"] < 0.2


def test_scavenged_chips_shorten_a_decoupled_run_as_published():
  found = scavenging.run(repeats=1, quick=True)
  decoupled = [c for c in found.cells if c.policy == "decoupled"]
  assert [c.fitted for c in decoupled] == [False, False, False, True, False]
  for cell in decoupled:
    assert cell.simulated == pytest.approx(cell.published, abs=0.015)
  # No source says what growing costs a data-parallel job beyond its stops.
  for cell in found.cells[1:5]:
    assert cell.policy == "dp_elastic"
    assert cell.simulated < cell.published
    assert "not a prediction" in cell.note


def test_bandwidths_follow_the_formulas():
  found = bandwidth.run()
  rates = {(c.policy, c.subject): c for c in found.cells}
  assert rates["decoupled", "int4"].simulated == pytest.approx(0.84, rel=0.02)
  assert rates["decoupled", "int8"].simulated == pytest.approx(1.7, rel=0.03)
  assert rates["dp_elastic", "8 datacentres"].simulated == pytest.approx(140)
  assert {c.unit for c in found.cells} == {"Gbit/s"}
