"""The ledger: no unit is lost, and none repeated beyond its bound."""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
  RuleBasedStateMachine,
  initialize,
  invariant,
  rule,
)

from decoupled.syncer.ledger import Ledger
from decoupled.types import Claim

SIZE = 4  # sequences of a unit
WANTS = 3


class Process:
  """A learner as the ledger sees it: takes its units in order."""

  def __init__(self, learner, incarnation):
    self.learner, self.incarnation = learner, incarnation
    self.seq = 0
    self.waiting: list[Claim] = []
    self.now: Claim | None = None
    self.done: list[int] = []  # still listed
    self.lately: list[int] = []
    self.trained: list[tuple[int, int]] = []
    self.heard = False

  def word(self, claims):
    if not self.heard:
      return
    listed = {c.place for c in claims}
    self.done = [p for p in self.done if p in listed]
    mine = {*self.done, self.now.place if self.now else -1}
    self.waiting = [c for c in claims if c.place not in mine]

  def step(self):
    """Trains on one sequence, if it holds any."""
    if self.now is None:
      if not self.waiting:
        return
      self.now = self.waiting.pop(0)
    self.trained.append((self.now.place, self.now.offset))
    self.now = self.now._replace(offset=self.now.offset + 1)
    if self.now.offset == SIZE:
      self.done.append(self.now.place)
      self.lately.append(self.now.place)
      self.now = None

  def said(self):
    self.seq += 1
    now = [] if self.now is None else [self.now]
    done = [Claim(p, SIZE, done=True) for p in self.done]
    return (self.seq, (*done, *now, *self.waiting))


class Run(RuleBasedStateMachine):
  """Any interleaving of claims, steps, deaths, departures and restarts."""

  @initialize(learners=st.integers(1, 4))
  def begin(self, learners):
    self.ledger = Ledger()
    self.incarnations = dict.fromkeys(range(learners), 0)
    self.alive: dict[int, Process] = {}
    self.away: dict[int, Process] = {}  # cut off, and may be back
    self.old: list[tuple[int, int, int, tuple]] = []  # reports that come late
    self.counts: dict[tuple[int, int], int] = {}
    self.deaths = 0
    self.saved = self.ledger.state()
    for learner in self.incarnations:
      self.start(learner)

  def start(self, learner, process=None):
    self.incarnations[learner] += 1
    number = self.incarnations[learner]
    if process is None:
      process = Process(learner, number)
    else:
      process.incarnation, process.heard = number, False
    self.ledger.join(learner, number, same_process=process.seq > 0)
    process.seq = 0
    self.alive[learner] = process

  def tell(self, process, wants=WANTS):
    seq, claims = process.said()
    said = (process.learner, process.incarnation, seq, claims)
    self.old.append(said)
    self.ledger.report(*said, wants)
    process.heard = True

  def harvest(self, process):
    for row in process.trained:
      self.counts[row] = self.counts.get(row, 0) + 1
    process.trained.clear()

  @rule(pick=st.integers(0, 3), steps=st.integers(0, 6), hears=st.booleans())
  def goes_on(self, pick, steps, hears):
    process = self.alive.get(pick)
    if process is None:
      return
    for _ in range(steps):
      before = process.now
      process.step()
      if process.now is None or before is None:
        self.tell(process)  # units are longer than what goes unreported
        process.word(self.ledger.claims(pick))
    self.tell(process)
    if hears:
      process.word(self.ledger.claims(pick))
    self.harvest(process)

  @rule(pick=st.integers(0, 100))
  def an_old_report_comes_again(self, pick):
    if self.old:
      before = self.ledger.state()
      learner, incarnation, seq, claims = self.old[pick % len(self.old)]
      self.ledger.report(learner, incarnation, seq, claims, WANTS)
      assert self.ledger.state() == before

  @rule(pick=st.integers(0, 3), released=st.booleans())
  def dies(self, pick, released):
    if self.alive.pop(pick, None) is not None:
      self.deaths += 1
      self.ledger.park(pick, died=True)
      if released:
        self.ledger.release(pick)

  @rule(pick=st.integers(0, 3))
  def leaves(self, pick):
    process = self.alive.pop(pick, None)
    if process is not None:
      self.tell(process, wants=0)
      self.ledger.release(pick)

  @rule(pick=st.integers(0, 3))
  def is_cut_off_for_a_moment(self, pick):
    process = self.alive.get(pick)
    if process is not None:
      self.ledger.park(pick, died=True)
      self.start(pick, process)
      self.tell(process)
      process.word(self.ledger.claims(pick))

  @rule(pick=st.integers(0, 3))
  def is_started(self, pick):
    if pick in self.incarnations and pick not in self.alive:
      self.start(pick)

  @rule()
  def is_saved(self):
    self.saved = json.loads(json.dumps(self.ledger.state()))

  @rule()
  def the_syncer_restarts(self):
    """Learners that live say what they hold, and did lately, first."""
    self.ledger = Ledger.of(self.saved)
    for learner in self.ledger.holders():
      if learner not in self.alive:
        self.ledger.release(learner)
    for learner, process in list(self.alive.items()):
      process.done = list(process.lately)
      self.start(learner, process)
      self.tell(process, wants=0)
    # who died since the snapshot: what it did is as lost as the merges
    self.deaths_unsaved = True

  @invariant()
  def every_unit_is_done_held_or_free_once(self):
    if not hasattr(self, "ledger"):
      return
    held = [
      claim.place
      for learner in self.ledger.holders()
      for claim in self.ledger.claims(learner)
    ]
    assert len(held) == len(set(held))
    assert not set(held) & self.ledger._done
    assert all(place >= self.ledger.low for place in held)

  def teardown(self):
    """Whoever is left finishes: everything below the last one is trained."""
    if not hasattr(self, "ledger"):
      return
    for learner in self.incarnations:
      if learner not in self.alive:
        self.ledger.release(learner)
    if not self.alive:
      self.start(0)
    self.ledger.limit = max(
      [self.ledger.low + 1, *self.ledger._owner, *self.ledger._done]
    ) + 1  # fmt: skip
    for _ in range(1000):
      for process in self.alive.values():
        self.tell(process)
        process.word(self.ledger.claims(process.learner))
        process.step()
        self.harvest(process)
      if self.ledger.finished:
        break
    assert self.ledger.finished
    rows = {(p, o) for p in range(self.ledger.limit) for o in range(SIZE)}
    if not hasattr(self, "deaths_unsaved"):
      assert rows <= set(self.counts)
      twice = {place for (place, _), n in self.counts.items() if n > 1}
      assert len(twice) <= self.ledger.repeated <= self.deaths
    assert self.ledger.completed == self.ledger.limit


Run.TestCase.settings = settings(
  max_examples=60, stateful_step_count=30, deadline=None
)
TestAnyInterleaving = Run.TestCase


def consume(learners, limit=40, slow=()):
  """Learners that take turns until the data is at its end."""
  ledger = Ledger(limit)
  processes = [Process(i, 1) for i in range(learners)]
  for process in processes:
    ledger.join(process.learner, 1, same_process=False)
  rows = []
  for turn in range(10_000):
    for process in processes:
      if process.learner in slow and turn % 7:
        continue
      process.step()
      ledger.report(process.learner, 1, *process.said(), WANTS)
      process.heard = True
      process.word(ledger.claims(process.learner))
    if ledger.finished:
      break
  for process in processes:
    rows += process.trained
  return rows


@pytest.mark.parametrize(("learners", "slow"), [(1, ()), (3, ()), (5, (0, 2))])
def test_the_same_units_however_many_learners_there_are(learners, slow):
  rows = consume(learners, slow=slow)
  assert sorted(rows) == [(p, o) for p in range(40) for o in range(SIZE)]


def test_the_lowest_free_unit_comes_first_and_a_second_claimant_gets_another():
  ledger = Ledger()
  for learner in (4, 2):
    ledger.join(learner, 1, same_process=False)
  ledger.report(4, 1, 1, (), 2)
  ledger.report(2, 1, 1, (), 2)
  assert ledger.claims(4) == (Claim(0), Claim(1))
  assert ledger.claims(2) == (Claim(2), Claim(3))
  # learner 2 also lists what is another's: it does not get it
  ledger.report(2, 1, 2, (Claim(0), Claim(2), Claim(3)), 2)
  assert ledger.claims(2) == (Claim(2), Claim(3))
  assert ledger.void(2) == {0}
  assert ledger.repeated == 0  # it has not begun it
  ledger.report(2, 1, 3, (Claim(0, 2), Claim(1, 1), Claim(3)), 2)
  ledger.report(2, 1, 4, (Claim(0, 3), Claim(1, 2), Claim(3)), 2)
  assert ledger.repeated == 2  # however often it says so


def test_a_death_begins_one_unit_again_and_a_departure_none():
  ledger = Ledger()
  ledger.join(0, 1, same_process=False)
  ledger.report(0, 1, 1, (), 3)
  ledger.report(0, 1, 2, (Claim(0, 4, True), Claim(1, 2), Claim(2)), 3)
  ledger.park(0, died=True)
  ledger.release(0)
  ledger.join(1, 1, same_process=False)
  ledger.report(1, 1, 1, (), 2)
  assert ledger.claims(1) == (Claim(1, 0), Claim(2, 0))
  assert (ledger.repeated, ledger.completed) == (1, 1)
  # it leaves in order: the next one goes on right there
  ledger.report(1, 1, 2, (Claim(1, 3), Claim(2)), 0)
  ledger.release(1)
  ledger.join(2, 1, same_process=False)
  ledger.report(2, 1, 1, (), 1)
  assert ledger.claims(2) == (Claim(1, 3),)
  assert ledger.repeated == 1
  # and whoever dies there begins where the one before had left
  ledger.park(2, died=True)
  ledger.join(2, 2, same_process=False)
  assert ledger.claims(2) == (Claim(1, 3),)
  assert ledger.repeated == 1
  ledger.report(2, 2, 1, (Claim(1, 4),), 1)
  ledger.park(2, died=True)
  ledger.join(2, 3, same_process=False)
  assert ledger.claims(2) == (Claim(1, 3),)
  assert ledger.repeated == 1  # it counts units


def test_a_connection_that_comes_back_costs_nothing():
  ledger = Ledger()
  ledger.join(0, 1, same_process=False)
  ledger.report(0, 1, 1, (), 2)
  ledger.report(0, 1, 2, (Claim(0, 2), Claim(1)), 2)
  ledger.park(0, died=True)
  ledger.join(0, 2, same_process=True)
  ledger.report(0, 1, 9, (), 2)  # a late word of the lost connection
  ledger.report(0, 2, 1, (Claim(0, 4, True), Claim(1, 1)), 2)
  assert ledger.claims(0) == (Claim(1, 1), Claim(2))
  assert ledger.repeated == 0


def test_a_new_ledger_learns_from_its_learners_what_the_old_one_knew():
  """The snapshot is older than what was done since."""
  ledger = Ledger()
  ledger.join(0, 1, same_process=False)
  ledger.report(0, 1, 1, (), 2)
  saved = json.loads(json.dumps(ledger.state()))
  new = Ledger.of(saved)
  new.join(0, 2, same_process=True)
  done = [Claim(place, SIZE, True) for place in (0, 1, 2, 5)]
  new.report(0, 2, 1, (*done, Claim(7, 1)), 2)
  assert new.completed == 4
  assert new.low == 3
  assert new.claims(0) == (Claim(3), Claim(7, 1))
  assert new.repeated == 0
  assert json.loads(json.dumps(new.state()))["done"] == [[5, 5]]


def test_the_state_stays_small_while_units_are_finished_in_any_order():
  ledger = Ledger()
  ledger.join(0, 1, same_process=False)
  for seq in range(1, 2000):
    held = ledger.claims(0)
    finished = tuple(Claim(c.place, SIZE, True) for c in reversed(held[1:]))
    ledger.report(0, 1, seq, (*held[:1], *finished), 5)
  state = ledger.state()
  assert ledger.completed > 5000
  assert len(json.dumps(state)) < 400
  assert Ledger.of(state).completed == ledger.completed
