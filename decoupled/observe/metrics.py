"""TensorBoard scalars, written behind a bounded queue.

The caller never waits for the disk: what does not fit into the queue is
dropped and counted. Writing goes through tensorboardX, which needs no
TensorFlow; it is imported by the writing thread only.
"""

import logging
import math
import os
import queue
import threading
import time
from typing import Any

from decoupled.types import EventSink

_LOG = logging.getLogger(__name__)
_FLUSH_S = 2.0

# Peak dense bfloat16 FLOP/s of one device, by a part of its `device_kind` in
# lower case; the first that matches counts. Vendors' data sheets.
PEAK_FLOPS: tuple[tuple[str, float], ...] = (
  ("tpu v6", 918e12),
  ("tpu v5p", 459e12),
  ("tpu v5 lite", 197e12),
  ("tpu v5e", 197e12),
  ("tpu v5", 459e12),
  ("tpu v4 lite", 138e12),
  ("tpu v4", 275e12),
  ("tpu v3", 61.5e12),  # a device is one of the chip's two cores
  ("tpu v2", 22.5e12),
  ("h200", 989e12),
  ("h100 pcie", 756e12),
  ("h100", 989e12),
  ("a100", 312e12),
  ("l4", 121e12),
  ("v100", 125e12),
)


def peak_flops(device_kind: str) -> float | None:
  """Peak bfloat16 FLOP/s of one device; None where it is not known."""
  kind = device_kind.lower()
  return next((peak for name, peak in PEAK_FLOPS if name in kind), None)


def flop_utilisation(
  flops_per_step: float, step_s: float, device_kind: str, devices: int
) -> float | None:
  """Model FLOP utilisation: the model's FLOP/s ÷ the devices' peak.

  Args:
    flops_per_step: FLOP that the model needs for one inner step, without
      what rematerialisation repeats.
    step_s: seconds of a step.
    device_kind: as `jax.Device.device_kind` says.
    devices: of the learner.

  Returns:
    A share of 1; None where the peak is unknown, as for CPUs.
  """
  peak = peak_flops(device_kind)
  if peak is None or step_s <= 0 or devices < 1:
    return None
  return flops_per_step / step_s / (peak * devices)


class Metrics:
  """Scalars of one process, in `<workdir>/metrics/<role>`.

  Attributes:
    dropped: scalars that were not written: the queue was full, or the disk
      failed.
  """

  def __init__(self, folder: str | os.PathLike[str], capacity: int = 4096):
    self.dropped = 0
    self._folder = os.fspath(folder)
    self._queue: queue.Queue[tuple[str, float, int] | None] = queue.Queue(
      capacity
    )
    self._thread = threading.Thread(
      target=self._run, name="metrics", daemon=True
    )
    self._thread.start()

  def scalar(self, tag: str, value: float | None, step: int) -> None:
    """Hands a scalar over; None and what is not finite are left out."""
    if value is None or not math.isfinite(value):
      return
    try:
      self._queue.put_nowait((tag, float(value), step))
    except queue.Full:
      self.dropped += 1

  def step(
    self,
    step: int,
    *,
    loss: float,
    tokens_per_second: float,
    learning_rate: float,
    model_flop_utilisation: float | None = None,
  ) -> None:
    """What a learner says about an inner step; `step` is the schedule's."""
    self.scalar("loss", loss, step)
    self.scalar("tokens_per_second", tokens_per_second, step)
    self.scalar("learning_rate", learning_rate, step)
    self.scalar("model_flop_utilisation", model_flop_utilisation, step)

  def close(self, limit_s: float = 5.0) -> None:
    """Writes what is queued, for at most `limit_s` seconds."""
    try:
      self._queue.put(None, timeout=limit_s)
    except queue.Full:
      _LOG.warning("metrics under %s were not all written", self._folder)
      return
    self._thread.join(limit_s)

  def _run(self) -> None:
    writer: Any = None
    flushed = time.monotonic()
    while (item := self._queue.get()) is not None:
      tag, value, step = item
      try:
        if writer is None:
          writer = _writer(self._folder)
        writer.add_scalar(tag, value, step)
        if time.monotonic() - flushed > _FLUSH_S:
          writer.flush()
          flushed = time.monotonic()
      except Exception as error:  # whatever a disk or the library does
        if not self.dropped:
          _LOG.warning("cannot write metrics to %s: %s", self._folder, error)
        self.dropped += 1
    if writer is not None:
      writer.close()


class RoundMetrics(EventSink):
  """Turns the syncer's events into scalars; to be put into a `Tee`."""

  def __init__(self, metrics: Metrics):
    self._metrics = metrics

  def emit(self, kind: str, **fields: Any) -> None:
    if kind == "round" and fields.get("counted"):
      step, alive = int(fields["round"]), fields["alive"]
      put = self._metrics.scalar
      if alive:
        merged = len(set(fields["participants"]) & set(alive))
        put("participation", merged / len(alive), step)
      put("learners", len(alive), step)
      put("round_s", fields["closed"] - fields["opened"], step)
      put("merge_s", fields["merged"] - fields["closed"], step)
      put("grace_s", fields["grace_s"], step)


def _writer(folder: str) -> Any:
  from tensorboardX import SummaryWriter

  return SummaryWriter(folder, flush_secs=10)
