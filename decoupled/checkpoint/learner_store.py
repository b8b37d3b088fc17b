"""A learner's snapshots: parameters, inner optimizer state, where it was.

Each learner id has a group of its own, so that two learners never write one
path. Arrays are restored onto whatever mesh the caller asks for.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from decoupled import faults
from decoupled.checkpoint import commit
from decoupled.checkpoint.commit import StorePath

META = "meta.json"


@dataclasses.dataclass(frozen=True)
class LearnerSnapshot:
  """A learner's state as it was saved.

  Attributes:
    tree: the pytree, laid out as asked for.
    meta: the plain values saved beside it.
    step: the number it was saved under.
    path: where it lies.
    skipped: one sentence for each newer snapshot that was not good.
  """

  tree: Any
  meta: dict[str, Any]
  step: int
  path: str
  skipped: tuple[str, ...]


def warm_up(small: Any) -> None:
  """See `arrays.warm_up`."""
  from decoupled.checkpoint import arrays

  arrays.warm_up(small)


def save_learner(
  store: StorePath,
  learner_id: int,
  step: int,
  tree: Any,
  meta: Mapping[str, Any],
  keep: int = 2,
) -> str:
  """Saves and commits the state of one learner.

  `tree` is read until this returns: its buffers must not be donated before.

  Args:
    store: folder or URL of the run's checkpoints.
    learner_id: whose.
    step: must rise over the whole run and over incarnations (the learning
      rate's step does).
    tree: pytree of arrays (parameters, inner optimizer state, ...).
    meta: JSON values (schedule_step, step, tokens, position, versions, ...).
    keep: how many of the newest stay.

  Returns:
    The path it was saved under.

  Raises:
    DecoupledError: it could not be saved; older ones are kept.
  """

  def write(folder: epath.Path) -> None:
    from decoupled.checkpoint import arrays

    (folder / META).write_text(json.dumps(dict(meta), indent=1))
    faults.reached("checkpoint.half_written")
    arrays.save(folder, tree)

  return commit.save(_group(store, learner_id), step, write, keep)


def restore_learner(
  store: StorePath, learner_id: int, abstract: Any
) -> LearnerSnapshot | None:
  """The newest good snapshot of a learner.

  Args:
    store: folder or URL of the run's checkpoints.
    learner_id: whose.
    abstract: pytree of `jax.ShapeDtypeStruct`, each with the sharding that it
      shall have; any mesh will do.

  Returns:
    None where nothing was ever saved for this id.

  Raises:
    DecoupledError: there are snapshots, but none is good.
  """

  def read(folder: epath.Path) -> tuple[Any, dict[str, Any]]:
    from decoupled.checkpoint import arrays

    meta = json.loads((folder / META).read_text())
    return arrays.restore(folder, abstract), meta

  found = commit.restore(_group(store, learner_id), read)
  if found is None:
    return None
  tree, meta = found.value
  return LearnerSnapshot(tree, meta, found.number, found.path, found.skipped)


def newest_meta(store: StorePath, learner_id: int) -> dict[str, Any] | None:
  """The plain values of a learner's newest snapshot; its arrays are not read.

  Returns:
    None where no committed snapshot of this id can be read.
  """
  for folder in commit.folders(_group(store, learner_id)):
    try:
      if (folder / commit.MARKER).exists():
        meta: dict[str, Any] = json.loads((folder / META).read_text())
        return meta
    except (OSError, ValueError):
      continue
  return None


def _group(store: StorePath, learner_id: int) -> epath.Path:
  return epath.Path(store).absolute() / f"learner_{learner_id}"
