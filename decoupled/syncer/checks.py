"""Why a contribution is refused: one word, the key it is counted under."""

from collections.abc import Sequence

import numpy as np

from decoupled.algorithm import weights
from decoupled.types import Contribution, Manifest, Version

# Reasons that speak of a broken copy, not of one that came at a wrong time.
FAULTS = ("counters", "shape", "dtype", "nonfinite", "overflow", "checksum")


def counters_and_data(
  contribution: Contribution, manifest: Manifest, base: Version
) -> str:
  """The first thing wrong with a contribution, or "".

  Args:
    contribution: as decoded.
    manifest: of the run.
    base: the version it must be based on.

  Returns:
    "" or one of: base, counters, fragment, shape, dtype, nonfinite.
  """
  header = contribution.header
  if not 0 <= header.copy.fragment < len(manifest.fragments):
    return "fragment"
  if header.base != base:
    return "base"
  if weights.check_counters(header.tokens, header.steps):
    return "counters"
  units = manifest.fragments[header.copy.fragment]
  shapes = [manifest.shape(unit) for unit in units]
  if [a.shape for a in contribution.arrays] != shapes:
    return "shape"
  if any(a.dtype != np.float32 for a in contribution.arrays):
    return "dtype"
  if not all_finite(contribution.arrays):
    return "nonfinite"
  return ""


def all_finite(arrays: Sequence[np.ndarray]) -> bool:
  """Whether no array holds NaN or infinity."""
  return all(bool(np.isfinite(a).all()) for a in arrays)
