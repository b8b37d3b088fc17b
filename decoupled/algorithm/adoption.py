"""Applying a merged fragment to the local model.

  overwrite   local <- merged                                    (the paper)
  carry       local <- merged + (local - reference)
  blend       local <- alpha local + (1 - alpha) merged

`reference` is what the merge already accounts for: the learner's own copy that
it included, or, where it included none, the version that the learner had
adopted. `carry` thus keeps the steps made while the fragment was under way.

The functions work leaf by leaf on NumPy and on JAX arrays (also under jit) and
return the dtype of `local`. Nothing is written in place: `reference` may still
be needed.
"""

from typing import Any, TypeAlias

from decoupled.types import Version

Array: TypeAlias = Any  # NumPy or JAX: this file imports neither


def overwrite(local: Array, merged: Array, reference: Array) -> Array:
  """The merged value; progress since the extraction is given up."""
  del reference
  return merged.astype(local.dtype)


def carry(local: Array, merged: Array, reference: Array) -> Array:
  """The merged value plus the local progress since `reference`."""
  return (merged + (local - reference)).astype(local.dtype)


def blend(local: Array, merged: Array, reference: Array, alpha: float) -> Array:
  """alpha of the local value, 1 - alpha of the merged one."""
  del reference
  return (alpha * local + (1.0 - alpha) * merged).astype(local.dtype)


def adopt(
  rule: str, local: Array, merged: Array, reference: Array, alpha: float
) -> Array:
  """Applies one of the three rules by its name; `alpha` is for `blend`."""
  if rule == "overwrite":
    return overwrite(local, merged, reference)
  if rule == "carry":
    return carry(local, merged, reference)
  if rule == "blend":
    return blend(local, merged, reference, alpha)
  raise ValueError(f"unknown adoption rule {rule!r}")


def adoption_rule(
  policy_rule: str,
  held: Version,
  merged_base: Version | None,
  restored: bool,
) -> str:
  """The rule to use for one fragment at one adoption.

  Args:
    policy_rule: what the contract says.
    held: the version of the fragment that the learner has adopted.
    merged_base: the version that the merged one was computed from; None where
      that is not known.
    restored: whether the parameters on either side come from a snapshot.

  Returns:
    `overwrite` after a restore, or when the learner's version is not the
    direct predecessor (progress on a lost timeline must not be carried on);
    else the contract's rule.
  """
  return policy_rule if not restored and held == merged_base else "overwrite"


def counters_after(
  rule: str,
  steps: int,
  tokens: int,
  included: tuple[int, int] | None = None,
) -> tuple[int, int]:
  """Counters of a fragment (steps, tokens) right after its adoption.

  Args:
    rule: the rule that was used, see `adoption_rule`.
    steps: steps since the last adoption, just before this one.
    tokens: tokens likewise.
    included: (steps, tokens) at the extraction of the copy that the merge
      included; None where it included none and the learner's own base was the
      reference.

  Returns:
    What is on the local fragment but in no merge yet: nothing after overwrite
    or blend; after carry what came after the included copy, or everything.
  """
  if rule != "carry":
    return 0, 0
  if included is None:
    return steps, tokens
  return steps - included[0], tokens - included[1]
