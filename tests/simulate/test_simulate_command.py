"""`decoupled simulate` as people call it, in process."""

import importlib
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from decoupled import cli
from decoupled.errors import ConfigError
from decoupled.simulate import own, presets
from decoupled.simulate.scenario import Scenario

Simulate = Callable[..., str]
SMALL = ("--chips=2000", "--learners=4", "--days=2", "--repeats=2")


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Simulate:
  """Runs the command, which has to succeed; returns what it printed."""

  def run(*arguments: str) -> str:
    status = cli.main(["simulate", *arguments])
    done = capsys.readouterr()
    assert status == 0, done.err
    return done.out

  return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Simulate:
  """Runs the command, which has to fail; returns its one line."""

  def run(*arguments: str) -> str:
    assert cli.main(["simulate", *arguments]) != 0
    done = capsys.readouterr()
    assert done.out == ""
    (line,) = done.err.strip().splitlines()
    assert line.startswith("decoupled simulate: ")
    return str(line)

  return run


# ---- presets -----------------------------------------------------------------


def test_a_preset_prints_published_beside_simulated(simulate: Simulate) -> None:
  text = simulate("--preset=trainmover_64k", "--quick")
  head = next(line for line in text.splitlines() if "simulated" in line)
  assert head.index("simulated") < head.index("published")
  (row,) = [
    line.split()
    for line in text.splitlines()
    if "calibrated" in line and "Parcae" in line and "saved (GPU" in line
  ]
  assert "1,468,701" in row
  assert "1,400,000" in row
  assert row[-1] == "fitted"
  assert "constants: " in text
  assert "\x1b" not in text  # readable in a pipe


def test_a_preset_as_json(simulate: Simulate) -> None:
  table = json.loads(simulate("--preset", "standby_pool", "--json"))
  assert table["preset"] == "standby_pool"
  assert table["constants"]["tau_s"] == 360
  assert table["wall_s"] >= 0
  keys = {"policy", "learners", "chips", "simulated", "published"}
  for cell in table["cells"]:
    assert keys | {"fitted", "low", "high"} <= set(cell)


@pytest.mark.parametrize("name", sorted(presets.PRESETS))
def test_every_preset_runs_and_has_its_own_name(name: str) -> None:
  module = importlib.import_module(presets.PRESETS[name][0])
  assert module.run(repeats=1, seed=0, quick=True).preset == name


def test_an_unknown_preset_brings_the_nearest_and_the_list(
  refused: Simulate,
) -> None:
  line = refused("--preset=tabel1")
  assert "--preset = 'tabel1'" in line
  assert "did you mean table1?" in line
  for name in presets.PRESETS:
    assert name in line


def test_a_preset_fixes_its_scenarios(refused: Simulate) -> None:
  assert "drop --chips" in refused("--preset=standby_pool", "--chips=5")
  assert "drop --set" in refused(
    "--preset=standby_pool", "--set=Recovery.swap_s=1"
  )
  assert "exclude" in refused("--preset=standby_pool", "--plan")


# ---- one scenario ------------------------------------------------------------


def test_one_scenario_as_a_table(simulate: Simulate) -> None:
  text = simulate(*SMALL, "--params=5e9", "--price=2", "--tokens_per_chip_s=9")
  first = text.splitlines()[0]
  assert first.startswith("decoupled, 2,000 chips, 4 learners, quorum 1")
  rows = {line[:30].strip(): line[30:].split() for line in text.splitlines()}
  assert 99 < float(rows["goodput"][0]) <= 100
  assert rows["goodput"][1:3] != []
  assert "each way, a learner" in rows
  assert "price of a million useful toke" in rows


def test_one_scenario_as_json_conserves_chip_hours(simulate: Simulate) -> None:
  found = _summary(simulate(*SMALL, "--json", "--seed=3"))
  spent = found["useful_chip_h"] + sum(found["wasted"].values())
  assert spent == pytest.approx(found["total_chip_h"])
  low, high = found["goodput_low"], found["goodput_high"]
  assert low <= found["goodput"] <= high


def test_the_seed_decides(simulate: Simulate) -> None:
  def once(seed: int) -> float:
    text = simulate(*SMALL, "--json", f"--seed={seed}")
    return float(_summary(text)["goodput"])

  assert once(1) == once(1) != once(2)


def test_flags_bindings_and_set_reach_the_scenario(simulate: Simulate) -> None:
  text = simulate(
    *SMALL,
    "Exchange.quorum=2",
    "Exchange.codec=bfloat16",
    "--mtbi_days=30",
    "--repair_h=2",
    "--set=Recovery.detect_s=7",
    "--set=Failures.shape=0.7",
    "--set=Stragglers.mtbi_chip_days=90",
    "--correlated=64:30:2",
    "--maintenance=4:10:0.5",
    "--json",
  )
  scenario = json.loads(text)["scenario"]
  assert scenario["quorum"] == 2
  assert scenario["exchange"]["codec"] == "bfloat16"
  failures = scenario["failures"]
  assert failures["mtbi_chip_days"] == 30
  assert failures["return_s"] == 7200
  assert failures["shape"] == 0.7
  assert failures["stragglers"]["mtbi_chip_days"] == 90
  assert failures["correlated"] == [
    {"chips": 64, "mtbi_days": 30, "return_s": 7200}
  ]
  assert failures["maintenance"] == [
    {"chips": 4, "every_days": 10, "lasts_s": 1800}
  ]
  assert scenario["recovery"]["detect_s"] == 7
  # The parameters of the configuration's model.
  assert scenario["params"] == 143_808


def test_a_quorum_flag_wins_over_the_configuration(simulate: Simulate) -> None:
  text = simulate(*SMALL, "Exchange.quorum=2", "--quorum=3", "--json")
  assert json.loads(text)["scenario"]["quorum"] == 3


@pytest.mark.parametrize("policy", ["dp_rigid", "dp_elastic"])
def test_a_data_parallel_job_is_one_whatever_the_configuration_says(
  simulate: Simulate, policy: str
) -> None:
  text = simulate("--chips=2000", f"--policy={policy}", "--quick", "--json")
  assert json.loads(text)["scenario"]["learners"] == 1


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--chips=0"], ("Scenario.chips = 0", "at least 1")),
    (["--chips=4", "--learners=5"], ("learners = 5", "chips = 4", "between")),
    (
      ["--learners=4", "--quorum=5"],
      ("quorum = 5", "learners = 4", "between 1"),
    ),
    (["--mtbi_days=-1"], ("mtbi_chip_days = -1", "above 0")),
    (["--repair_h=0"], ("return_s = 0", "above 0")),
    (["--days=0"], ("Scenario.days = 0", "above 0")),
    (["--step_s=-2"], ("Scenario.step_s = -2", "above 0")),
    (["--price=-1"], ("price_chip_hour = -1", "at least 0")),
    (["--standbys=-1"], ("Scenario.standbys = -1", "at least 0")),
    (["--repeats=0"], ("repeats=0", "positive")),
    (["--policy=decuopled"], ("mean decoupled?", "dp_rigid", "diloco")),
    (["--set=Recovery.restrt_s=1"], ("mean Recovery.restart_s?",)),
    (["--set=Recovery.restart_s=x"], ("restart_s=x", "float")),
    (["--set=Scenario.days"], ("does not read Part.field=value",)),
    (["--set=Exchange.H=48"], ("without --set",)),
    (["--correlated=64:30"], ("CHIPS:DAYS:HOURS",)),
    (["--correlated=64:0:1"], ("Correlated.mtbi_days = 0", "above 0")),
    (["Exchange.H=25"], ("Exchange.H = 25", "Exchange.P = 24")),
    (["--plan", "--learners=4"], ("--learners=4", "--plan chooses")),
    (["--plan", "--link_gbps=0"], ("--link_gbps=0", "above 0")),
  ],
)
def test_bad_input_is_one_line_with_field_value_and_range(
  refused: Simulate, arguments: list[str], words: tuple[str, ...]
) -> None:
  line = refused(*arguments)
  for word in words:
    assert word in line


def test_everything_plain_in_a_scenario_can_be_set() -> None:
  assert own.scenario(Scenario().exchange, 0.0, {}) == Scenario()
  changed = own.scenario(
    Scenario().exchange, 0.0, {}, ["Failures.mtbi_chip_days=never"]
  )
  assert changed.failures.mtbi_chip_days == float("inf")


# ---- plots -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trainmover_64k", "heterogeneous"])
def test_a_preset_is_drawn(
  simulate: Simulate, tmp_path: pathlib.Path, name: str
) -> None:
  path = tmp_path / "a.png"
  simulate(f"--preset={name}", "--quick", f"--plot={path}", "--repeats=1")
  assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_needs_matplotlib_and_says_how_to_get_it(
  refused: Simulate, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  real = importlib.import_module

  def missing(name: str, package: str | None = None) -> Any:
    if name.startswith("matplotlib"):
      raise ImportError(name)
    return real(name, package)

  monkeypatch.setattr(importlib, "import_module", missing)
  line = refused("--preset=standby_pool", f"--plot={tmp_path}/a.png")
  assert "pip install 'decoupled-diloco[plots]'" in line


@pytest.mark.parametrize(
  ("path", "says"),
  [("a.jpg", "must end in .png"), ("no/a.png", "there is no folder")],
)
def test_a_plot_that_cannot_be_written_is_refused_first(
  refused: Simulate, tmp_path: pathlib.Path, path: str, says: str
) -> None:
  line = refused("--preset=table1", f"--plot={tmp_path / path}")
  assert says in line


def test_a_single_scenario_has_no_plot(
  refused: Simulate, tmp_path: pathlib.Path
) -> None:
  assert "add --preset or --plan" in refused(f"--plot={tmp_path}{os.sep}a.png")


# ---- small things ------------------------------------------------------------


def _summary(text: str) -> dict[str, Any]:
  found: dict[str, Any] = json.loads(text)["summary"]
  return found


def test_presets_have_a_default_number_of_repeats() -> None:
  with pytest.raises(ConfigError, match="does not exist"):
    presets.run("nothing")
  assert presets.run("standby_pool").cells


def test_large_jobs_are_simulated_less_often() -> None:
  from decoupled.simulate.main import _enough
  from decoupled.simulate.scenario import Scenario

  assert _enough(Scenario(chips=1000), quick=False) == 8
  assert _enough(Scenario(chips=600_000, days=30), quick=False) == 8
  assert _enough(Scenario(chips=1_200_000, days=30), quick=False) == 4
  assert _enough(Scenario(chips=2_400_000, days=30), quick=False) == 3
  assert _enough(Scenario(chips=2_400_000, days=30), quick=True) == 2
