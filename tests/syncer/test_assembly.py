"""Parts of a copy: each element once, complete before it counts."""

import numpy as np
import pytest

from decoupled.errors import Refused
from decoupled.syncer.assembly import Assemblies
from decoupled.types import Contribution, CopyHeader, CopyId, Slice, Version

SHAPES = [(4, 3), (), (5,)]
WHOLE = [np.arange(12.0).reshape(4, 3), np.float32(7), np.arange(5.0)]
FIRST = (Slice(0, (0, 0), (2, 3)), Slice(1, (), ()))
SECOND = (Slice(0, (2, 0), (4, 3)), Slice(2, (0,), (5,)))


def part(host, slices, round_=1, attempt=0, incarnation=3, steps=1):
  copy = CopyId(incarnation, 1, round_, 0, attempt)
  header = CopyHeader(copy, Version(1, 0), steps, 8, 8)
  inside = [s for s in slices if s.unit < len(WHOLE)]
  arrays = tuple(
    np.asarray(WHOLE[s.unit], np.float32)[s.within] for s in inside
  )
  return Contribution(0, header, arrays, host, tuple(slices))


@pytest.fixture
def parts():
  found = Assemblies()
  found.begin(0, 3)
  return found


def test_a_copy_is_passed_on_when_every_slice_is_there(parts):
  assert parts.add(part(1, SECOND), SHAPES) is None
  assert parts.sent(0, 1) == (part(1, SECOND).header.copy,)
  assert parts.sent(0, 0) == ()
  whole = parts.add(part(0, FIRST), SHAPES)
  assert whole.slices == ()
  for array, expected in zip(whole.arrays, WHOLE, strict=True):
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, expected)
  assert parts.dropped == 0


def test_a_part_that_comes_again_changes_nothing(parts):
  assert parts.add(part(0, FIRST), SHAPES) is None
  assert parts.add(part(0, FIRST), SHAPES) is None
  assert parts.add(part(1, SECOND), SHAPES) is not None
  assert parts.add(part(1, SECOND), SHAPES) is None
  assert parts.sent(0, 1) == ()


@pytest.mark.parametrize(
  ("slices", "says"),
  [
    ((Slice(0, (3, 0), (5, 3)),), "not within unit 0"),
    ((Slice(0, (2, 0), (2, 3)),), "not within unit 0"),
    ((Slice(0, (0,), (4,)),), "not within unit 0"),
    ((Slice(3, (0,), (4,)),), "no unit 3"),
    ((Slice(0, (1, 0), (4, 3)),), "overlap"),
    ((Slice(1, (), ()),), "overlap"),
    ((Slice(2, (0,), (3,)), Slice(2, (2,), (5,))), "overlap"),
  ],
)
def test_a_slice_outside_its_unit_or_over_another_is_refused(
  parts, slices, says
):
  parts.add(part(0, FIRST), SHAPES)
  with pytest.raises(Refused, match=says) as refused:
    parts.add(part(1, slices), SHAPES)
  assert refused.value.reason == "shape"
  assert parts.add(part(1, SECOND), SHAPES) is not None


def test_parts_of_one_copy_must_agree_on_its_counters(parts):
  parts.add(part(0, FIRST), SHAPES)
  with pytest.raises(Refused) as refused:
    parts.add(part(1, SECOND, steps=2), SHAPES)
  assert refused.value.reason == "counters"


def test_what_an_ended_incarnation_has_begun_is_void(parts):
  parts.add(part(0, FIRST), SHAPES)
  parts.end(0)
  assert parts.dropped == 1
  with pytest.raises(Refused, match="incarnation 3; the run knows nobody"):
    parts.add(part(1, SECOND), SHAPES)
  parts.begin(0, 4)
  with pytest.raises(Refused) as refused:
    parts.add(part(1, SECOND), SHAPES)
  assert refused.value.reason == "fenced"
  assert parts.add(part(1, SECOND, incarnation=4), SHAPES) is None


def test_a_newer_copy_of_a_fragment_takes_the_room_of_an_older(parts):
  parts.add(part(0, FIRST), SHAPES)
  parts.add(part(0, FIRST, attempt=1), SHAPES)
  assert parts.dropped == 1
  with pytest.raises(Refused) as refused:
    parts.add(part(1, SECOND), SHAPES)
  assert refused.value.reason == "late"
  assert parts.add(part(1, SECOND, attempt=1), SHAPES) is not None
