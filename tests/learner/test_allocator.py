"""Freed buffers are used again, not handed back to the kernel."""

import subprocess
import sys

import pytest

# Touches 64 MiB, frees them, and counts the page faults of doing it again.
_AGAIN = """
import resource, sys
import numpy as np
from decoupled.learner import allocator
if sys.argv[1] == "keep":
  assert allocator.keep_freed_memory()
np.ones(64 << 20, np.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(64 << 20, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_again(mode: str) -> int:
  done = subprocess.run(
    [sys.executable, "-c", _AGAIN, mode],
    capture_output=True,
    text=True,
    timeout=60,
    check=True,
  )
  return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_a_kept_buffer_costs_no_page_faults_the_second_time() -> None:
  kept = faults_again("keep")
  handed_back = faults_again("leave")
  # with huge pages a fault covers 512 small ones
  assert kept < 16 <= handed_back
