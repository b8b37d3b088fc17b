"""The command line as people meet it: real processes, one line an error."""

import importlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from decoupled import cli
from decoupled.errors import ConfigError, Unreachable
from decoupled.launch import address as address_lib
from decoupled.launch.workdir import Workdir

# A new flag is a decision: it is written into design section 7 first.
_CONFIG = {"gin_file", "gin_bindings"}
FLAGS = {
  "run": _CONFIG
  | {
    "workdir",
    "store",
    "learners",
    "hosts_per_learner",
    "devices_per_host",
    "standbys",
    "rounds",
    "tokens",
    "chaos",
    "seed",
    "resume",
    "http_port",
    "tape",
  },
  "syncer": _CONFIG
  | {
    "workdir",
    "store",
    "bind",
    "learners",
    "rounds",
    "tokens",
    "seed",
    "resume",
    "token_file",
    "tls_cert",
    "tls_key",
    "started_at",
    "tape",
  },
  "learner": _CONFIG
  | {
    "workdir",
    "store",
    "syncer_address",
    "learner_id",
    "learners",
    "process_id",
    "num_processes",
    "coordinator_address",
    "devices_per_host",
    "seed",
    "token_file",
    "tls_ca",
    "started_at",
  },
  "evaluate": _CONFIG
  | {"workdir", "store", "devices_per_host", "seed", "started_at", "follow"},
  "replay": {"workdir", "store"},
  "doctor": _CONFIG | {"workdir", "learners", "devices_per_host"},
  "config": _CONFIG | {"json"},
  "simulate": _CONFIG
  | {
    "preset",
    "plan",
    "json",
    "plot",
    "seed",
    "repeats",
    "quick",
    "link_gbps",
    "policy",
    "chips",
    "learners",
    "quorum",
    "standbys",
    "chips_per_host",
    "days",
    "mtbi_days",
    "repair_h",
    "step_s",
    "speed_spread",
    "params",
    "price",
    "tokens_per_chip_s",
    "set",
    "correlated",
    "maintenance",
  },
  "status": {"workdir", "syncer_address", "token_file", "tls_ca"},
  "standby": {
    "gin_file",
    "gin_bindings",
    "workdir",
    "store",
    "syncer_address",
    "devices_per_host",
    "seed",
    "token_file",
    "tls_ca",
    "started_at",
    "num_processes",
    "coordinator_address",
    "name",
  },
  "drain": {"workdir", "limit_s", "syncer_address", "token_file", "tls_ca"},
  "stop": {"workdir", "limit_s", "syncer_address", "token_file", "tls_ca"},
  "coordinator": {"workdir", "bind", "token_file", "tls_cert", "tls_key"},
  "certs": {"out", "hosts", "days"},
  "report": {"workdir"},
  "checkpoints": {"workdir", "store", "json"},
}
LATER = {
  "chaos",
  "generate",
  "export",
  "launch",
}


def decoupled(*arguments, limit_s=60.0, **more):
  return subprocess.run(
    [sys.executable, "-m", "decoupled.cli", *arguments],
    capture_output=True,
    text=True,
    timeout=limit_s,
    **more,
  )


def assert_one_line(result, status, *words):
  assert result.returncode == status, result.stderr
  lines = result.stderr.strip().splitlines()
  assert len(lines) == 1, result.stderr
  for word in words:
    assert word in lines[0]


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_the_flags_are_frozen(name):
  assert set(cli.flag_values(name)) == FLAGS[name]


def test_the_commands_are_frozen():
  assert set(cli.COMMANDS) == set(FLAGS) | LATER


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_every_command_calls_something_that_exists(name):
  module, _, function = cli.COMMANDS[name].entry.partition(":")
  assert callable(getattr(importlib.import_module(module), function))


def test_files_bindings_and_flags_may_stand_anywhere():
  values, files, bindings = cli.parse(
    "run",
    [
      "a.gin",
      "--learners=2",
      "Exchange.H=48",
      "b.gin",
      "--rounds",
      "9",
      "Corpus.path=x y/*.md",
      "--gin_file=c.gin",
      "--gin_bindings=Outer.momentum=0.5",
    ],
  )
  assert files == ["a.gin", "b.gin", "c.gin"]
  assert bindings == [
    "Exchange.H=48",
    "Corpus.path=x y/*.md",
    "Outer.momentum=0.5",
  ]
  assert values["learners"].value == 2
  assert values["rounds"].value == 9


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--learnes=3"], ("learnes", "learners")),
    (["--learners=x"], ("learners", "x")),
    (["--learners=-1"], ("learners", "-1")),
    (["--resume=perhaps"], ("resume", "perhaps", "auto")),
    (["three"], ("'three'", "CONFIG.gin")),
  ],
)
def test_bad_arguments_are_one_line(arguments, words):
  with pytest.raises(ConfigError) as caught:
    cli.parse("run", arguments)
  for word in words:
    assert word in str(caught.value)
  assert "\n" not in str(caught.value)


def test_a_store_may_be_the_url_of_a_local_folder():
  for name in ("run", "syncer", "learner", "evaluate", "replay", "checkpoints"):
    values, *_ = cli.parse(name, ["--store=file:///data/run"])
    options = cli.COMMANDS[name].options(values, pathlib.Path("w"))
    assert options.store == "/data/run"


def test_rounds_have_a_default_unless_tokens_are_given():
  def options(*arguments):
    values, _, _ = cli.parse("run", arguments)
    return cli.COMMANDS["run"].options(values, pathlib.Path("w"))

  assert options().rounds == 600
  assert options("--tokens=5").rounds == 0
  assert options("--tokens=5", "--rounds=7").rounds == 7
  assert options().workdir == pathlib.Path("w")
  assert options("--workdir=v").workdir == pathlib.Path("v")


def test_help_lists_every_command_and_is_light():
  code = (
    "import sys; from decoupled import cli; cli.main(['help']);"
    "heavy = {'jax', 'numpy', 'grpc', 'gin'} & set(sys.modules);"
    "sys.exit(str(heavy) if heavy else 0)"
  )
  result = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
  )
  assert result.returncode == 0, result.stderr
  for name in cli.COMMANDS:
    assert name in result.stdout


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_explains_itself(name, capsys):
  assert cli.main([name, "--help"]) == 0
  text = capsys.readouterr().out
  assert f"usage: decoupled {name}" in text
  for flag in FLAGS.get(name, ()):
    assert f"--{flag}" in text
  assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", sorted(LATER))
def test_commands_of_later_versions_say_so(name, capsys):
  assert cli.main([name, "whatever"]) == 2
  assert "does not have" in capsys.readouterr().err


def test_no_command_is_help(capsys):
  assert cli.main([]) == 0
  assert "usage: decoupled" in capsys.readouterr().out


def test_a_mistyped_command_brings_the_nearest():
  assert_one_line(decoupled("rnu"), 2, "'rnu'", "did you mean run")


def test_a_config_error_is_one_line_with_status_2(tmp_path):
  file = tmp_path / "a.gin"
  file.write_text("Exchange.quorom = 2\n")
  result = decoupled("run", str(file), "--workdir", str(tmp_path / "w"))
  assert_one_line(result, 2, f"{file}:1", "Exchange.quorum")
  assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["Exchange.quorum=4"], ("quorum = 4", "--learners=3")),
    (["Exchange.H=25"], ("Exchange.H = 25", "Exchange.P = 24")),
    (["Mesh.data=4", "--devices_per_host=2"], ("4 devices", "has 2")),
    (["--chaos=kill lerner/1 @5s"], ("column 6", "'lerner/1'")),
    (["--chaos=kill learner/9 @5s"], ("learner/9", "--learners=3")),
    (
      ["--standbys=1", "--chaos=kill standby/1 @5s"],
      ("standby/1", "--standbys=1"),
    ),
    (["--chaos=kill standby/0 @5s"], ("standby/0", "--standbys=0 has none")),
    (["--learners=0"], ("--learners=0",)),
  ],
)
def test_impossible_runs_are_refused_before_anything_exists(
  tmp_path, capsys, monkeypatch, arguments, words
):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  workdir = tmp_path / "w"
  assert cli.main(["run", "--workdir", str(workdir), *arguments]) == 2
  (line,) = capsys.readouterr().err.strip().splitlines()
  for word in words:
    assert word in line
  assert not workdir.exists()


def test_a_workdir_that_cannot_be_written_is_one_line(tmp_path):
  (tmp_path / "file").write_text("")
  result = decoupled("run", "--workdir", str(tmp_path / "file" / "w"))
  assert_one_line(result, 1, "cannot be written", "--workdir")


def test_config_prints_what_it_can_read_again(tmp_path, capsys):
  assert cli.main(["config", "Exchange.H=48"]) == 0
  text = capsys.readouterr().out
  assert "Exchange.H = 48  # binding" in text
  file = tmp_path / "again.gin"
  file.write_text(text)
  assert cli.main(["config", str(file)]) == 0
  again = capsys.readouterr().out
  assert [line.split("#")[0] for line in again.splitlines()] == [
    line.split("#")[0] for line in text.splitlines()
  ]


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
  command = f"{sys.executable} -m decoupled.cli config | head -1"
  result = subprocess.run(
    command, shell=True, capture_output=True, text=True, timeout=60
  )
  assert result.stderr == ""


def test_doctor_is_green_here_and_red_where_something_is_wrong(tmp_path):
  workdir = f"--workdir={tmp_path}"
  good = decoupled("doctor", workdir)
  assert good.returncode == 0, good.stdout
  assert "BAD" not in good.stdout
  env = dict(os.environ) | {"XLA_FLAGS": "--xla_dump_to=/tmp/x"}
  bad = decoupled(
    "doctor",
    workdir,
    "Corpus.path=/no/such/text",
    "Mesh.data=8",
    "--devices_per_host=2",
    env=env,
  )
  assert bad.returncode == 1
  red = [line for line in bad.stdout.splitlines() if line.startswith("BAD")]
  assert [line.split()[1] for line in red] == ["corpus", "config"]
  assert "there is no /no/such/text" in bad.stdout
  assert "XLA_FLAGS" in bad.stdout


def test_stop_asks_the_process_that_holds_the_workdir(tmp_path):
  workdir = Workdir(tmp_path)
  assert_one_line(
    decoupled("stop", f"--workdir={tmp_path}"), 1, "no job is running"
  )
  code = (
    "import pathlib, time\n"
    "from decoupled.launch.workdir import Workdir\n"
    f"Workdir(pathlib.Path({str(tmp_path)!r})).lock()\n"
    "time.sleep(600)\n"
  )
  with subprocess.Popen([sys.executable, "-c", code]) as runner:
    deadline = time.monotonic() + 30
    while workdir.live_process() is None:
      assert time.monotonic() < deadline
      time.sleep(0.02)
    result = decoupled("stop", f"--workdir={tmp_path}")
    assert result.returncode == 0, result.stderr
    assert str(runner.pid) in result.stdout
    assert runner.wait(30) == -signal.SIGTERM


def test_status_and_report_of_nothing_are_one_line(tmp_path):
  for command in ("status", "report"):
    result = decoupled(command, f"--workdir={tmp_path}")
    assert_one_line(result, 1, str(tmp_path), "--workdir")


def test_a_learner_waits_for_the_address_and_names_the_file(tmp_path):
  file = tmp_path / "syncer.address"
  with pytest.raises(Unreachable, match=rf"{file} within 0.1 s"):
    address_lib.resolve(f"@{file}", 0.1)
  file.write_text("[::1]:4000\n")
  assert str(address_lib.resolve(f"@{file}", 0.1)) == "[::1]:4000"
  with pytest.raises(ConfigError, match="no port"):
    address_lib.resolve("localhost", 0.1)
