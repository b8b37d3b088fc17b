"""Gaps and the *undisturbed* rule, with numbers worked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled.observe import gaps
from decoupled.observe.gaps import Span

#         a gap of 1 s between 4 and 5, of 0.5 s between 5 and 5.5
ENDS = [1.0, 2.0, 3.0, 3.5, 4.0, 5.0, 5.5, 6.0]


def test_step_times_leave_out_what_touches_a_span():
  assert gaps.step_times(ENDS).tolist() == [1, 1, 0.5, 0.5, 1, 0.5, 0.5]
  avoid = [Span(3.2, 4.2)]
  assert gaps.step_times(ENDS, avoid).tolist() == [1, 1, 0.5, 0.5]


def test_median_step_is_of_quiet_steps_where_there_are_any():
  assert gaps.median_step(ENDS) == 0.5
  assert gaps.median_step(ENDS, [Span(2.9, 10)]) == 1
  assert gaps.median_step(ENDS, [Span(0, 10)]) == 0.5
  assert gaps.median_step([1.0]) is None


@pytest.mark.parametrize(
  ("span", "expected"),
  [
    (Span(3.1, 3.9), 0.5),  # inside
    (Span(3.1, 4.1), 1.0),  # a gap that ends after the span counts in full
    (Span(4.9, 5.2), 1.0),  # one that began before it too
    (Span(5.0, 5.2), 0.5),  # touching with its end only is not touching
    (Span(5.6, 9.0), 3.0),  # never stepped again: up to the end of the span
    (Span(0.0, 0.5), None),  # had not begun
    (Span(7.0, 6.0), None),  # an empty span
  ],
)
def test_longest_gap(span, expected):
  assert gaps.longest_gap(ENDS, span) == expected


def test_longest_gap_without_steps():
  assert gaps.longest_gap([], Span(0, 1)) is None


def test_complement():
  busy = [Span(5, 6), Span(2, 3), Span(2.5, 4), Span(9, 20)]
  assert gaps.complement(Span(1, 10), busy) == [
    Span(1, 2),
    Span(4, 5),
    Span(6, 9),
  ]
  assert gaps.complement(Span(1, 10), []) == [Span(1, 10)]
  assert gaps.complement(Span(1, 10), [Span(0, float("inf"))]) == []


@given(
  st.lists(
    st.tuples(st.floats(0, 100), st.floats(0, 20)).map(
      lambda x: Span(x[0], x[0] + x[1])
    )
  )
)
def test_complement_touches_nothing_busy_and_leaves_nothing_out(busy):
  whole = Span(10, 90)
  free = gaps.complement(whole, busy)
  for at in np.linspace(10.05, 89.95, 80):
    inside_busy = any(s.start < at < s.stop for s in busy)
    inside_free = any(s.start <= at <= s.stop for s in free)
    on_edge = any(at in s for s in [*busy, *free])
    assert on_edge or inside_busy != inside_free


def test_quiet_stretch_is_the_latest_before_else_the_earliest_after():
  free = [Span(0, 5), Span(7, 10), Span(20, 40)]
  assert gaps.quiet_stretch(free, 2, before=15) == Span(8, 10)
  assert gaps.quiet_stretch(free, 4, before=15) == Span(1, 5)
  assert gaps.quiet_stretch(free, 6, before=15) == Span(20, 26)
  assert gaps.quiet_stretch(free, 6, before=30) == Span(24, 30)
  assert gaps.quiet_stretch(free, 25, before=15) is None


@pytest.mark.parametrize(
  ("gap", "median", "quiet", "expected"),
  [
    (0.18, 0.06, None, True),  # 3 steps, whatever the quiet gap is
    (0.19, 0.06, None, None),  # nobody can tell
    (0.19, 0.06, 0.16, True),  # 1.25 × 0.16 = 0.20
    (0.21, 0.06, 0.16, False),
    (1.10, 0.06, 2.00, False),  # the cap at steps below 100 ms
    (1.10, 0.06, None, False),
    (1.10, 0.10, 2.00, True),  # no cap at 100 ms
    (3.00, 1.00, None, True),
    (3.10, 1.00, 1.00, False),
  ],
)
def test_undisturbed(gap, median, quiet, expected):
  assert gaps.undisturbed(gap, median, quiet) is expected


def _steps(*gaps_at, step=0.05, until=60.0):
  """Regular step ends, with longer gaps {start: length} put in."""
  ends, at, extra = [], 0.0, dict(gaps_at)
  while at < until:
    at += step
    for start in [s for s in extra if s <= at]:
      at += extra.pop(start)
    ends.append(at)
  return ends


def test_judge_takes_window_and_quiet_stretch_apart():
  ends = _steps((5.0, 0.3), (31.0, 0.25))
  window, run = Span(30, 42), Span(0, 60)
  verdict = gaps.judge(ends, window, [window], run)
  assert verdict.gap_s == pytest.approx(0.30)
  assert verdict.median_step_s == pytest.approx(0.05)
  # the latest quiet stretch of 12 s before 30 s is 18..30: nothing there
  assert verdict.quiet_gap_s == pytest.approx(0.05)
  assert verdict.undisturbed is False


def test_judge_against_a_quiet_stretch_that_was_no_better():
  ends = _steps((20.0, 0.3), (31.0, 0.25))
  window = Span(30, 42)
  verdict = gaps.judge(ends, window, [window], Span(0, 60))
  assert verdict.quiet_gap_s == pytest.approx(0.35)
  assert verdict.undisturbed is True


def test_judge_without_a_quiet_stretch():
  ends = _steps((31.0, 0.25))
  window = Span(30, 42)
  verdict = gaps.judge(ends, window, [window], Span(25, 50))
  assert verdict.quiet_gap_s is None
  assert verdict.undisturbed is None
