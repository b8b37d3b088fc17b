"""What a process that the local runner started does first."""

import ctypes
import os
import signal
import sys
import threading
import time

from decoupled.launch import affinity

# Names the local runner's process id in the environment of its children.
VARIABLE = "DECOUPLED_RUNNER_PID"
_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def enter() -> None:
  """Ties this process's life to the runner's and confines its boot.

  Does nothing in a process that no local runner started.
  """
  runner = os.environ.get(VARIABLE, "")
  if runner:
    _die_with(int(runner))
  affinity.confine()


def _die_with(runner: int) -> None:
  """Arranges SIGKILL for this process at the death of its parent."""
  if sys.platform == "linux":
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  else:
    threading.Thread(
      target=_watch, args=(runner,), name="runner-watch", daemon=True
    ).start()
  # The runner may have died before the call above.
  if os.getppid() != runner:
    os._exit(1)


def _watch(runner: int) -> None:
  while os.getppid() == runner:
    time.sleep(_POLL_S)
  os._exit(1)
