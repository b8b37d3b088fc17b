"""From the learners' fragments to one direction for the outer step.

Every learner m contributes its parameters theta_m of a fragment, which all
started from the same global Theta. Its pseudo-gradient is

  D_m = Theta - theta_m        (global minus local: *minus* what was learned)

so that the outer optimizer, which subtracts, moves towards the learners.

Weighted average:  D = sum_m a_m D_m,  with a_m = w_m / sum_m w_m.

Radial-directional averaging (RDA), with phi(x) = x / |x| and phi(0) = 0:

  D = (sum_m a_m |D_m|) x phi(sum_m a_m phi(D_m))

the mean length along the mean direction. Pseudo-gradients of different
learners are nearly orthogonal, so the average of M vectors of length R has
length about R / sqrt(M); RDA keeps R, and the outer step does not shrink as
learners are added. Embeddings are not near-orthogonal and are averaged.

Sums run over learners in the order given (learner-id order) in float64, the
result is float32: a replay of the same contributions gives the same bits.
Inputs are never written to.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from decoupled.algorithm.policy import GRANULARITIES, MERGES
from decoupled.types import Arrays, Role

# The summed direction of unit vectors has length 1 if they agree and about
# 1/sqrt(M) if they are orthogonal. Below this they cancel to within float32
# rounding: what is left is noise, and must not be stretched to full length.
_CANCELLED = 1e-6

# Elements converted to float64 at a time, so that large tensors need no
# float64 copies of their own.
_CHUNK = 1 << 18


def pseudo_gradient(base: Arrays, local: Arrays) -> Arrays:
  """base - local in float32: the only place that fixes the sign.

  Args:
    base: global arrays of the version that the learner had adopted.
    local: the learner's arrays, shapes as in `base`.

  Raises:
    ValueError: number or shapes of the arrays differ.
  """
  if len(base) != len(local):
    raise ValueError(f"{len(base)} base arrays, but {len(local)} local ones")
  return tuple(
    _difference(before, after)
    for before, after in zip(base, local, strict=True)
  )


def merge(
  deltas: Sequence[Arrays],
  weights: ArrayLike,
  roles: Sequence[Role],
  rule: str = "rda",
  granularity: str = "tensor",
) -> Arrays:
  """Merges pseudo-gradients of one fragment.

  Args:
    deltas: per learner, in learner-id order, its pseudo-gradient.
    weights: [M] finite, not negative; those with weight 0 take no part. A
      single contributor gives back exactly its delta.
    roles: per array its role. WEIGHT follows `rule`; EMBEDDING and STATISTIC
      take the weighted average.
    rule: `rda` or `average`.
    granularity: whether RDA takes norms per `tensor`, or per `fragment`, over
      all its WEIGHT arrays together.

  Returns:
    Per array the merged direction, float32. Zero where directions cancel.

  Raises:
    ValueError: no weight is above 0 (such a round closes unchanged), a weight
      is negative or not finite, shapes differ, or a word is unknown.
  """
  _check(deltas, roles, rule, granularity)
  parts, shares = _contributors(deltas, np.asarray(weights, np.float64))
  if len(parts) == 1:
    return tuple(np.array(delta, np.float32) for delta in parts[0])
  merged: list[np.ndarray | None] = [None] * len(roles)
  for group in _radial_groups(roles, rule, granularity):
    columns = [[part[i] for part in parts] for i in group]
    for i, array in zip(group, _radial(columns, shares), strict=True):
      merged[i] = array
  return tuple(
    _scaled_sum([part[i] for part in parts], shares) if array is None else array
    for i, array in enumerate(merged)
  )


def norm(arrays: Sequence[np.ndarray]) -> float:
  """Euclidean norm over all arrays together, in float64."""
  total = np.float64(0.0)
  for array in arrays:
    flat = _flat(array)
    for chunk in _chunks(flat.size):
      total += np.sum(np.square(flat[chunk], dtype=np.float64))
  return float(np.sqrt(total))


def _difference(before: np.ndarray, after: np.ndarray) -> np.ndarray:
  if before.shape != after.shape:
    raise ValueError(f"base has shape {before.shape}, local {after.shape}")
  return np.subtract(
    np.asarray(before, np.float32), np.asarray(after, np.float32)
  )


def _check(
  deltas: Sequence[Arrays], roles: Sequence[Role], rule: str, granularity: str
) -> None:
  if rule not in MERGES or granularity not in GRANULARITIES:
    raise ValueError(
      f"rule {rule!r} must be one of {MERGES}, granularity {granularity!r} one "
      f"of {GRANULARITIES}"
    )
  for role in roles:
    if role is Role.LOCAL:
      raise ValueError("a tensor of role local is never sent nor merged")
  for delta in deltas:
    if len(delta) != len(roles):
      raise ValueError(f"{len(delta)} arrays, but {len(roles)} roles")
    for array, first in zip(delta, deltas[0], strict=True):
      if array.shape != first.shape:
        raise ValueError(f"shapes {array.shape} and {first.shape} differ")


def _contributors(
  deltas: Sequence[Arrays], weights: NDArray[np.float64]
) -> tuple[list[Arrays], list[float]]:
  """Those with a weight above 0, and their shares, which sum to 1."""
  if weights.shape != (len(deltas),):
    raise ValueError(f"{len(deltas)} deltas, but weights of {weights.shape}")
  if not np.all(np.isfinite(weights)) or np.any(weights < 0):
    raise ValueError(f"weights {weights.tolist()} must be finite and >= 0")
  if not np.any(weights > 0):
    raise ValueError("all weights are zero: there is nothing to merge")
  # Relative to the largest first, so that huge weights cannot overflow.
  relative = weights / np.max(weights)
  total = 0.0
  for weight in relative.tolist():
    total += weight
  chosen = [m for m in range(len(deltas)) if weights[m] > 0]
  return [deltas[m] for m in chosen], [
    float(relative[m]) / total for m in chosen
  ]


def _radial_groups(
  roles: Sequence[Role], rule: str, granularity: str
) -> list[list[int]]:
  """Indices of the arrays that share one RDA norm, group by group."""
  if rule == "average":
    return []
  radial = [i for i, role in enumerate(roles) if role is Role.WEIGHT]
  if granularity == "fragment":
    return [radial] if radial else []
  return [[i] for i in radial]


def _radial(
  columns: Sequence[Sequence[np.ndarray]], shares: Sequence[float]
) -> list[np.ndarray]:
  """RDA of one group; columns[i][m] is array i of contributor m."""
  learners = range(len(shares))
  norms = [norm([column[m] for column in columns]) for m in learners]
  length = 0.0
  for share, size in zip(shares, norms, strict=True):
    length += share * size
  toward = [
    share / size if size > 0 else 0.0
    for share, size in zip(shares, norms, strict=True)
  ]
  agreement = _sum_norm(columns, toward)
  if agreement < _CANCELLED:
    return [np.zeros(column[0].shape, np.float32) for column in columns]
  return [_scaled_sum(column, toward, length / agreement) for column in columns]


def _sum_norm(
  columns: Sequence[Sequence[np.ndarray]], factors: Sequence[float]
) -> float:
  """Norm of the weighted sum over all columns together."""
  total = np.float64(0.0)
  for column in columns:
    flats = [_flat(array) for array in column]
    for chunk in _chunks(flats[0].size):
      total += np.sum(np.square(_sum_chunk(flats, factors, chunk)))
  return float(np.sqrt(total))


def _scaled_sum(
  column: Sequence[np.ndarray], factors: Sequence[float], scale: float = 1.0
) -> np.ndarray:
  """scale x sum_m factors[m] column[m]: float64 inside, float32 out."""
  flats = [_flat(array) for array in column]
  out = np.empty(flats[0].size, np.float32)
  for chunk in _chunks(out.size):
    out[chunk] = scale * _sum_chunk(flats, factors, chunk)
  return out.reshape(column[0].shape)


def _sum_chunk(
  flats: Sequence[np.ndarray], factors: Sequence[float], chunk: slice
) -> NDArray[np.float64]:
  # In learner-id order: floating-point addition depends on it.
  total = np.zeros(flats[0][chunk].size, np.float64)
  for flat, factor in zip(flats, factors, strict=True):
    total += np.multiply(flat[chunk], factor, dtype=np.float64)
  return total


def _flat(array: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(array).reshape(-1)


def _chunks(size: int) -> Iterator[slice]:
  for start in range(0, size, _CHUNK):
    yield slice(start, min(start + _CHUNK, size))
