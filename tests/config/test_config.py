"""Gin files, bindings and flags become components, or one clear line."""

import dataclasses
import pathlib
import shlex
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled import cli
from decoupled import config as config_lib
from decoupled.algorithm.policy import Exchange
from decoupled.chaos import injectors
from decoupled.chaos.plan import parse
from decoupled.errors import ConfigError

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.gin"))


def write(path: pathlib.Path, *lines: str) -> pathlib.Path:
  path.write_text("\n".join(lines) + "\n")
  return path


def error_of(*files: pathlib.Path, bindings: tuple[str, ...] = ()) -> str:
  with pytest.raises(ConfigError) as caught:
    config_lib.resolve(files, bindings)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_later_wins_file_then_binding_then_flag(tmp_path):
  first = write(tmp_path / "a.gin", "", "Exchange.H = 48", "Exchange.tau = 1")
  second = write(tmp_path / "b.gin", "Exchange.H = 72")

  resolved = config_lib.resolve([first, second])
  assert resolved.exchange.H == 72
  assert resolved.origins["Exchange.H"] == f"{second}:1"
  assert resolved.origins["Exchange.tau"] == f"{first}:3"
  assert resolved.origins["Exchange.P"] == "default"

  resolved = config_lib.resolve([first], ["Exchange.H=96"])
  assert resolved.exchange.H == 96
  assert resolved.origins["Exchange.H"] == "binding"

  resolved = config_lib.resolve(
    [first], ["Exchange.H=96"], {"Exchange.H": (24, "--steps")}
  )
  assert resolved.exchange.H == 24
  assert resolved.origins["Exchange.H"] == "--steps"


def test_one_resolution_leaves_nothing_behind_for_the_next():
  config_lib.resolve([], ["Exchange.H=96"])
  assert config_lib.resolve().exchange == Exchange()


def test_a_value_may_be_given_twice(tmp_path):
  file = write(tmp_path / "a.gin", "Exchange.H = 24", "Exchange.H = 48")
  assert config_lib.resolve([file]).exchange.H == 48


def test_an_included_file_is_found_beside_the_including_one(tmp_path):
  (tmp_path / "base").mkdir()
  base = write(tmp_path / "base" / "base.gin", "Exchange.H = 48")
  file = write(
    tmp_path / "a.gin", "include 'base/base.gin'", "Exchange.tau = 3"
  )
  resolved = config_lib.resolve([file])
  assert (resolved.exchange.H, resolved.exchange.tau) == (48, 3)
  assert resolved.origins["Exchange.H"] == f"{base}:1"


def test_a_file_that_includes_itself_is_refused(tmp_path):
  file = write(tmp_path / "a.gin", "include 'a.gin'")
  assert "includes itself" in error_of(file)


def test_macros_and_blocks_are_gin_s_own(tmp_path):
  file = write(
    tmp_path / "a.gin",
    "SIZE = 32",
    "Transformer:",
    "  width = %SIZE",
    "  layers = 3",
    "Transformer.mlp_width = %SIZE",
  )
  resolved = config_lib.resolve([file])
  assert resolved.transformer.width == resolved.transformer.mlp_width == 32
  assert resolved.origins["Transformer.layers"] == f"{file}:4"


@pytest.mark.parametrize(
  ("line", "nearest"),
  [
    ("Exchange.quorom = 2", "Exchange.quorum"),
    ("Exchange.h = 2", "Exchange.H"),
    ("Exchnge.H = 24", "Exchange.H"),
    ("Outer.momentun = 0.9", "Outer.momentum"),
    ("Outer.clip_norm = 1.0", "Optimizer.clip_norm"),
    ("transformer.layers = 1", "Transformer.layers"),
  ],
)
def test_an_unknown_name_brings_file_line_and_the_nearest(
  tmp_path, line, nearest
):
  file = write(tmp_path / "a.gin", "# recipe", "Exchange.tau = 2", line)
  message = error_of(file)
  assert message.startswith(f"{file}:3: there is no {line.split()[0]}")
  assert f"did you mean {nearest}" in message
  assert nearest in error_of(bindings=(line,))


def test_an_unknown_block_is_named_too(tmp_path):
  file = write(tmp_path / "a.gin", "Exchnge:", "  H = 24")
  assert f"{file}:1" in error_of(file)
  assert "Exchange" in error_of(file)


@pytest.mark.parametrize(
  ("line", "expected"),
  [
    ("Exchange.H = 24.5", "must be int, not float"),
    ("Exchange.H = True", "must be int, not bool"),
    ("Exchange.H = '24'", "must be int, not str"),
    ("Exchange.adopt_step = 1", "must be bool, not int"),
    ("Outer.momentum = None", "must be float, not NoneType"),
    ("Corpus.path = 3", "must be str, not int"),
  ],
)
def test_a_value_of_another_type_brings_file_and_line(tmp_path, line, expected):
  file = write(tmp_path / "a.gin", "", line)
  message = error_of(file)
  assert message.startswith(f"{file}:2: ")
  assert expected in message


def test_a_whole_number_is_a_good_float():
  resolved = config_lib.resolve([], ["Outer.learning_rate=1"])
  assert resolved.outer.learning_rate == 1.0
  assert isinstance(resolved.outer.learning_rate, float)


def test_a_string_on_the_command_line_needs_no_quotes():
  plain = config_lib.resolve([], ["Corpus.path=/data/my text/*.md"])
  quoted = config_lib.resolve([], ["Corpus.path='/data/my text/*.md'"])
  assert plain.corpus.path == quoted.corpus.path == "/data/my text/*.md"


def test_impossible_combinations_name_both_values_and_where_they_are(tmp_path):
  file = write(tmp_path / "a.gin", "Exchange.H = 25")
  message = error_of(file)
  assert "Exchange.H = 25" in message
  assert "Exchange.P = 24" in message
  assert f"Exchange.H from {file}:1" in message


@pytest.mark.parametrize(
  "line",
  ["Exchange.H =", "Exchange.H 3", "Exchange.H = = 3", "nonsense", "= 3"],
)
def test_a_line_that_does_not_parse_brings_file_and_line(tmp_path, line):
  file = write(tmp_path / "a.gin", "Exchange.tau = 2", line)
  assert f"{file}:2" in error_of(file)


def test_a_macro_that_nobody_defined_is_named():
  assert "MISSING" in error_of(bindings=("Exchange.H = %MISSING",))


def test_nothing_is_imported_from_a_config(tmp_path):
  file = write(tmp_path / "a.gin", "import antigravity")
  message = error_of(file)
  assert f"{file}:1" in message
  assert "import" in message


def test_scopes_are_refused(tmp_path):
  file = write(tmp_path / "a.gin", "fast/Exchange.H = 24")
  assert "scope 'fast'" in error_of(file)


def test_a_missing_file_brings_the_nearest_one(tmp_path):
  write(tmp_path / "tiny.gin", "Exchange.H = 24")
  message = error_of(tmp_path / "tiny2.gin")
  assert "No such file" in message
  assert f"did you mean {tmp_path / 'tiny.gin'}" in message


def test_a_quorum_above_the_learners_shows_both():
  resolved = config_lib.resolve([], ["Exchange.quorum=4"])
  config_lib.validate(resolved, learners=4)
  with pytest.raises(ConfigError, match=r"quorum = 4 .*--learners=3"):
    config_lib.validate(resolved, learners=3)


@pytest.mark.parametrize(
  ("bindings", "devices", "expected"),
  [
    (("Mesh.data=4",), 2, r"Mesh.data = 4 x Mesh.fsdp = 1 wants 4 devices"),
    (("Mesh.fsdp=4",), 2, r"wants 4 devices, a learner has 2"),
    (("Batch.sequences=6",), 4, r"Batch.sequences = 6 .* multiple of 4"),
    (("Local.microbatches=3",), 2, r"Local.microbatches = 3"),
    (("Transformer.vocab=128",), 2, r"Transformer.vocab = 128 .* 'bytes'"),
  ],
)
def test_what_does_not_fit_the_devices_is_refused(bindings, devices, expected):
  with pytest.raises(ConfigError, match=expected):
    config_lib.validate(config_lib.resolve([], bindings), devices=devices)


def test_the_contract_holds_what_peers_must_agree_on():
  lines = dict(config_lib.contract_lines(config_lib.resolve()))
  components = {key.partition(".")[0] for key in lines}
  assert components == set(config_lib.CONTRACT)
  assert "Corpus.path" not in lines
  assert lines["Exchange.H"] == "24"


def test_local_values_do_not_change_the_contract():
  ours = config_lib.contract_lines(config_lib.resolve())
  local = config_lib.resolve(
    [], ["Local.pad_s=0", "Mesh.fsdp=2", "Limits.lease_s=9", "Corpus.path=x"]
  )
  theirs = config_lib.contract_lines(local)
  assert config_lib.contract_difference(ours, theirs) is None


def test_a_difference_names_the_first_line_and_both_values():
  ours = config_lib.contract_lines(config_lib.resolve())
  theirs = config_lib.contract_lines(
    config_lib.resolve([], ["Outer.momentum=0.5"])
  )
  assert config_lib.contract_difference(ours, theirs) == (
    "Outer.momentum",
    "0.8",
    "0.5",
  )
  more = (*ours, ("Corpus.digest", "ab"))
  assert config_lib.contract_difference(ours, more) == (
    "Corpus.digest",
    "(unset)",
    "ab",
  )


@given(
  path=st.text(
    string.ascii_letters + string.digits + " /'\"*%@#=.é\\", max_size=30
  ),
  rate=st.floats(1e-9, 1e3),
  layers=st.integers(1, 9),
  adopt=st.booleans(),
)
def test_the_written_config_resolves_to_the_same(
  tmp_path_factory, path, rate, layers, adopt
):
  resolved = config_lib.resolve(
    [],
    [
      f"Corpus.path={path!r}",
      f"Outer.learning_rate={rate!r}",
      f"Transformer.layers={layers}",
      f"Exchange.adopt_step={adopt}",
    ],
  )
  assert resolved.corpus.path == path
  file = tmp_path_factory.mktemp("config") / "config.gin"
  file.write_text(config_lib.gin_text(resolved), encoding="utf-8")
  again = config_lib.resolve([file])
  assert again == resolved
  assert config_lib.contract_lines(again) == config_lib.contract_lines(resolved)


def test_there_are_shipped_configs():
  assert CONFIGS


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_shipped_config_resolves_and_is_a_recipe(file):
  resolved = config_lib.resolve([file])
  config_lib.validate(resolved, learners=3, devices=2)
  text = file.read_text()
  for word in ("Hardware: ", "Time: "):
    assert word in text, f"{file.name} does not say: {word}"


def test_the_command_in_the_recipe_can_be_typed(tmp_path, monkeypatch):
  monkeypatch.chdir(CONFIGS[0].parents[1])
  text = (CONFIGS[0].parent / "stdlib_tiny.gin").read_text()
  commented = text.replace("\n#", "\n").replace("\\\n", " ")
  commands = [
    shlex.split(line)[1:]
    for line in commented.splitlines()
    if line.strip().startswith("decoupled run")
  ]
  assert len(commands) == 2
  for name, *arguments in commands:
    values, files, bindings = cli.parse(name, arguments)
    config_lib.resolve(files, bindings)
    injectors.check(parse(values["chaos"].value), values["learners"].value)


def test_the_defaults_are_the_shipped_tiny_config():
  tiny = next(file for file in CONFIGS if file.name == "stdlib_tiny.gin")
  assert config_lib.resolve([tiny]) == config_lib.resolve()


@pytest.mark.parametrize(
  ("binding", "expected"),
  [
    ("Limits.heartbeat_s=3", "Limits.lease_s = 5 must be above 2 x"),
    ("Limits.drain_s=4", "Limits.drain_s = 4 must be above Limits.lease_s"),
    ("Limits.lease_s=0", "Limits.lease_s = 0.0 must be"),
    ("Limits.connect_s=-1", "Limits.connect_s = -1.0 must be"),
  ],
)
def test_limits_that_do_not_nest_show_both(binding, expected):
  assert expected in error_of(bindings=(binding,))


def test_components_are_frozen():
  for component in config_lib.COMPONENTS.values():
    params = component.__dataclass_params__
    assert params.frozen
    assert dataclasses.fields(component)
