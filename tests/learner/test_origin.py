"""A joiner's optimizer state: a donor's, else what it saved, else fresh."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled.checkpoint import learner_store
from decoupled.errors import DecoupledError, Refused, Unreachable
from decoupled.learner import origin
from decoupled.learner.donor import leaves_of
from decoupled.learner.origin import Search
from decoupled.types import Manifest, StateHeader, Welcome
from decoupled.wire import states

SAVED = {"run_id": "run-1", "schedule_step": 70, "position": [2, 8]}
WELCOME = Welcome(
  1, 4, "run-1", 1, Manifest((), ()), (), 5.0, 1.0, (0, 0), has_history=True
)


@pytest.fixture
def specs():
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return {"mu": jax.ShapeDtypeStruct((6,), np.float32, sharding=sharding)}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
  monkeypatch.setattr(origin, "_RETRY_S", 0.0)


class Syncer:
  """Answers each asking with the next of what it was made with."""

  def __init__(self, *answers):
    self.answers = list(answers)
    self.asked = 0

  @contextlib.contextmanager
  def take(self):
    self.asked += 1
    answer = self.answers.pop(0)
    if isinstance(answer, Exception):
      raise answer
    header = StateHeader(1, 5, 9, 100, 130, leaves_of({"mu": answer}))
    yield states.Incoming(states.outgoing(header, [answer]))


def nobody():
  return Refused("no_donor", "no learner can give")


def save(store, **changes):
  tree = {"opt_state": {"mu": jnp.full(6, 3.0)}}
  meta = {**SAVED, **changes}
  learner_store.save_learner(str(store), 1, meta["schedule_step"], tree, meta)


def find(syncer, store, specs, has_history=True):
  welcome = dataclasses.replace(WELCOME, has_history=has_history)
  return Search(syncer.take, welcome, str(store), specs).result()


def test_a_donor_is_preferred_and_the_place_is_the_saved_one(tmp_path, specs):
  save(tmp_path)
  found = find(Syncer(np.ones(6, np.float32)), tmp_path, specs)
  assert (found.source, found.donor, found.schedule_step) == ("donor", 5, 130)
  assert (np.asarray(found.opt_state["mu"]) == 1).all()
  assert found.saved == SAVED


def test_without_a_donor_the_newest_checkpoint(tmp_path, specs):
  save(tmp_path)
  save(tmp_path, schedule_step=90)
  misfit = np.ones(7, np.float32)
  syncer = Syncer(Refused("donor", "learner 2 has gone"), misfit, nobody())
  found = find(syncer, tmp_path, specs)
  assert syncer.asked == 3
  assert (found.source, found.schedule_step) == ("checkpoint", 90)
  assert (np.asarray(found.opt_state["mu"]) == 3).all()
  assert found.opt_state["mu"].sharding == specs["mu"].sharding


def test_without_either_fresh_moments_said_loudly(tmp_path, specs, caplog):
  found = find(Syncer(nobody()), tmp_path, specs)
  assert (found.source, found.opt_state, found.saved) == ("fresh", None, {})
  assert "fresh optimizer moments" in caplog.text


def test_at_the_first_start_nobody_is_asked_and_nothing_is_said(
  tmp_path, specs, caplog
):
  syncer = Syncer()
  assert find(syncer, tmp_path, specs, has_history=False).source == "fresh"
  assert syncer.asked == 0
  assert not caplog.text


def test_a_checkpoint_of_another_run_is_not_used(tmp_path, specs, caplog):
  save(tmp_path, run_id="run-0")
  found = find(Syncer(nobody()), tmp_path, specs)
  assert (found.source, found.saved) == ("fresh", {})
  assert "is of run run-0, not of run-1" in caplog.text
  found = find(Syncer(np.ones(6, np.float32)), tmp_path, specs)
  assert (found.source, found.saved) == ("donor", {})


@pytest.mark.parametrize(
  "error",
  [Unreachable("gone"), Refused("fenced", "again"), Refused("busy", "later")],
)
def test_a_syncer_that_does_not_serve_is_not_asked_for_ever(
  tmp_path, specs, error
):
  syncer = Syncer(*[error] * 10)
  assert find(syncer, tmp_path, specs).source == "fresh"
  assert syncer.asked == 3


def test_checkpoints_of_which_none_is_good_end_the_start(tmp_path, specs):
  save(tmp_path)
  [folder] = (tmp_path / "learner_1").iterdir()
  (folder / "meta.json").write_text("{}")
  with pytest.raises(DecoupledError, match=r"meta\.json"):
    find(Syncer(nobody()), tmp_path, specs)
  # a donor makes them unnecessary
  assert find(Syncer(np.ones(6, np.float32)), tmp_path, specs).donor == 5
