"""Version 0 and the newest snapshot, on the same held-out text."""

import dataclasses
import math

import numpy as np
import pytest

from decoupled import config as config_lib
from decoupled import evaluate
from decoupled.checkpoint import syncer_store
from decoupled.checkpoint.syncer_store import GlobalSnapshot
from decoupled.errors import DecoupledError
from decoupled.launch.options import EvaluateOptions
from decoupled.models.task import LanguageModel
from decoupled.observe import events
from decoupled.types import Manifest, Unit, Version


@pytest.fixture(name="config")
def config_fixture(tmp_path):
  text = tmp_path / "text"
  text.mkdir()
  for i in range(80):
    (text / f"{i}.txt").write_text("the same words again and again. " * 40)
  return config_lib.resolve(
    bindings=[
      f"Corpus.path='{text}'",
      "Corpus.context=16",
      "Transformer.layers=2",
      "Transformer.width=32",
      "Transformer.mlp_width=32",
      "Transformer.scan=True",
      "Mesh.fsdp=2",
    ]
  )


def _snapshot(config, rounds, change=0.0):
  task = LanguageModel(config.transformer)
  specs = task.tensor_specs()
  rng = np.random.default_rng(0)
  units, arrays = [], []
  for spec in specs:
    normal = rng.standard_normal(spec.shape).astype(np.float32)
    whole = 0.02 * (1 + change) * normal
    for layer in range(spec.shape[0]) if spec.stacked else (None,):
      units.append(Unit(spec.name, layer))
      arrays.append(whole if layer is None else whole[layer])
  return GlobalSnapshot(
    run_id="r",
    term=1,
    rounds=rounds,
    common_step=rounds,
    fullest=1,
    versions=(Version(1, rounds),) * 2,
    manifest=Manifest(specs, (tuple(units[:3]), tuple(units[3:]))),
    contract=(),
    fragments=(tuple(arrays[:3]), tuple(arrays[3:])),
    outer=((), ()),
  )


def test_both_are_evaluated_on_the_same_batches(tmp_path, config, capsys):
  store = tmp_path / "checkpoints"
  syncer_store.save_global(store, 0, _snapshot(config, 0))
  syncer_store.save_global(store, 9, _snapshot(config, 9, change=9.0))
  log = events.EventLog(tmp_path / "events.jsonl", 0.0)
  log.emit("phase", phase="ended", why="")
  (before,) = events.read(log.path)
  assert evaluate.main(config, EvaluateOptions(tmp_path)) == 0
  event = list(events.read(log.path))[-1]
  assert events.problems(event) == []
  assert before["t"] <= event["t"] < before["t"] + 60
  assert event["initial_loss"] == pytest.approx(math.log(256), rel=0.1)
  assert event["eval_loss"] != event["initial_loss"]
  assert event["eval_tokens"] % 16 == 0
  said = capsys.readouterr().out
  assert f"{event['initial_loss']:.4f} before" in said
  assert "after 9 rounds" in said


def test_one_snapshot_gives_one_loss_on_any_mesh(config):
  losses = []
  for fsdp in (1, 4):
    mesh = dataclasses.replace(config.mesh, data=1, fsdp=fsdp)
    evaluator = evaluate.Evaluator(dataclasses.replace(config, mesh=mesh))
    losses.append(evaluator.loss(_snapshot(config, 0)))
  assert losses[1].tokens == losses[0].tokens
  for other in losses[1:]:
    assert other.loss == pytest.approx(losses[0].loss, rel=1e-5)


def test_nothing_saved_is_one_line(tmp_path, config):
  with pytest.raises(DecoupledError, match="nothing to evaluate"):
    evaluate.main(config, EvaluateOptions(tmp_path))


def test_a_snapshot_of_another_model_names_the_tensor(config):
  other = dataclasses.replace(config.transformer, width=64)
  snapshot = _snapshot(dataclasses.replace(config, transformer=other), 1)
  with pytest.raises(DecoupledError, match="of another model: "):
    evaluate.Evaluator(config).loss(snapshot)
