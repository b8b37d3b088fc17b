"""Batches: deterministic, disjoint between learners, and resumable."""

import hashlib
import itertools
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled.data.pipeline import (
  Batches,
  Order,
  Steps,
  batch_spec,
  heldout_batches,
)
from decoupled.errors import ConfigError, DecoupledError

CONTEXT = 4


def text(windows: int = 256) -> np.ndarray:
  """Bytes with room for exactly that many windows."""
  rng = np.random.default_rng(0)
  return rng.integers(0, 256, (windows + 1) * CONTEXT).astype(np.uint8)


def order(**options) -> Order:
  return Order(
    len(text()), CONTEXT, **{"unit_windows": 8, "seed": 1, **options}
  )


def take(count, **options) -> list:
  options = {"seed": 1, "unit_windows": 8, **options}
  with Batches(text(), CONTEXT, options.pop("sequences", 6), **options) as data:
    return list(itertools.islice(data, count))


def rows(items) -> np.ndarray:
  return np.concatenate([item.rows for item in items])


@pytest.mark.parametrize("learners", [1, 3, 4, 5])
def test_learners_share_nothing_within_an_epoch(learners):
  per_epoch = order().units
  seen = []
  for m in range(learners):
    mine = order(learner=m, learners=learners)
    count = len(range(m, per_epoch, learners))
    seen += [mine.unit(n) for n in range(count)]
  assert len(seen) == len(set(seen)) == per_epoch
  assert {epoch for epoch, _ in seen} == {0}


def test_units_of_an_epoch_cover_every_window_once():
  whole = order()
  starts = whole.starts(0, whole.units * whole.unit_windows)
  assert len(set(starts.tolist())) == 256
  assert len({s % CONTEXT for s in starts.tolist()}) == 1  # one shift
  assert starts.min() >= 0
  assert starts.max() + CONTEXT + 1 <= len(text())


def test_a_unit_samples_the_whole_text():
  starts = np.sort(order().starts(0, 8))
  assert (np.diff(starts) == len(text()) // CONTEXT // 8 * CONTEXT).all()


def test_epochs_and_seeds_shuffle_differently():
  whole = order()
  size = whole.units * whole.unit_windows
  first, second = whole.starts(0, size), whole.starts(size, size)
  assert not np.array_equal(first, second)
  assert not np.array_equal(first, order(seed=2).starts(0, size))
  np.testing.assert_array_equal(first, order().starts(0, size))


@given(
  size=st.integers(2, 400),
  context=st.integers(1, 9),
  unit_windows=st.integers(1, 40),
  learners=st.integers(1, 5),
  row=st.integers(0, 10_000),
  data=st.data(),
)
def test_every_row_lies_inside_the_text_and_positions_are_exact(
  size, context, unit_windows, learners, row, data
):
  if size < 2 * context:
    with pytest.raises(ConfigError):
      Order(size, context)
    return
  learner = data.draw(st.integers(0, learners - 1))
  found = Order(
    size,
    context,
    learner=learner,
    learners=learners,
    unit_windows=unit_windows,
  )
  start = int(found.starts(row, 1)[0])
  assert 0 <= start <= size - context - 1
  assert found.row(found.position(row)) == row


def test_rows_are_the_text_and_its_next_byte():
  whole, data = order(), text()
  first = take(1)[0].rows
  assert first.dtype == np.int32
  for row, start in zip(first, whole.starts(0, 6), strict=True):
    np.testing.assert_array_equal(row, data[start : start + CONTEXT + 1])


@pytest.mark.parametrize("stop", [0, 1, 7])
def test_resuming_yields_exactly_the_rows_that_would_have_followed(stop):
  whole = take(20, learner=1, learners=3)
  position = whole[stop - 1].position if stop else (0, 0)
  rest = take(20 - stop, learner=1, learners=3, position=position)
  np.testing.assert_array_equal(rows(whole[stop:]), rows(rest))
  assert rest[-1].position == whole[-1].position


def test_resuming_with_another_batch_size_repeats_and_skips_nothing():
  whole = rows(take(10, sequences=6))
  before = take(4, sequences=6)
  after = take(4, sequences=9, position=before[-1].position)
  np.testing.assert_array_equal(
    np.concatenate([rows(before), rows(after)]), whole[:60]
  )


PROGRAM = """
import hashlib, itertools, json, sys
import numpy as np
from decoupled.data.pipeline import Batches
text = np.random.default_rng(0).integers(0, 256, 1028).astype(np.uint8)
data = Batches(text, 4, 6, seed=1, learner=1, learners=3, unit_windows=8,
               position=tuple(json.loads(sys.argv[1])))
digest = hashlib.sha256()
for item in itertools.islice(data, 100):
  digest.update(item.rows.tobytes())
print(digest.hexdigest())
"""


def test_a_new_process_goes_on_with_the_same_hundred_batches():
  whole = take(107, learner=1, learners=3)
  digest = hashlib.sha256()
  for item in whole[7:]:
    digest.update(item.rows.tobytes())
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM, json.dumps(whole[6].position)],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  assert done.stdout.strip() == digest.hexdigest()


def test_hosts_share_a_batch_in_order_of_their_rank():
  whole = take(5)
  parts = [take(5, host=host, hosts=3) for host in range(3)]
  for step in range(5):
    joined = np.concatenate([part[step].rows for part in parts])
    np.testing.assert_array_equal(joined, whole[step].rows)
    assert {part[step].position for part in parts} == {whole[step].position}


def test_hosts_must_divide_the_batch():
  with pytest.raises(ConfigError, match=r"sequences = 6 .* 4 hosts"):
    take(1, hosts=4)


def test_a_learner_beyond_the_number_of_learners_is_refused():
  with pytest.raises(ConfigError, match="learner 3 is not one of 3"):
    take(1, learner=3, learners=3)


def test_a_small_text_gets_smaller_units_instead_of_one():
  small = Order(33 * CONTEXT, CONTEXT, unit_windows=256)
  assert small.units == 16
  assert small.unit_windows == 2


def test_the_spec_is_what_the_pipeline_yields():
  spec, item = batch_spec(CONTEXT, 6), take(1)[0]
  assert (spec.shape, spec.dtype) == (item.rows.shape, item.rows.dtype)


def test_a_stalled_loader_is_an_error_that_names_the_data_stage(monkeypatch):
  release = threading.Event()
  real = Steps.__getitem__

  def stall(self, step):
    if step >= 1:
      release.wait(30)
    return real(self, step)

  monkeypatch.setattr(Steps, "__getitem__", stall)
  data = Batches(text(), CONTEXT, 2, learner=1, learners=2, stall_s=0.2)
  try:
    assert next(data).position == data.position != (0, 0)
    with pytest.raises(DecoupledError) as error:
      next(data)
    assert str(error.value).startswith("data: no batch for learner 1 within")
    assert str(data.position) in str(error.value)
  finally:
    release.set()
    data.close()


def test_a_failed_loader_says_why_where_it_is_waited_for(monkeypatch):
  def fail(self, step):
    raise OSError("disk gone")

  monkeypatch.setattr(Steps, "__getitem__", fail)
  with (
    Batches(text(), CONTEXT, 2) as data,
    pytest.raises(DecoupledError, match=r"data: .*disk gone"),
  ):
    next(data)


def test_reading_ahead_is_bounded_and_ends_with_close(monkeypatch):
  made = []
  real = Steps.__getitem__

  def count(self, step):
    made.append(step)
    return real(self, step)

  monkeypatch.setattr(Steps, "__getitem__", count)
  data = Batches(text(), CONTEXT, 2, prefetch=3)
  for _ in range(5):
    next(data)
  data.close()
  assert len(made) <= 5 + 3 + 1  # taken, ready, in hand
  assert not data._thread.is_alive()
  assert list(data) == []


def test_heldout_batches_are_the_same_every_time_and_share_no_target():
  held = text(100)
  once, again = (list(heldout_batches(held, CONTEXT, 8, 3)) for _ in range(2))
  np.testing.assert_array_equal(once, again)
  assert len(once) == 3
  everything = list(heldout_batches(held, CONTEXT, 10))
  assert len(everything) == 10
  targets = np.concatenate(everything)[:, 1:].ravel()
  np.testing.assert_array_equal(targets, held[1 : 1 + targets.size])


def test_heldout_batches_spread_over_the_text():
  held = np.repeat(np.arange(8, dtype=np.uint8), 100)
  seen = np.concatenate(list(heldout_batches(held, CONTEXT, 8, 2)))
  assert set(np.unique(seen)) == set(range(8))


def test_heldout_text_that_fills_no_batch_is_named():
  with pytest.raises(ConfigError, match=r"10 windows .* takes 11"):
    list(heldout_batches(text(10)[: 10 * CONTEXT + 1], CONTEXT, 11))
