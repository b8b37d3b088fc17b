"""Snapshots while training, and a syncer that goes on from them."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from decoupled.algorithm import outer
from decoupled.algorithm.policy import Exchange
from decoupled.checkpoint import arrays, commit, syncer_store
from decoupled.observe import report
from decoupled.types import Phase, Version
from tests.exchange import jobs, toy
from tests.exchange.outages import (
  Timed,
  restore_quickly,
  save_quickly,
  saving,
  syncer_dies,
  syncer_returns,
)

H8 = Exchange(H=8, P=8)


@pytest.fixture(autouse=True)
def quick_files(monkeypatch):
  monkeypatch.setattr(arrays, "save", save_quickly)
  monkeypatch.setattr(arrays, "restore_flat", restore_quickly)


def after(made, rounds):
  made.run_until(lambda: made.rounds.rounds_closed >= rounds)


def later(made, seconds):
  at = made.clock.now()
  made.run_until(lambda: made.clock.now() >= at + seconds)


def numbers(store: Path) -> list[int]:
  return sorted(int(p.name.split("-")[0]) for p in (store / "global").iterdir())


def held_by(made, learner_id):
  params = made.learners[learner_id].trainer.params
  return toy.learner_params(params, made)


def saved_params(snapshot):
  return {
    f"{unit.tensor}.{unit.layer}": array
    for units, arrays in zip(
      snapshot.manifest.fragments, snapshot.fragments, strict=True
    )
    for unit, array in zip(units, arrays, strict=True)
  }


def test_a_save_that_hangs_is_not_waited_for_without_limit(tmp_path, caplog):
  made = jobs.job(H8, learners=2, rounds=60)
  works = []
  snapshots = saving(made, tmp_path, works.append, every_rounds=20)
  after(made, 20)
  assert not snapshots.save(limit_s=0.01)  # version 0 is under way
  assert "the state at round 20 is not saved" in caplog.text
  works.pop()()
  assert snapshots.save(limit_s=0.01)
  assert numbers(tmp_path)[-1] == 20


def test_what_is_saved_is_the_state_at_the_cut(tmp_path):
  """However late it is written, and whatever has been merged by then."""
  made = jobs.job(H8, learners=2, rounds=60)
  works = []
  snapshots = saving(made, tmp_path, works.append, every_rounds=20)
  after(made, 20)
  assert len(works) == 1  # version 0: it is still under way
  works.pop()()
  after(made, 21)
  assert len(works) == 1  # due since round 20, when one was under way
  at_cut, versions = toy.global_params(made), made.rounds.model.versions
  state = [f.outer_state for f in made.rounds.model.fragments]
  tokens = dict(made.rounds.tokens)
  after(made, 34)
  assert any((at_cut[k] != v).any() for k, v in toy.global_params(made).items())
  works.pop()()
  found = syncer_store.restore_newest(str(tmp_path))
  snapshot = found.value
  assert (snapshot.rounds, snapshot.term, snapshot.run_id) == (21, 1, "memory")
  assert snapshot.versions == versions
  for name, array in saved_params(snapshot).items():
    assert (array == at_cut[name]).all(), name
  for saved, kept in zip(snapshot.outer, state, strict=True):
    for one, other in zip(saved, outer.state_arrays(kept), strict=True):
      assert (one == other).all()
  assert {i: place.tokens for i, place in snapshot.learners.items()} == tokens
  assert snapshots.saved == 2


def test_snapshots_are_taken_at_the_interval_and_the_newest_stay(tmp_path):
  made = jobs.job(H8, learners=2, rounds=64)
  snapshots = saving(made, tmp_path, every_rounds=12, keep=2)
  made.run(1000)
  jobs.check_ended(made)
  # version 0 for good, and the last two; at 64 the last round had closed
  assert numbers(tmp_path) == [0, 60, 64]
  said = made.events.of("checkpoint")
  assert [e["round"] for e in said] == [0, 12, 24, 36, 48, 60, 64]
  assert all(e["ok"] for e in said)
  assert (snapshots.saved, snapshots.failed) == (7, 0)
  for learner in (0, 1):
    assert max(jobs.cadence(made, learner)) < 1.1


def test_the_interval_may_be_one_of_time(tmp_path):
  made = jobs.job(H8, learners=1, rounds=40)
  saving(made, tmp_path, every_rounds=0, every_s=15.0)
  made.run(1000)
  rounds = [e["round"] for e in made.events.of("checkpoint")]
  assert rounds[0] == 0
  assert rounds[-1] == 40
  assert all(14 <= b - a <= 17 for a, b in itertools.pairwise(rounds[:-1]))


def test_a_young_run_is_saved_soon_and_then_more_and_more_seldom(tmp_path):
  made = jobs.job(H8, learners=2, rounds=300)
  saving(made, tmp_path, every_rounds=100, least_s=20.0, first_s=3.0)
  made.run(1000)
  closed = {e["round"]: e["merged"] for e in made.events.of("round")}
  began = min(closed.values())
  rounds = [e["round"] for e in made.events.of("checkpoint")]
  times = [closed[r] - began for r in rounds[1:]]
  assert rounds[0] == 0
  assert 3 <= rounds[1] <= 10
  for before, after in itertools.pairwise(times[:-1]):
    # half of the run, or an interval, may be lost
    assert after - before <= max(before, 100) + 5
    assert after - before >= min(before, 20) - 1
  assert rounds[-1] == 300
  assert len(rounds) < 12
  held = max(b - a for a, b in itertools.pairwise(rounds))
  assert held <= 103


def test_a_run_that_goes_on_from_a_snapshot_is_not_young(tmp_path):
  made = jobs.job(H8, learners=1, rounds=40)
  saving(made, tmp_path, every_rounds=20, first_s=1.0)
  after(made, 25)
  restored = syncer_returns(made, syncer_dies(made), tmp_path)
  already = len(made.events.of("checkpoint"))
  saving(made, tmp_path, every_rounds=100, first_s=1.0)
  made.run(1000)
  said = made.events.of("checkpoint")[already:]
  assert [e["round"] for e in said] == [40]
  assert 0 < restored.number < 25


def test_a_save_that_fails_is_counted_and_training_goes_on(tmp_path):
  blocked = tmp_path / "store"
  made = jobs.job(H8, learners=2, rounds=50)
  snapshots = saving(made, blocked, every_rounds=16)
  after(made, 20)
  (blocked / "global").rename(tmp_path / "aside")
  (blocked / "global").write_text("")
  after(made, 40)
  (blocked / "global").unlink()
  (tmp_path / "aside").rename(blocked / "global")
  made.run(1000)
  jobs.check_ended(made)
  said = made.events.of("checkpoint")
  assert [(e["round"], e["ok"]) for e in said] == [
    (0, True), (16, True), (32, False), (48, True), (50, True),
  ]  # fmt: skip
  assert str(blocked) in said[2]["error"]
  assert (snapshots.saved, snapshots.failed) == (4, 1)
  assert max(jobs.cadence(made, 0)) < 1.1


def test_a_fenced_syncer_commits_nothing(tmp_path):
  made = jobs.job(H8, learners=1, rounds=30)
  snapshots = saving(made, tmp_path, every_rounds=10)
  after(made, 15)

  def fenced():
    raise RuntimeError("fenced: another one serves")

  snapshots._may_commit = fenced
  after(made, 25)
  assert numbers(tmp_path) == [0, 10]
  assert "fenced" in made.events.of("checkpoint")[-1]["error"]


def test_what_an_earlier_term_still_wrote_is_not_the_newest(tmp_path):
  """Stopped between its last look and the commit, and then continued."""
  made = jobs.job(H8, learners=1, rounds=40)
  saving(made, tmp_path, every_rounds=10)
  after(made, 12)
  old = syncer_dies(made)
  syncer_returns(made, old, tmp_path)
  saving(made, tmp_path, every_rounds=5)
  after(made, 16)
  late = syncer_store.restore_newest(str(tmp_path)).value
  assert (late.term, late.rounds) == (2, 15)
  stray = dataclasses.replace(late, term=1, rounds=38)
  syncer_store.save_global(str(tmp_path), 38, stray)
  found = syncer_store.restore_newest(str(tmp_path)).value
  assert (found.term, found.rounds) == (2, 15)


@pytest.mark.parametrize("adoption", ["overwrite", "carry"])
def test_a_syncer_dies_and_its_successor_goes_on(tmp_path, adoption):
  exchange = Exchange(H=8, P=8, adoption=adoption)
  made = jobs.job(exchange, learners=3, rounds=100, events=Timed())
  made.events.clock = made.clock
  saving(made, tmp_path, every_rounds=20)
  after(made, 50)
  steps = {i: x.step for i, x in made.learners.items()}
  old = syncer_dies(made)
  newest = max(e["round"] for e in jobs.counted(made))
  later(made, 20.0)
  # they went on, each at its own pace
  assert all(x.step >= steps[i] + 18 for i, x in made.learners.items())
  restored = syncer_returns(made, old, tmp_path)
  new = saving(made, tmp_path, every_rounds=20)
  assert restored.number == 40
  made.run(2000)
  jobs.check_ended(made)
  second = [e for e in jobs.counted(made) if e["term"] == 2]
  assert [e["round"] for e in second] == list(range(41, 101))
  # the report counts as lost what had to be done again, and no step twice
  built = report.build(made.events.events)
  assert built["rounds"]["lost"] == newest - 40 > 0
  assert built["discarded"]["rollback"] > 0
  assert built["checkpoints"]["failed_saves"] == 0
  for i, learner in enumerate(built["learners"]):
    assert learner["max_gap_s"] < 1.1
    ends = report.Timeline(made.events.events).learners[i].ends
    assert len(ends) == pytest.approx(made.learners[i].step, abs=2)
  joins = made.events.of("join")
  for i in range(3):
    assert [e["incarnation"] for e in joins if e["learner"] == i] == [1, 2]
    rates = made.learners[i].trainer.schedule_steps
    assert all(a < b for a, b in itertools.pairwise(rates))  # never back
  assert new.saved == 3
  assert toy.global_loss(made) < 0.05


def test_restored_parameters_are_adopted_by_overwriting(tmp_path):
  """A merged copy of the lost timeline must not be carried on."""
  exchange = Exchange(H=8, P=8, adoption="carry")
  made = jobs.job(exchange, 2, 60, trainer=lambda _: toy.Counter())
  saving(made, tmp_path, every_rounds=16)
  after(made, 30)
  old = syncer_dies(made)
  later(made, 30.0)
  restored = syncer_returns(made, old, tmp_path)
  snapshot = saved_params(restored.value)
  for x in made.learners.values():
    assert all(v.term == 1 for v in x.link.versions)
  made.run_until(
    lambda: all(
      v.term == 2 for x in made.learners.values() for v in x.link.versions
    )
  )
  for i in made.learners:
    for name, value in held_by(made, i).items():
      # a step or two since, instead of the fifty of the lost timeline
      assert np.abs(value - snapshot[name]).max() <= 4, name
  assert made.rounds.model.versions[7] >= Version(2, 16)


def test_an_unfinished_and_a_corrupt_one_are_named_and_passed_over(
  tmp_path, caplog
):
  made = jobs.job(H8, learners=1, rounds=40)
  saving(made, tmp_path, every_rounds=10)
  after(made, 31)
  old = syncer_dies(made)
  folders = commit.folders(tmp_path / "global")
  newest, second = Path(folders[0]), Path(folders[1])
  (newest / commit.MARKER).unlink()
  data = second / "arrays.npz"
  data.write_bytes(data.read_bytes()[:-1] + b"?")
  restored = syncer_returns(made, old, tmp_path)
  assert restored.number == 10
  assert [
    str(newest) in restored.skipped[0],
    str(second) in restored.skipped[1],
  ]
  assert data.name in restored.skipped[1]
  saving(made, tmp_path, every_rounds=10)
  made.run(1000)
  jobs.check_ended(made)
  assert syncer_store.restore_newest(str(tmp_path)).number == 40


def test_a_syncer_that_died_before_it_saved_goes_on_from_its_learners():
  made = jobs.job(H8, learners=2, rounds=60)
  after(made, 24)
  loss = toy.global_loss(made)
  old = syncer_dies(made)
  made.kill(0)
  later(made, 5.0)
  # who comes back first is fresh, and has the lowest id
  jobs.add(made, 0, 1.0, init_seed=9)
  syncer_returns(made, old)
  made.run_until(lambda: made.rounds.has_history)
  assert toy.global_loss(made) < 1.5 * loss + 0.05
  assert made.rounds.model.versions == (Version(2, 0),) * 8
  made.run(1000)
  jobs.check_ended(made)
  assert [e["round"] for e in jobs.counted(made) if e["term"] == 2] == list(
    range(1, 61)
  )
  assert made.learners[0].losses[0] < 0.5  # never its own fresh ones


def test_learners_paused_for_want_of_a_syncer_go_on_with_its_successor(
  tmp_path,
):
  exchange = Exchange(H=8, P=8, max_unsynced_steps=16)
  made = jobs.job(exchange, learners=2, rounds=60)
  saving(made, tmp_path, every_rounds=20)
  after(made, 30)
  old = syncer_dies(made)
  later(made, 60.0)
  paused = {i: x.step for i, x in made.learners.items()}
  versions = {i: x.link.versions for i, x in made.learners.items()}
  later(made, 20.0)
  assert {i: x.step for i, x in made.learners.items()} == paused
  syncer_returns(made, old, tmp_path)
  # it visits boundaries all the while, so that it adopts without a step
  made.run_until(
    lambda: all(
      x.link.versions != versions[i] for i, x in made.learners.items()
    )
  )
  made.run(1000)
  jobs.check_ended(made)
  for i, x in made.learners.items():
    assert x.step > paused[i] + 20


def test_a_syncer_that_died_in_the_drain_ends_the_run_for_its_learners(
  tmp_path,
):
  """Its snapshot holds every round asked for; they wait for the end."""
  made = jobs.job(H8, learners=3, rounds=40)
  saving(made, tmp_path, every_rounds=10)
  made.run_until(lambda: made.rounds.phase is Phase.DRAINING)
  old = syncer_dies(made)
  later(made, 3.0)
  steps = {i: x.step for i, x in made.learners.items()}
  restored = syncer_returns(made, old, tmp_path)
  assert restored.number == 40
  for learner in restored.value.learners:
    made.rounds.expect(made.clock.now(), learner, 60.0)
  at = made.clock.now()
  made.run(1000)
  assert made.clock.now() < at + 20
  jobs.check_ended(made)
  for i, learner in made.learners.items():
    assert not learner.link._over  # it was there, and holds the last versions
    assert learner.step <= steps[i] + 4
  assert jobs.counted(made)[-1]["round"] == 40


def test_everything_dies_and_the_same_again_continues(tmp_path):
  """Step, loss, learning rate and data position, with nobody left."""
  made = jobs.job(H8, learners=2, rounds=100)
  saving(made, tmp_path, every_rounds=15)
  after(made, 50)
  loss = toy.global_loss(made)
  again = jobs.job(H8, learners=2, rounds=100, events=made.events)
  restored = syncer_returns(again, made.rounds, tmp_path)
  assert restored.number == 45
  places = restored.value.learners
  again.run_until(lambda: all(x.losses for x in again.learners.values()))
  for i, learner in again.learners.items():
    assert learner.link.welcome.position == places[i].position
    assert learner.link.welcome.has_history
    assert learner.trainer.schedule_steps[0] >= 45  # H / P is 1
    assert learner.losses[0] < 2 * loss + 0.1
    assert learner.link.welcome.incarnation == places[i].incarnation + 1
  again.run(1000)
  jobs.check_ended(again)
  assert sum(again.rounds.tokens.values()) > sum(
    place.tokens for place in places.values()
  )
