"""Background threads give way to the inner step where cores are scarce."""

import contextlib
import os
import threading

_NICE = 5  # about a third of a normal thread's weight; it never preempts one


def give_way() -> None:
  """Lowers the calling thread's priority; call it first in a thread.

  On Linux a priority belongs to a thread. Elsewhere nothing happens.
  """
  if not hasattr(os, "setpriority") or not os.path.isdir("/proc/self/task"):
    return
  with contextlib.suppress(OSError):
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
