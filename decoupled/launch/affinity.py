"""One core for a process that boots beside training ones, then all of them."""

import contextlib
import os
from pathlib import Path

# Names the core in the environment of a restarted process.
VARIABLE = "DECOUPLED_BOOT_CORE"

_confined_from: set[int] | None = None


def confine() -> None:
  """Moves this process to the boot core, if the local runner named one.

  To be called before any other thread exists: threads inherit the mask.
  """
  global _confined_from
  core = os.environ.get(VARIABLE, "")
  if not core or not hasattr(os, "sched_setaffinity"):
    return
  full = os.sched_getaffinity(0)
  # A core that this process may not use: boot unconfined rather than not.
  with contextlib.suppress(ValueError, OSError):
    os.sched_setaffinity(0, {int(core)})
    _confined_from = full


def release() -> None:
  """Gives every thread of this process its full set of cores back.

  A mask belongs to a thread, so that XLA's pools, started while confined, must
  be visited one by one. Does nothing in a process that was not confined.
  """
  global _confined_from
  if _confined_from is None:
    return
  for task in Path("/proc/self/task").iterdir():
    # A thread may end between the listing and the call.
    with contextlib.suppress(OSError):
      os.sched_setaffinity(int(task.name), _confined_from)
  _confined_from = None


def boot_core() -> int | None:
  """The core for the next booting process, None where there is only one."""
  if not hasattr(os, "sched_getaffinity"):
    return None
  cores = os.sched_getaffinity(0)
  return max(cores) if len(cores) > 1 else None
