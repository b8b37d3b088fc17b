"""Every element of a unit is sent by exactly one host that has it."""

import collections

import numpy as np
import pytest

from decoupled.link import parts

WHOLE = ((0, 0), (8, 6))


def covered(holders, shape, hosts, unit=0):
  """Per host its share; checks that nothing is left out or sent twice."""
  times = np.zeros(shape, int)
  shares = collections.Counter()
  for host in range(hosts):
    for box in parts.owned(holders, unit, host):
      assert box.unit == unit
      times[box.within] += 1
      shares[host] += int(np.prod(box.shape))
  assert (times == 1).all()
  return [shares[host] for host in range(hosts)]


def test_what_all_hosts_have_is_divided_evenly():
  assert covered({WHOLE: [0, 1]}, (8, 6), 2) == [24, 24]
  assert covered({WHOLE: [0, 0, 1, 1, 2]}, (8, 6), 3) == [12, 18, 18]


def test_what_is_sharded_goes_with_who_has_it():
  rows = {((2 * h, 0), (2 * h + 2, 6)): [h] for h in range(4)}
  assert covered(rows, (8, 6), 4) == [12] * 4


def test_copies_of_shards_are_divided_among_their_holders():
  halves = {((0, 0), (4, 6)): [0, 2], ((4, 0), (8, 6)): [1, 3]}
  assert covered(halves, (8, 6), 4) == [12] * 4


@pytest.mark.parametrize("shape", [(), (1,), (2, 1)])
def test_what_cannot_be_divided_goes_to_the_hosts_in_turn(shape):
  whole = {((0,) * len(shape), shape): [0, 1, 2]}
  owners = [np.argmax(covered(whole, shape, 3, unit)) for unit in range(6)]
  assert sorted(owners) == [0, 0, 1, 1, 2, 2]
