"""The plan: what it recommends, and that its reasons are true."""

import dataclasses
import json
import pathlib

import pytest

from decoupled import cli
from decoupled.algorithm.policy import Exchange
from decoupled.simulate import link_budget, planner
from decoupled.simulate.plan import Plan
from decoupled.simulate.scenario import Failures, Recovery, Scenario

# 20,000 chips that fail once a month: an interruption every two minutes.
JOB = Scenario(
  chips=20_000,
  days=0.5,
  params=1e9,
  price_chip_hour=2.0,
  failures=Failures(mtbi_chip_days=30.0),
)


@pytest.fixture(scope="module")
def found() -> Plan:
  return planner.plan(JOB, 100.0, quick=True)


def _value(found: Plan, name: str) -> str:
  (value,) = [c.value for c in found.choices if c.name == name]
  return value


def test_every_choice_has_a_value_and_a_reason(found: Plan) -> None:
  names = [c.name for c in found.choices]
  assert names == ["learners", "quorum", "standbys", "codec", "H"]
  assert all(len(c.reason) > 15 for c in found.choices)


def test_the_chosen_point_is_what_the_choices_say(found: Plan) -> None:
  point = found.curve[found.chosen]
  assert point.policy == "decoupled"
  assert str(point.learners) == _value(found, "learners")
  assert str(point.quorum) == _value(found, "quorum")
  assert str(point.standbys) == _value(found, "standbys")


def test_learners_are_doubled_while_that_pays() -> None:
  """Here a swap takes as long as a stop, so that no standby is worth it."""
  job = dataclasses.replace(JOB, slice_chips=4)
  job = dataclasses.replace(job, recovery=Recovery(swap_s=300.0))
  found = planner.plan(job, 100.0, quick=True)
  assert _value(found, "standbys") == "0"
  price = {
    p.learners: p.price
    for p in found.curve
    if p.policy == "decoupled" and p.quorum == 1
  }
  chosen = int(_value(found, "learners"))
  assert chosen > 1
  for many in price:
    if many <= chosen and many // 2 in price:
      assert price[many] <= price[many // 2] * 0.99
  if 2 * chosen in price:
    assert price[2 * chosen] > price[chosen] * 0.99


def test_standbys_make_do_with_fewer_learners() -> None:
  failures = Failures(mtbi_chip_days=365.0, return_s=7200.0)
  job = Scenario(chips=100_000, days=7.0, failures=failures)
  found = planner.plan(job, 100.0, quick=True)
  chosen = found.curve[found.chosen]
  assert chosen.standbys > 0
  plain = [p for p in found.curve if p.policy == "decoupled"]
  # The sweep without standbys has doubled further.
  assert chosen.learners < max(p.learners for p in plain)
  (twice,) = [
    p
    for p in plain
    if p.learners == 2 * chosen.learners
    and p.quorum == 1
    and abs(p.standbys - chosen.standbys) <= 2
  ]
  assert twice.price > chosen.price * 0.985


def test_it_beats_data_parallel_training(found: Plan) -> None:
  best = found.curve[found.chosen]
  others = {p.policy: p.price for p in found.curve}
  assert best.price < others["dp_elastic"] < others["dp_rigid"]


def test_standbys_are_chosen_where_they_pay(found: Plan) -> None:
  point = found.curve[found.chosen]
  (without,) = [
    p
    for p in found.curve
    if (p.learners, p.quorum, p.standbys) == (point.learners, 1, 0)
    and p.policy == "decoupled"
  ]
  assert point.price <= without.price * (1 + 1e-3)


def test_chips_that_never_fail_need_neither_standbys_nor_learners() -> None:
  job = dataclasses.replace(JOB, failures=Failures(mtbi_chip_days=float("inf")))
  found = planner.plan(job, 100.0, quick=True)
  assert _value(found, "learners") == "1"
  assert _value(found, "standbys") == "0"
  assert found.curve[found.chosen].goodput == 1


def test_the_need_of_a_link_by_hand() -> None:
  # 24e9 / 24 numbers of 4 bytes in half of two steps, 80 % busy.
  rule = Exchange(H=24, P=24, tau=2, codec="float32")
  assert link_budget.needed_gbps(rule, 24e9, 1.0) == pytest.approx(40.0)
  # tau = 4 gives two steps each way, but a fragment comes every step.
  rule = dataclasses.replace(rule, tau=4)
  assert link_budget.needed_gbps(rule, 24e9, 1.0) == pytest.approx(40.0)
  rule = dataclasses.replace(rule, H=48)
  assert link_budget.needed_gbps(rule, 24e9, 1.0) == pytest.approx(20.0)


@pytest.mark.parametrize(
  ("link", "codec", "h"),
  [(41.0, "float32", 24), (21.0, "bfloat16", 24), (19.0, "bfloat16", 48)],
)
def test_the_link_decides_codec_and_h(link: float, codec: str, h: int) -> None:
  job = dataclasses.replace(JOB, params=24e9, chips=64)
  found = planner.plan(job, link, quick=True)
  assert _value(found, "codec") == codec
  assert _value(found, "H") == str(h)
  assert f"Exchange.H={h}" in found.bindings
  assert not found.warnings


def test_a_link_that_cannot_do_it_is_a_warning() -> None:
  job = dataclasses.replace(JOB, params=1e13, chips=64)
  (warning,) = planner.plan(job, 1.0, quick=True).warnings
  assert "link is too slow" in warning
  assert "--link_gbps" in warning


def test_a_pool_is_for_failures_of_the_whole_job() -> None:
  """More failures want more standbys, until none is worth waiting for."""
  counts = []
  for days in (3000.0, 300.0, 30.0):
    job = dataclasses.replace(JOB, failures=Failures(mtbi_chip_days=days))
    counts.append(int(_value(planner.plan(job, 100.0, quick=True), "standbys")))
  assert counts == sorted(counts)
  assert counts[-1] > 0


def test_the_command(
  tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  config = tmp_path / "a.gin"
  config.write_text("Exchange.H = 48\nExchange.P = 48\n")
  arguments = ["simulate", "--plan", str(config), "--chips=2000", "--quick"]
  png = tmp_path / "curve.png"
  assert cli.main([*arguments, f"--plot={png}"]) == 0
  text = capsys.readouterr().out
  for word in ("learners", "quorum", "standbys", "codec", "H"):
    assert any(line.startswith(word) for line in text.splitlines())
  assert "Exchange.H=48" in text
  assert sum(line.startswith("->") for line in text.splitlines()) == 1
  assert png.read_bytes().startswith(b"\x89PNG")
  assert cli.main([*arguments, "--json", "--mtbi_days=100"]) == 0
  table = json.loads(capsys.readouterr().out)
  assert table["inputs"]["mtbi_days"] == 100
  assert table["curve"][table["chosen"]]["policy"] == "decoupled"
