"""A joiner takes over what the run agrees on, and says what does not fit."""

import dataclasses
from pathlib import Path

import pytest

from decoupled import config as config_lib
from decoupled.errors import ConfigError, Refused
from decoupled.launch.options import LearnerOptions
from decoupled.learner import joining
from decoupled.types import Phase, RunContract

RUN = config_lib.resolve(
  [],
  [
    "Exchange.H=48",
    "Exchange.codec=bfloat16",
    "Transformer.scan=True",
    "Optimizer.eps=1e-07",
    "Corpus.path=/the/syncers/own",
  ],
)
OPTIONS = LearnerOptions(workdir=Path("unused"))


def contract(*changes, phase=Phase.TRAINING, seed="7"):
  lines = {
    **dict(config_lib.contract_lines(RUN)),
    "Corpus.digest": "abc",
    "run.seed": seed,
    **dict(changes),
  }
  return RunContract("run-1", phase, tuple(sorted(lines.items())))


def test_nothing_is_needed_but_what_is_local():
  mine = config_lib.resolve(
    [], ["Local.microbatches=2", "Corpus.path=/my/own", "Mesh.fsdp=2"]
  )
  config, options = joining.adopt(mine, OPTIONS, contract())
  assert config_lib.contract_lines(config) == config_lib.contract_lines(RUN)
  assert config.corpus.path == "/my/own"
  assert (config.local, config.mesh) == (mine.local, mine.mesh)
  assert options.seed == 7
  assert config.origins["Exchange.H"] == "the run's syncer"
  assert config.origins["Local.microbatches"] == "binding"


def test_what_is_set_here_must_be_the_runs():
  same = config_lib.resolve([], ["Exchange.H=48"])
  config, _ = joining.adopt(same, OPTIONS, contract())
  assert config.exchange == RUN.exchange

  other = config_lib.resolve([], ["Exchange.H=24"])
  with pytest.raises(ConfigError) as caught:
    joining.adopt(other, OPTIONS, contract())
  for part in ("Exchange.H = 24", "binding", "run-1", "Exchange.H = 48"):
    assert part in str(caught.value)


def test_the_seed_is_the_runs():
  wrong = dataclasses.replace(OPTIONS, seed=3)
  with pytest.raises(ConfigError, match=r"--seed=3 .*run\.seed = 7"):
    joining.adopt(config_lib.resolve(), wrong, contract())
  right = dataclasses.replace(OPTIONS, seed=7)
  _, options = joining.adopt(config_lib.resolve(), right, contract())
  assert options.seed == 7


@pytest.mark.parametrize(
  ("name", "text", "word"),
  [
    ("Exchange.warp", "9", "does not know"),
    ("Exchange.H", "__import__('os')", "not readable"),
    ("Exchange.H", "'many'", "must be int"),
    ("Exchange.H", "0", "Exchange.H = 0"),
  ],
)
def test_what_cannot_be_taken_over_is_named(name, text, word):
  with pytest.raises((Refused, ConfigError), match=word) as caught:
    joining.adopt(config_lib.resolve(), OPTIONS, contract((name, text)))
  assert name in str(caught.value)


def test_nobody_joins_a_run_that_ends():
  with pytest.raises(Refused, match="run-1 is ending"):
    joining.adopt(config_lib.resolve(), OPTIONS, contract(phase=Phase.DRAINING))


def test_who_brings_everything_asks_nobody(tmp_path):
  whole = tmp_path / "config.gin"
  whole.write_text(config_lib.gin_text(RUN))
  config = config_lib.resolve([whole])
  assert joining.complete(config, dataclasses.replace(OPTIONS, seed=0))
  assert not joining.complete(config, OPTIONS)
  part = config_lib.resolve([], ["Exchange.H=48"])
  assert not joining.complete(part, dataclasses.replace(OPTIONS, seed=0))


def test_another_corpus_is_named_before_anything_is_compiled():
  joining.check_corpus(contract(), "abc")
  joining.check_corpus(RunContract("run-1", Phase.WAITING, ()), "abc")
  with pytest.raises(Refused, match=r"Corpus\.digest = def here.*has abc"):
    joining.check_corpus(contract(), "def")
