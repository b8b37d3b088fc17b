"""Hosts of a learner know the same sequence of units, whoever claims them."""

import numpy as np
import pytest

from decoupled.data.claimed import ClaimedBatches, Claims
from decoupled.data.pipeline import Order
from decoupled.data.shared import _END, _UNCLAIMED, Shared, SharedBatches
from decoupled.types import Claim
from tests.run.processes import until

TEXT = np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8)
SEQUENCES, CONTEXT, HOSTS = 6, 16, 2


def boundary(shared):
  """One agreement: every host is told the maximum over the hosts."""
  highest = np.max([one.offer() for one in shared], axis=0)
  for one in shared:
    one.told(highest)


def order():
  return Order(len(TEXT), CONTEXT, seed=3, unit_windows=8)


def given(places, ended=False):
  claims = Claims(order().unit_windows, SEQUENCES)
  claims.word(tuple(map(Claim, places)), ended)
  return claims


@pytest.fixture
def learner():
  """Makes the hosts of one learner."""
  made = []

  def make(claims):
    shared = [Shared(h, order().unit_windows, SEQUENCES) for h in range(HOSTS)]
    nothing = Claims(order().unit_windows, SEQUENCES)
    batches = [
      SharedBatches(
        TEXT,
        order(),
        nothing if host else claims,
        shared[host],
        SEQUENCES,
        learner=1,
        host=host,
        hosts=HOSTS,
      )
      for host in range(HOSTS)
    ]
    made.extend(batches)
    return shared, batches

  yield make
  for one in made:
    one.close()


def test_a_unit_is_known_once_it_has_been_told_and_in_one_order():
  shared = [Shared(h, 8, SEQUENCES) for h in range(HOSTS)]
  for place in range(6):
    shared[0].put((place, place % 2))
  late = np.max([one.offer() for one in shared], axis=0)
  boundary(shared)
  assert [one.items for one in shared] == [5, 5]  # (8 + 7 + 8 + 7) // 6
  for one in shared:
    one.told(late)  # an answer from before that one: nothing new
  assert [one.items for one in shared] == [5, 5]
  boundary(shared)
  taken = [[one.take(0.0) for _ in range(6)] for one in shared]
  assert taken[0] == taken[1] == [(place, place % 2) for place in range(6)]
  assert shared[0].take(0.0) is None


def test_hosts_get_their_rows_of_what_one_host_alone_would_have(learner):
  claims = given(range(5))
  shared, batches = learner(claims)
  assert [one.exhausted for one in batches] == [True, True]
  assert next(batches[1]) is None  # nobody has told it anything
  until(lambda: shared[0].offer()[7] >= 0, "units on offer")
  boundary(shared)
  assert not batches[0].exhausted
  whole = ClaimedBatches(TEXT, order(), given(range(5)), SEQUENCES, learner=1)
  try:
    for _ in range(5):
      parts = [next(one) for one in batches]
      expected = next(whole)
      rows = np.concatenate([part.rows for part in parts])
      np.testing.assert_array_equal(rows, expected.rows)
      assert {part.position for part in parts} == {expected.position}
  finally:
    whole.close()
  assert claims.held((0, 6))[0] == Claim(0, 6)


def test_the_end_of_the_data_comes_to_all_hosts_with_the_same_batch(learner):
  claims = given([0], ended=True)
  shared, batches = learner(claims)
  until(lambda: _END in shared[0].offer(), "the end on offer")
  boundary(shared)
  for one in batches:
    items = [next(one) for _ in range(3)]
    assert [item is None for item in items] == [False, False, True]
    assert one.exhausted
  claims.word((Claim(7),), True)  # of a learner that has died
  until(lambda: 7 in shared[0].offer(), "the unit on offer")
  boundary(shared)
  for one in batches:
    assert not one.exhausted
    assert next(one) is not None


def test_without_claims_all_hosts_go_on_with_sequences_of_no_unit(learner):
  claims = given([])
  shared, batches = learner(claims)
  batches[0]._proposer._wait_until = 0.0  # the first unit is not waited for
  until(lambda: _UNCLAIMED in shared[0].offer(), "a unit of no claim")
  boundary(shared)
  rows = [next(one).rows for one in batches]
  assert not (rows[0] == rows[1]).all()
  assert claims.unclaimed >= 1


def test_hosts_go_on_from_a_copy_with_the_very_sequences_that_came_next(
  learner,
):
  shared, batches = learner(given(range(6)))
  until(lambda: shared[0].offer()[7] >= 0, "units on offer")
  boundary(shared)
  for _ in range(2):
    position = {next(one).position for one in batches}.pop()
  assert position == (1, 4)  # in the middle of a unit
  entries = [one.remaining(position) for one in shared]
  assert entries[0] == entries[1] == ((1, 4), (2, 0), (3, 0))
  expected = [[next(one).rows for one in batches] for _ in range(3)]
  # all hosts anew, rank 0 included, which has claimed nothing yet
  claims = given([])
  claims.resume(Claim(place, offset) for place, offset in entries[0])
  assert claims.ready
  again, others = learner(claims)
  for one in again:
    one.resume(entries[0])
  for rows in expected:
    for host, one in enumerate(others):
      item = next(one)
      np.testing.assert_array_equal(item.rows, rows[host])
  held = claims.held((0, 0))
  assert held[: len(entries[0])] == tuple(Claim(*e) for e in entries[0])
  # what was begun is no news, and what comes next follows it
  claims.word((Claim(1, 4), Claim(2), Claim(3), Claim(9)), ended=False)
  until(lambda: again[0].offer()[1] == 9, "the next unit on offer")
  assert again[0].offer()[0] == 3  # after those three
