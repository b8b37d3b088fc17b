"""Units of the corpus in whole jobs: deaths, departures, restarts, the end."""

import collections
import dataclasses

import numpy as np
import pytest

from decoupled.algorithm.policy import Exchange
from decoupled.checkpoint import arrays
from decoupled.data.claimed import Claims
from decoupled.launch.in_memory import Recorder
from decoupled.observe import report
from tests.exchange import jobs, storms, toy
from tests.exchange.outages import (
  restore_quickly,
  save_quickly,
  saving,
  syncer_dies,
  syncer_returns,
)

H8 = Exchange(H=8, P=8)
WINDOWS = 20  # sequences of a unit
SEQUENCES = 2  # of a step


@pytest.fixture(autouse=True)
def quick_files(monkeypatch):
  monkeypatch.setattr(arrays, "save", save_quickly)
  monkeypatch.setattr(arrays, "restore_flat", restore_quickly)


class Reader(Claims):
  """Takes its units as the thread that reads ahead does, on the spot."""

  def __init__(self):
    super().__init__(WINDOWS, SEQUENCES)
    self.position = (0, 0)
    self.rows = []
    self._unit = None

  def read(self):
    for _ in range(SEQUENCES):
      if self._unit is None:
        claim = self.take(lambda: False)
        if claim is None:
          if not self.ended:
            self.go_without("learner")
          return
        self._unit = [claim.place, claim.offset]
      self.rows.append(tuple(self._unit))
      self._unit[1] += 1
      self.position = tuple(self._unit)
      if self._unit[1] == WINDOWS:
        self._unit = None


class Data:
  """What the job sees of a reader: it is idle between units only."""

  def __init__(self):
    self.reader = Reader()
    self.wants = self.reader.wants
    self.word, self.held = self.reader.word, self.reader.held
    self.rejoined = self.reader.rejoined

  @property
  def unclaimed(self):
    return self.reader.unclaimed

  @property
  def position(self):
    return self.reader.position

  @property
  def exhausted(self):
    return self.reader.exhausted and self.reader._unit is None


class Trainer(toy.Toy):
  """A toy that reads a batch for each step."""

  def __init__(self, seed, data):
    super().__init__(seed)
    self._data = data

  def step(self, step, schedule_step):
    self._data.reader.read()
    return super().step(step, schedule_step)


@dataclasses.dataclass
class Job:
  """A job whose learners claim units; `readers` are those of all lives."""

  made: object
  readers: list

  def add(self, learner, **options):
    data = Data()
    self.readers.append(data.reader)
    jobs.add(
      self.made, learner, jobs.jittered(learner),
      trainer=Trainer(100 + learner, data), data=data, **options,
    )  # fmt: skip

  @property
  def rows(self):
    return collections.Counter(
      row for reader in self.readers for row in reader.rows
    )

  @property
  def ledger(self):
    return self.made.rounds.units.ledger

  def after(self, rounds):
    self.made.run_until(lambda: self.made.rounds.rounds_closed >= rounds)

  def end(self):
    self.made.run(3000)
    jobs.check_ended(self.made)

  def check(self, most_repeated=0):
    """Everything below the low-water mark is trained on; little is twice."""
    rows = self.rows
    for place in range(self.ledger.low):
      assert all(rows[place, i] for i in range(WINDOWS)), place
    twice = {place for (place, _), n in rows.items() if n > 1}
    assert len(twice) <= self.ledger.repeated <= most_repeated, twice
    figures = report.build(
      [{"t": 0.0, "kind": "start"}]
      + [{"t": 1.0, **e} for e in self.made.events.events]
    )["data"]
    assert figures["units_completed"] == self.ledger.completed
    assert figures["units_claimed"] == self.ledger.claimed
    return figures


def job(learners=3, rounds=200, epochs=0, **options):
  contract = (("Corpus.epochs", str(epochs)), ("Corpus.units", "8"))
  made = jobs.job(H8, 0, rounds, contract=contract, **options)
  made.rounds._plan = dataclasses.replace(made.rounds._plan, learners=learners)
  new = Job(made, [])
  for learner in range(learners):
    new.add(learner, delay_s=0.3 * learner)
  return new


def test_a_calm_run_repeats_nothing_and_never_starves():
  new = job()
  new.end()
  figures = new.check()
  assert figures["units_unclaimed"] == 0
  steps = sum(x.step for x in new.made.learners.values())
  assert sum(new.rows.values()) == steps * SEQUENCES
  # batched: about once a second while the ledger moves
  assert len(new.made.events.of("units")) < 200


@pytest.mark.parametrize("fault", [None, storms.Storm(3, 0.1, 0.2, 0.2)])
def test_a_death_repeats_one_unit_at_most(fault):
  new = job(fault=fault)
  new.after(40)
  new.made.kill(1)
  new.add(1, delay_s=9.0)  # longer than the lease
  new.after(90)
  new.made.kill(2)
  new.add(2, delay_s=1.0)
  new.end()
  figures = new.check(most_repeated=2)
  assert figures["units_repeated"] >= 1
  assert jobs.cadence(new.made, 0)


def test_a_restart_does_not_speak_of_where_its_predecessor_was():
  """Else it would have finished what it has not begun."""
  new = job(learners=1)
  new.after(40)
  new.made.kill(0)
  new.add(0, delay_s=1.0)
  learner, said = new.made.learners[0], []
  held = learner.data.held
  learner.data.held = lambda position: said.append(position) or held(position)
  new.made.run_until(lambda: learner.step >= 1)
  assert learner.link.welcome.position > (0, 0)
  *joining, own = said
  assert set(joining) == {(0, 0)}
  assert own == learner.data.position
  assert own < learner.link.welcome.position  # its unit begins anew
  new.end()
  new.check(most_repeated=1)


def test_a_learner_that_leaves_repeats_nothing():
  new = job()
  new.after(40)
  learner = new.made.learners[1]
  learner.link.close()
  learner.link = None
  new.add(1, delay_s=5.0)
  new.end()
  new.check(most_repeated=0)


def test_without_a_syncer_it_goes_on_with_what_nobody_has_claimed():
  new = job(learners=2)
  new.after(40)
  for learner in new.made.learners.values():
    learner.wire.partition()
    new.made.network.after(90.0, learner.wire.heal)
  before = {i: x.step for i, x in new.made.learners.items()}
  at = new.made.clock.now()
  new.made.run_until(lambda: new.made.clock.now() > at + 80)
  assert all(x.step > before[i] + 70 for i, x in new.made.learners.items())
  assert all(reader.unclaimed > 0 for reader in new.readers)
  new.end()
  # what they held they finished alone, and nobody else was there to have it
  figures = new.check(most_repeated=0)
  assert figures["units_unclaimed"] == sum(r.unclaimed for r in new.readers)


def test_one_that_is_cut_off_for_long_gives_its_units_to_others():
  new = job()
  new.after(40)
  wire = new.made.learners[1].wire
  wire.partition()
  new.made.network.after(120.0, wire.heal)
  new.end()
  # what it did alone on them is void (`discarded.absence`), and counted
  new.check(most_repeated=new.readers[1].wants)


def test_a_new_syncer_goes_on_from_the_snapshot_and_what_learners_say(tmp_path):
  new = job()
  saving(new.made, tmp_path, every_rounds=20)
  new.after(70)
  known = new.ledger.completed
  old = syncer_dies(new.made)
  at = new.made.clock.now()
  new.made.run_until(lambda: new.made.clock.now() > at + 6)
  syncer_returns(new.made, old, tmp_path)
  assert new.ledger.completed < known
  new.end()
  new.check(most_repeated=0)


def test_everything_dies_and_goes_on_at_the_saved_places(tmp_path):
  new = job(learners=2, rounds=100)
  snapshots = saving(new.made, tmp_path, every_rounds=1000)
  new.after(50)
  snapshots.save()
  held = {i: new.ledger.claims(i) for i in (0, 1)}
  again = Job(jobs.job(H8, 0, 100, events=Recorder()), [])
  syncer_returns(again.made, new.made.rounds, tmp_path)
  for learner in (1, 0):
    again.add(learner)
  again.made.run_until(lambda: all(len(r.rows) > 2 for r in again.readers))
  for learner, reader in zip((1, 0), again.readers, strict=True):
    first = held[learner][0]
    assert reader.rows[0] == (first.place, first.offset)
  again.end()
  assert again.ledger.repeated == 0


@pytest.mark.parametrize("learners", [1, 3])
def test_the_end_of_the_data_ends_the_run(learners):
  """Whatever dies shortly before: all units of all epochs, and then no more."""
  new = job(learners, rounds=100_000, epochs=2)
  if learners > 1:
    new.made.run_until(lambda: new.ledger.exhausted)
    new.made.kill(2)
  new.end()
  assert new.ledger.completed == new.ledger.low == 16
  assert set(new.rows) == {(p, i) for p in range(16) for i in range(WINDOWS)}
  new.check(most_repeated=1)
  phases = [e for e in new.made.events.of("phase") if e["phase"] == "draining"]
  assert [e["why"] for e in phases] == ["the data is at its end"]
  # one epoch and a bit for each step a second, a lease, and the drain
  assert new.made.clock.now() < 16 * WINDOWS / SEQUENCES / learners * 1.3 + 60
  assert np.isfinite(toy.global_loss(new.made))
