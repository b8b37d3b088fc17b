"""Monotonic time as a value that tests can move by hand."""

import time
from typing import Protocol


class Clock(Protocol):
  """Seconds on a monotonic clock; only differences carry meaning."""

  def now(self) -> float: ...


class MonotonicClock:
  """The machine's own monotonic clock (shared by all its processes)."""

  def now(self) -> float:
    return time.monotonic()


class ManualClock:
  """A clock that moves only when told to."""

  def __init__(self, start_s: float = 0.0):
    self._now_s = start_s

  def now(self) -> float:
    return self._now_s

  def advance(self, seconds: float) -> None:
    if seconds < 0:
      raise ValueError(f"a clock cannot go back: advance({seconds})")
    self._now_s += seconds

  def set(self, now_s: float) -> None:
    if now_s < self._now_s:
      raise ValueError(
        f"a clock cannot go back: at {self._now_s}, asked for {now_s}"
      )
    self._now_s = now_s
