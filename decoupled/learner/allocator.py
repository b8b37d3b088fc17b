"""Keeps freed memory in the process where steps run on the CPU.

XLA's CPU backend frees a step's temporary buffers when the step is over and
asks for the same ones again in the next. Above 32 MB glibc hands such buffers
back to the kernel each time, and touching them anew costs a page fault for
every 4 KiB: up to half of a step. Kept, they are simply used again, and the
process stays at its peak size, which it reaches in every step anyway.
"""

import ctypes
import sys

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MOST = 2**31 - 1  # both are C ints: 2 GiB


def keep_freed_memory() -> bool:
  """Tells malloc to reuse what is freed; call it before the first step.

  Returns:
    Whether this C library knows how to (glibc does).
  """
  if not sys.platform.startswith("linux"):
    return False
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is None:
    return False
  return all(
    mallopt(option, _MOST) == 1
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)
  )
