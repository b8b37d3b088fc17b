"""Batches of claimed units: exact, and honest where there are none."""

import numpy as np
import pytest

from decoupled.data.claimed import ClaimedBatches, Claims
from decoupled.data.pipeline import Order
from decoupled.errors import ConfigError
from decoupled.types import Claim
from tests.run.processes import until

CONTEXT = 4
UNIT = 8  # sequences


def text() -> np.ndarray:
  rng = np.random.default_rng(0)
  return rng.integers(0, 256, 257 * CONTEXT).astype(np.uint8)


def order() -> Order:
  return Order(len(text()), CONTEXT, seed=1, unit_windows=UNIT)


def batches(claims: Claims, sequences: int = 6, **options) -> ClaimedBatches:
  return ClaimedBatches(text(), order(), claims, sequences, **options)


def rows_of(place: int, offset: int = 0) -> np.ndarray:
  """The rows of a unit from an offset on."""
  starts = order().starts(order().row((place, offset)), UNIT - offset)
  return text()[starts[:, None] + np.arange(CONTEXT + 1)]


def given(*claims: Claim, ended: bool = False, sequences: int = 6) -> Claims:
  made = Claims(UNIT, sequences)
  made.word(claims, ended)
  return made


def test_batches_run_through_the_units_held_from_where_they_begin():
  claims = given(Claim(3, 2), Claim(7), Claim(9))
  with batches(claims) as data:
    items = [next(data) for _ in range(3)]
  expected = np.concatenate([rows_of(3, 2), rows_of(7), rows_of(9)])
  found = np.concatenate([item.rows for item in items])
  np.testing.assert_array_equal(found, expected[:18])
  assert [item.position for item in items] == [(3, 8), (7, 6), (9, 4)]
  assert data.position == (9, 4)


def test_what_is_reported_follows_the_loop_and_not_the_reading_ahead():
  claims = given(Claim(3, 2), Claim(7), Claim(9))
  with batches(claims) as data:
    before = claims.held((0, 0))
    assert before == (Claim(3, 2), Claim(7), Claim(9))
    next(data), next(data)
    assert claims.held((3, 8)) == (
      Claim(3, UNIT, True), Claim(7), Claim(9),
    )  # fmt: skip
    assert claims.held((7, 6)) == (
      Claim(3, UNIT, True), Claim(7, 6), Claim(9),
    )  # fmt: skip
    # a finished unit is told until the syncer no longer lists it
    claims.word((Claim(7), Claim(9), Claim(11)), False)
    assert claims.held((7, 6)) == (Claim(7, 6), Claim(9), Claim(11))
    # a new syncer is told once more what was finished lately
    claims.rejoined()
    assert claims.held((7, 8))[:2] == (
      Claim(3, UNIT, True), Claim(7, UNIT, True),
    )  # fmt: skip


def test_a_position_that_is_no_news_finishes_nothing():
  claims = given(Claim(5), Claim(7, 3))
  taken = [claims.take(lambda: False) for _ in range(2)]
  assert claims.held((0, 0)) == claims.held((7, 3)) == tuple(taken)
  assert claims.held((7, 4)) == (Claim(5, UNIT, True), Claim(7, 4))


def test_units_that_are_somebody_elses_by_now_are_given_up_unless_begun():
  claims = given(Claim(3), Claim(7))
  assert claims.take(lambda: False) == Claim(3)
  claims.word((Claim(20),), False)
  assert claims.held((3, 2)) == (Claim(3, 2), Claim(20))


def test_hosts_share_a_batch_in_order_of_their_rank():
  def taken(**options) -> list[np.ndarray]:
    with batches(given(Claim(0), Claim(1)), **options) as data:
      return [next(data).rows for _ in range(2)]

  whole = taken()
  parts = [taken(host=host, hosts=3) for host in range(3)]
  for step in range(2):
    joined = np.concatenate([part[step] for part in parts])
    np.testing.assert_array_equal(joined, whole[step])
  with pytest.raises(ConfigError, match=r"sequences = 6 .* 4 hosts"):
    batches(given(), hosts=4)


def test_the_learners_of_a_run_see_every_row_once():
  seen = []
  for learner in range(2):
    mine = [Claim(place) for place in range(learner, order().units, 2)]
    with batches(given(*mine), sequences=UNIT) as data:
      seen += [next(data).rows for _ in mine]
  assert len(np.unique(np.concatenate(seen), axis=0)) == order().units * UNIT


def test_without_units_it_goes_on_with_its_own_shuffle_and_counts(caplog):
  claims = given(Claim(3))
  with batches(claims, learner=2) as data:
    first = [next(data) for _ in range(6)]
    assert claims.unclaimed >= 3
    assert first[1].position == first[5].position == (3, UNIT)
    [said] = [r for r in caplog.records if r.name == "decoupled.data"]
    assert "learner 2 has used up the units" in said.getMessage()
    # it takes up claimed ones as soon as there are any
    claims.word((Claim(40), Claim(41)), False)
    later = [next(data) for _ in range(12)]
    assert {item.position[0] for item in later} >= {40, 41}
    claims.held(later[-1].position)
  with batches(given(), learner=1, first_s=0.0) as data:
    other = next(data).rows
  assert not np.array_equal(other, first[2].rows)


def test_the_end_of_the_data_is_said_and_may_be_taken_back():
  claims = given(Claim(5), ended=True)
  with batches(claims) as data:
    whole, rest, none = next(data), next(data), next(data)
    assert whole.position == (5, 6)
    # filled up with its own rows: a step takes a whole batch
    np.testing.assert_array_equal(rest.rows[:2], rows_of(5)[6:])
    np.testing.assert_array_equal(rest.rows[2:4], rows_of(5)[6:])
    assert rest.position == (5, UNIT)
    assert none is None
    assert data.exhausted
    # somebody died: one of its units is handed out again
    claims.word((Claim(2, 2),), True)
    # it has been read by now, and the data is at its end again
    until(lambda: data._ready.qsize() == 2, "the batch to be read")
    assert not data.exhausted
    again = next(data)
    np.testing.assert_array_equal(again.rows, rows_of(2, 2))
    assert next(data) is None
    assert data.exhausted
  assert claims.unclaimed == 0


def test_units_held_ahead_last_for_some_steps_and_are_bounded():
  assert Claims(256, 8).wants == 3
  assert Claims(4, 8).wants == 33
  assert Claims(64, 8).wants == 4


def test_a_learner_is_ready_with_a_unit_or_without_hope_of_one():
  claims = Claims(UNIT, 6)
  assert not claims.ready
  claims.word((Claim(3),), False)
  assert claims.ready
  claims.word((), False)
  assert not claims.ready
  claims.word((), True)
  assert claims.ready
