"""Copies of learners of several hosts, put together from their parts.

A part names the boxes of units that it brings. A copy counts when its boxes
cover every unit, each element once; until then nothing of it reaches the
rounds. What is still open when its incarnation ends is void.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from decoupled.errors import Refused
from decoupled.types import Arrays, Contribution, CopyHeader, CopyId, Slice

_REMEMBERED = 64  # complete copies of a learner whose repetitions are known

Shapes = Sequence[tuple[int, ...]]


class _Copy:
  """One copy on its way."""

  def __init__(self, header: CopyHeader, shapes: Shapes):
    self.header = header
    self.arrays = [np.empty(shape, np.float32) for shape in shapes]
    self.boxes: list[list[Slice]] = [[] for _ in shapes]
    self.left = sum(math.prod(shape) for shape in shapes)
    self.hosts: set[int] = set()


@dataclasses.dataclass
class _Learner:
  incarnation: int
  copies: dict[CopyId, _Copy] = dataclasses.field(default_factory=dict)
  complete: collections.deque[CopyId] = dataclasses.field(
    default_factory=lambda: collections.deque(maxlen=_REMEMBERED)
  )


class Assemblies:
  """Every copy of which parts are here.

  Attributes:
    dropped: parts that came, and never became a copy.
  """

  def __init__(self) -> None:
    self.dropped = 0
    self._learners: dict[int, _Learner] = {}

  def begin(self, learner_id: int, incarnation: int) -> None:
    """A new incarnation: what an older one has begun is void."""
    self.end(learner_id)
    self._learners[learner_id] = _Learner(incarnation)

  def end(self, learner_id: int) -> None:
    """The incarnation is over."""
    gone = self._learners.pop(learner_id, None)
    if gone is not None:
      self.dropped += sum(len(copy.hosts) for copy in gone.copies.values())

  def sent(self, learner_id: int, host: int) -> tuple[CopyId, ...]:
    """Copies whose part of that host is here."""
    learner = self._learners.get(learner_id)
    if learner is None:
      return ()
    found = [c for c, copy in learner.copies.items() if host in copy.hosts]
    return tuple(found)

  def check(self, part: Contribution, shapes: Shapes) -> bool:
    """Whether a part is news; before any of its data is read.

    Args:
      part: its header and slices.
      shapes: of the fragment's units.

    Returns:
      False for a repetition.

    Raises:
      Refused: `fenced`, or `shape` where a slice lies outside its unit or
        overlaps another one.
    """
    copy = part.header.copy
    learner = self._learners.get(part.learner_id)
    if learner is None or learner.incarnation != copy.incarnation:
      current = "nobody" if learner is None else f"{learner.incarnation}"
      raise Refused(
        "fenced",
        f"a part of learner {part.learner_id}, incarnation {copy.incarnation}; "
        f"the run knows {current}",
      )
    if copy in learner.complete:
      return False
    known = learner.copies.get(copy)
    if known is not None and part.host in known.hosts:
      return False
    if known is not None and known.header != part.header:
      raise Refused(
        "counters",
        f"host {part.host} of learner {part.learner_id} says {part.header} of "
        f"a copy, another host {known.header}",
      )
    boxes = [[] for _ in shapes] if known is None else known.boxes
    _check_boxes(part.slices, shapes, boxes)
    return True

  def add(self, part: Contribution, shapes: Shapes) -> Contribution | None:
    """Takes a part; returns the copy if it is complete now.

    Raises:
      Refused: as `check`.
    """
    if not self.check(part, shapes):
      return None
    learner, key = self._learners[part.learner_id], part.header.copy
    copy = learner.copies.get(key)
    if copy is None:
      self._make_room(learner, key)
      copy = learner.copies[key] = _Copy(part.header, shapes)
    for box, data in zip(part.slices, part.arrays, strict=True):
      copy.arrays[box.unit][box.within] = data
      copy.boxes[box.unit].append(box)
      copy.left -= math.prod(box.shape)
    copy.hosts.add(part.host)
    if copy.left:
      return None
    del learner.copies[key]
    learner.complete.append(key)
    return Contribution(part.learner_id, copy.header, _frozen(copy.arrays))

  def _make_room(self, learner: _Learner, key: CopyId) -> None:
    """A fragment's earlier copies are overtaken; so memory is bounded.

    There is one open copy of each fragment at most, hence one model.
    """
    for other in [c for c in learner.copies if c.fragment == key.fragment]:
      if (other.term, other.round, other.attempt) > (
        key.term, key.round, key.attempt
      ):  # fmt: skip
        raise Refused("late", f"{key} was overtaken by {other}")
      self.dropped += len(learner.copies.pop(other).hosts)


def _check_boxes(
  boxes: Sequence[Slice], shapes: Shapes, known: Sequence[Sequence[Slice]]
) -> None:
  taken = [list(of_unit) for of_unit in known]
  for box in boxes:
    if box.unit >= len(shapes):
      raise Refused("shape", f"the fragment has no unit {box.unit}")
    shape = shapes[box.unit]
    inside = len(box.start) == len(shape) and all(
      0 <= a < b <= size
      for a, b, size in zip(box.start, box.stop, shape, strict=True)
    )
    if not inside:
      raise Refused(
        "shape",
        f"the slice {box.start} to {box.stop} is not within unit {box.unit} "
        f"of shape {shape}",
      )
    for other in taken[box.unit]:
      if _overlap(box, other):
        raise Refused(
          "shape",
          f"the slices {box.start} to {box.stop} and {other.start} to "
          f"{other.stop} of unit {box.unit} overlap",
        )
    taken[box.unit].append(box)


def _overlap(one: Slice, other: Slice) -> bool:
  """Whether two boxes of a unit share an element; a scalar is one element."""
  sides = zip(one.start, one.stop, other.start, other.stop, strict=True)
  return all(a < d and c < b for a, b, c, d in sides)


def _frozen(arrays: Sequence[np.ndarray]) -> Arrays:
  for array in arrays:
    array.flags.writeable = False
  return tuple(arrays)
