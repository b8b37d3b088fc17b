"""Keeps the host one dispatch ahead of the device, and no further.

The device must never wait for Python, and a boundary decided long before the
step it follows would act on old news. So the loop sleeps until the step it
dispatched is about to finish, by as much as the host needs for a boundary, and
is woken at once if the step finishes sooner. A thread of its own waits for
the device and reads the metrics; the loop gets them one step late.
"""

import contextlib
import math
import queue
import threading
from collections.abc import Mapping
from typing import NamedTuple

import jax

from decoupled.clock import Clock

_EMA = 0.2
_LEAST_LEAD_S = 0.001
_MOST_LEAD = 0.2  # of a step
_DEVIATIONS = 2.0  # mean deviations of the step time added to the lead


class Finished(NamedTuple):
  """A step that is over on the device."""

  step: int
  at_s: float
  loss: float
  learning_rate: float


class Pace:
  """Watches steps finish; see the module docstring.

  Attributes:
    last: the newest finished step.
  """

  def __init__(self, clock: Clock):
    self.last = Finished(0, math.nan, math.nan, math.nan)
    self._clock = clock
    self._step_s = math.nan
    self._spread_s = 0.0
    self._host_s = 0.0
    self._woke_at = math.nan
    self._started_at = math.nan
    self._previous_end = -math.inf
    self._over = threading.Condition()
    self._failure: BaseException | None = None
    self._dispatched: queue.Queue[
      tuple[int, Mapping[str, jax.Array], float] | None
    ] = queue.Queue(2)
    self._thread = threading.Thread(
      target=self._watch, name="pace", daemon=True
    )
    self._thread.start()

  def dispatched(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
    """The loop has just dispatched `step`, which will yield `metrics`."""
    now = self._clock.now()
    if not math.isnan(self._woke_at):
      self._host_s = _fold(self._host_s, now - self._woke_at)
    self._started_at = now
    self._dispatched.put((step, metrics, now))

  def wait(self, step: int) -> None:
    """Returns when `step` has finished, or is about to.

    Raises:
      Exception: what the device said about the step.
    """
    if math.isnan(self._step_s):
      self._until(step)
    else:
      wanted = self._host_s + _DEVIATIONS * self._spread_s
      lead = min(max(_LEAST_LEAD_S, wanted), _MOST_LEAD * self._step_s)
      begin = max(self._started_at, self._previous_end)
      left = begin + self._step_s - lead - self._clock.now()
      with self._over:
        self._over.wait_for(lambda: self._reached(step), max(0.0, left))
      # never more than one step ahead: the one before must be over
      self._until(step - 1)
    self._woke_at = self._clock.now()

  def finish(self, step: int) -> Finished:
    """Waits until `step` is over on the device."""
    self._until(step)
    return self.last

  def close(self) -> None:
    with contextlib.suppress(queue.Full):  # of a step that failed
      self._dispatched.put_nowait(None)
    self._thread.join(timeout=5.0)

  def _reached(self, step: int) -> bool:
    return self.last.step >= step or self._failure is not None

  def _until(self, step: int) -> None:
    with self._over:
      self._over.wait_for(lambda: self._reached(step))
    if self._failure is not None:
      raise self._failure

  def _watch(self) -> None:
    while (item := self._dispatched.get()) is not None:
      step, metrics, started_at = item
      try:
        loss = float(jax.device_get(metrics["loss"]))
        rate = float(jax.device_get(metrics["learning_rate"]))
      except Exception as error:
        with self._over:
          self._failure = error
          self._over.notify_all()
        return
      now = self._clock.now()
      begin = max(started_at, self._previous_end)
      took = now - begin
      if not math.isnan(self._step_s):
        self._spread_s = _fold(self._spread_s, abs(took - self._step_s))
      self._step_s = _fold(self._step_s, took)
      self._previous_end = now
      with self._over:
        self.last = Finished(step, now, loss, rate)
        self._over.notify_all()


def _fold(mean: float, sample: float) -> float:
  return sample if math.isnan(mean) else mean + _EMA * (sample - mean)
