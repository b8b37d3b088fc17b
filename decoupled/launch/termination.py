"""SIGTERM ends a process in order, wherever it is, within a grace time.

Python runs signal handlers in the main thread, which may be compiling or
waiting inside a library for minutes. So the signal itself wakes a thread of
its own. While there is nothing to lose that thread ends the process at once;
afterwards it gives the main thread the grace time to save and to say goodbye,
and what is left of it, a few seconds, to a goodbye of its own.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeAlias

from decoupled.types import EventSink

Goodbye: TypeAlias = Callable[[str], None]

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Exit status of a process that could not do what it had to within its grace
# time; one that could exits with 128 + the signal's number.
LATE = 124
_RESERVE_S = 3.0  # of the grace time, for a goodbye without the main thread

_LOG = logging.getLogger("decoupled")


def told(status: int) -> bool:
  """Whether an exit status says that the process was told to end."""
  return status == LATE or status in {128 + number for number in SIGNALS}


def signal_of(status: int) -> signal.Signals:
  """The signal by which a process with such a status was told to end."""
  return signal.Signals(status - 128) if status > 128 else signal.SIGTERM


class Termination:
  """Watches for SIGTERM and SIGINT; make it in the main thread, early.

  Args:
    role: of this process, for messages and events.
    grace_s: from the signal to the end of the process, at most.
    signals: which.
    exit_now: ends the process; for tests.

  Attributes:
    requested: set by the first signal.
    number: of the first signal.
    role: as given; say more once more is known.
    events: told how the process ended, where given.
    goodbye: called, with a reason, before the process is ended from outside
      the main thread; may take a second or two.
    on_request: called once, on the watching thread, when there is something
      to lose: it begins an orderly end.
  """

  def __init__(
    self,
    role: str,
    grace_s: float,
    signals: Sequence[signal.Signals] = SIGNALS,
    exit_now: Callable[[int], None] = os._exit,
  ):
    self.role = role
    self.grace_s = grace_s
    self.requested = threading.Event()
    self.number: signal.Signals | None = None
    self.events: EventSink | None = None
    self.goodbye: Goodbye = lambda why: None
    self.on_request: Callable[[], None] = lambda: None
    self._signals = tuple(signals)
    self._exit_now = exit_now
    self._asked_at = 0.0
    self._lock = threading.Lock()
    self._something_to_lose = False
    self._over = threading.Event()
    self._reader, self._writer = socket.socketpair()
    self._writer.setblocking(False)
    self._before: dict[int, Any] = {
      number: signal.signal(number, _noted) for number in self._signals
    }
    self._wakeup = signal.set_wakeup_fd(
      self._writer.fileno(), warn_on_full_buffer=False
    )
    self._thread = threading.Thread(
      target=self._watch, name="termination", daemon=True
    )
    self._thread.start()

  @property
  def status(self) -> int:
    """Exit status of a process that has ended in order when it was told."""
    return 128 + (self.number or signal.SIGTERM)

  @property
  def why(self) -> str:
    return f"stopped by {(self.number or signal.SIGTERM).name}"

  @property
  def left_s(self) -> float:
    """What the main thread may still use of the grace time."""
    if not self.requested.is_set():
      return self.grace_s - self._reserve_s
    until = self._asked_at + self.grace_s - self._reserve_s
    return max(0.0, until - time.monotonic())

  def half_over(self) -> bool:
    """Whether it was told to end, half of the grace time ago."""
    return self.requested.is_set() and self.left_s < self.grace_s / 2

  def something_to_lose(self) -> None:
    """From here on the main thread ends the process in order by itself."""
    with self._lock:
      if not self.requested.is_set():
        self._something_to_lose = True
        return
    self._over.wait(self.grace_s)  # the watcher is ending it: nothing begins

  def ended(self, outcome: str) -> None:
    """The main thread has done what there was to do; it says how."""
    if self.requested.is_set():
      self._say(outcome)
    self._over.set()

  def close(self) -> None:
    """Puts the signals back; in the main thread."""
    self._over.set()
    signal.set_wakeup_fd(self._wakeup)
    for number, handler in self._before.items():
      signal.signal(number, handler)
    with contextlib.suppress(OSError):
      self._writer.send(b"\0")
    self._thread.join(1.0)
    self._reader.close()
    self._writer.close()

  # ---- the watching thread ---------------------------------------------------

  @property
  def _reserve_s(self) -> float:
    return min(_RESERVE_S, self.grace_s / 4)

  def _watch(self) -> None:
    if not self._wait_for_signal(None):
      return
    self._asked_at = time.monotonic()
    with self._lock:
      self.requested.set()
      at_once = not self._something_to_lose
    if at_once:
      self._end(self.status, "nothing_to_save")
      return
    _LOG.warning("%s: %s ends within %g s", self.why, self.role, self.grace_s)
    self.on_request()
    if self._wait_for_signal(self.left_s):
      self._end(LATE, "asked_twice")
    elif not self._over.is_set():
      self._end(LATE, "grace_over")

  def _wait_for_signal(self, limit_s: float | None) -> bool:
    """True once a signal has come; False at the limit, or when it is over."""
    until = None if limit_s is None else time.monotonic() + limit_s
    while not self._over.is_set():
      left_s = None if until is None else until - time.monotonic()
      if left_s is not None and left_s <= 0:
        return False
      ready, _, _ = select.select([self._reader], [], [], left_s)
      numbers = self._reader.recv(64) if ready else b""
      for number in numbers:
        if number in self._signals and self.number is None:
          self.number = signal.Signals(number)
          return True
        if number == signal.SIGINT:  # the second one means: at once
          return True
    return False

  def _end(self, status: int, outcome: str) -> None:
    """Says goodbye, as far as that is quick, and ends the process."""
    self._say(outcome)
    speaker = threading.Thread(
      target=self.goodbye, args=(f"{self.why}: {outcome}",), daemon=True
    )
    speaker.start()
    speaker.join(self._reserve_s)
    if self._over.is_set():
      return  # the main thread was done after all
    self._over.set()
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(OSError, ValueError):
        stream.flush()
    self._exit_now(status)

  def _say(self, outcome: str) -> None:
    took_s = time.monotonic() - self._asked_at
    line = f"{self.why}: {self.role} ends, {outcome.replace('_', ' ')}"
    _LOG.warning("%s (%.1f s after the signal)", line, took_s)
    if self.events is not None:
      self.events.emit(
        "stopped",
        role=self.role,
        signal=(self.number or signal.SIGTERM).name,
        outcome=outcome,
        took_s=round(took_s, 3),
      )


def _noted(number: int, frame: FrameType | None) -> None:
  """What matters is that Python has a handler: the wake-up needs one."""
