"""Step times, gaps and the *undisturbed* rule, on arrays of step-end times.

Pure: reports and benchmarks judge with the same code. All times are seconds
on one clock; `ends` are the ascending times at which a learner's steps
finished, several incarnations joined.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SETTLE_S = 10.0  # how long after a takeover its consequences are looked for
CAP_S = 1.0  # longest gap allowed at steps below CAP_BELOW_S
CAP_BELOW_S = 0.1


class Span(NamedTuple):
  """A stretch of time [start, stop]."""

  start: float
  stop: float

  @property
  def length(self) -> float:
    return self.stop - self.start


class Verdict(NamedTuple):
  """How a survivor fared; fields as in the report's `survivors`."""

  gap_s: float | None
  median_step_s: float | None
  quiet_gap_s: float | None
  undisturbed: bool | None


def step_times(
  ends: npt.ArrayLike, avoid: Iterable[Span] = ()
) -> npt.NDArray[np.float64]:
  """Times between consecutive ends, without those that touch `avoid`.

  Args:
    ends: (n,) step ends.
    avoid: spans whose steps are left out.

  Returns:
    (≤ n - 1,) float64 seconds.
  """
  at = np.asarray(ends, np.float64)
  times = np.diff(at)
  keep = np.ones(times.shape, bool)
  for span in avoid:
    keep &= (at[1:] <= span.start) | (at[:-1] >= span.stop)
  return times[keep]


def median_step(
  ends: npt.ArrayLike, avoid: Iterable[Span] = ()
) -> float | None:
  """Median quiet step; of all steps where none is quiet; None without two."""
  times = step_times(ends, avoid)
  if not times.size:
    times = step_times(ends)
  return float(np.median(times)) if times.size else None


def longest_gap(ends: npt.ArrayLike, span: Span) -> float | None:
  """Longest time without a finished step that touches `span`.

  A gap that begins before or ends after the span counts in full, so that a
  freeze is not cut down to the part that was looked at. A learner that does
  not step again is counted up to the end of the span.

  Returns:
    Seconds; None if the learner had finished no step before the span ended.
  """
  at = np.asarray(ends, np.float64)
  if not at.size or at[0] >= span.stop or span.length < 0:
    return None
  if at[-1] < span.stop:
    at = np.append(at, span.stop)
  touches = (at[1:] > span.start) & (at[:-1] < span.stop)
  return float(np.diff(at)[touches].max(initial=0.0))


def complement(whole: Span, busy: Iterable[Span]) -> list[Span]:
  """The parts of `whole` that no span of `busy` touches, in order."""
  free = []
  at = whole.start
  for span in sorted(busy):
    if span.start > at:
      free.append(Span(at, min(span.start, whole.stop)))
    at = max(at, span.stop)
    if at >= whole.stop:
      break
  if at < whole.stop:
    free.append(Span(at, whole.stop))
  return [span for span in free if span.length > 0]


def quiet_stretch(
  free: Sequence[Span], length: float, before: float
) -> Span | None:
  """The stretch that an event's window is compared with.

  One fixed choice, so that nothing can be picked: the latest quiet stretch of
  that length that ends before the event, else the earliest after it.

  Args:
    free: quiet spans, in order.
    length: seconds it must have.
    before: when the event happened.
  """
  for span in reversed(free):
    stop = min(span.stop, before)
    if stop - span.start >= length:
      return Span(stop - length, stop)
  for span in free:
    start = max(span.start, before)
    if span.stop - start >= length:
      return Span(start, start + length)
  return None


def undisturbed(
  gap_s: float, median_step_s: float, quiet_gap_s: float | None
) -> bool | None:
  """Design §7: gap ≤ max(3 × median step, 1.25 × quiet gap), ≤ 1 s if fast.

  Reading taken where no quiet stretch of the window's length exists: the
  larger of the two bounds is at least 3 × the median step, so a gap within
  that is undisturbed whatever the quiet gap would have been, and a gap above
  the 1 s cap (steps below 100 ms) is disturbed likewise. In between nobody
  can tell, and the answer is None, which is not a pass.
  """
  if median_step_s < CAP_BELOW_S and gap_s > CAP_S:
    return False
  if gap_s <= 3 * median_step_s:
    return True
  return None if quiet_gap_s is None else gap_s <= 1.25 * quiet_gap_s


def judge(
  ends: npt.ArrayLike,
  window: Span,
  busy: Sequence[Span],
  run: Span,
) -> Verdict:
  """Judges one survivor of one event.

  Args:
    ends: (n,) the survivor's step ends.
    window: from the event until its consequences are over.
    busy: every stretch of the run in which something happened, this window
      included.
    run: the stretch of the run in which the survivor trained.
  """
  gap_s = longest_gap(ends, window)
  median_s = median_step(ends, busy)
  if gap_s is None or median_s is None:
    return Verdict(gap_s, median_s, None, None)
  quiet = quiet_stretch(complement(run, busy), window.length, window.start)
  quiet_gap_s = None if quiet is None else longest_gap(ends, quiet)
  verdict = undisturbed(gap_s, median_s, quiet_gap_s)
  return Verdict(gap_s, median_s, quiet_gap_s, verdict)
