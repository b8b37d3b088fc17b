"""The syncer's snapshots: global fragments, outer state, who was where.

Arrays go through Orbax, everything else into `state.json` beside them. The
snapshot of round 0 is version 0; it is kept for good, since the held-out loss
at the start is measured on it.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath

from decoupled import faults
from decoupled.checkpoint import commit
from decoupled.checkpoint.commit import Restored, StorePath
from decoupled.types import (
  Arrays,
  Manifest,
  Role,
  TensorSpec,
  Unit,
  Version,
)

GROUP = "global"
STATE = "state.json"
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class LearnerPlace:
  """Where a learner was when the snapshot was cut.

  Attributes:
    incarnation: its fencing number; later ones must be higher.
    tokens: tokens over all its incarnations.
    position: data position (unit, offset).
  """

  incarnation: int
  tokens: int
  position: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Listed:
  """A committed snapshot that was not read.

  Attributes:
    path: its folder.
    run_id: the run.
    term: the term that cut it.
    rounds: counted rounds in it.
    versions: per fragment.
  """

  path: epath.Path
  run_id: str
  term: int
  rounds: int
  versions: tuple[Version, ...]


@dataclasses.dataclass(frozen=True)
class GlobalSnapshot:
  """Everything a syncer needs to go on.

  Attributes:
    run_id: the run.
    term: the term that cut it.
    rounds: counted rounds so far.
    common_step: the run's schedule step.
    fullest: most learners that were ever merged at once.
    versions: per fragment.
    manifest: tensors and fragments.
    contract: the run's contract, `key -> value` lines.
    fragments: per fragment its float32 arrays, in the order of its units.
    outer: per fragment the arrays of its outer state.
    learners: per learner id its place.
    units: state of the ledger, in JSON's terms; None in older snapshots.
  """

  run_id: str
  term: int
  rounds: int
  common_step: int
  fullest: int
  versions: tuple[Version, ...]
  manifest: Manifest
  contract: tuple[tuple[str, str], ...]
  fragments: tuple[Arrays, ...]
  outer: tuple[Arrays, ...]
  learners: dict[int, LearnerPlace] = dataclasses.field(default_factory=dict)
  units: Mapping[str, Any] | None = None

  @property
  def is_version0(self) -> bool:
    return self.rounds == 0

  def tensors(self) -> dict[str, np.ndarray]:
    """The parameters as whole tensors, by name; stacked layers joined."""
    by_unit = {
      unit: array
      for units, arrays in zip(
        self.manifest.fragments, self.fragments, strict=True
      )
      for unit, array in zip(units, arrays, strict=True)
    }
    whole = {}
    for spec in self.manifest.tensors:
      if spec.stacked:
        layers = [
          by_unit[Unit(spec.name, layer)] for layer in range(spec.shape[0])
        ]
        array = np.stack(layers) if layers else np.zeros(spec.shape)
      else:
        array = by_unit[Unit(spec.name)]
      whole[spec.name] = array.astype(_dtype(spec.dtype), copy=False)
    return whole


def warm_up() -> None:
  """See `arrays.warm_up`."""
  from decoupled.checkpoint import arrays

  arrays.warm_up(np.zeros(1, np.float32))


def save_global(
  store: StorePath,
  round: int,
  state: GlobalSnapshot,
  keep: int = 3,
  may_commit: Callable[[], None] = lambda: None,
) -> str:
  """Saves and commits one snapshot.

  Args:
    store: folder or URL of the run's checkpoints.
    round: newest round in it; 0 for version 0. Later ones win.
    state: what to save.
    keep: how many of the newest stay, version 0 apart.
    may_commit: called last before the commit; raises where this syncer has
      been replaced meanwhile.

  Returns:
    The path it was saved under.

  Raises:
    DecoupledError: it could not be saved; older ones are kept.
  """

  def write(folder: epath.Path) -> None:
    from decoupled.checkpoint import arrays

    (folder / STATE).write_text(json.dumps(_to_json(state), indent=1))
    faults.reached("checkpoint.half_written")
    arrays.save(folder, _flat(state))

  return commit.save(
    _group(store),
    round,
    write,
    keep,
    keep_always=(0,),
    may_commit=may_commit,
    rank=term_of,
  )


def restore_newest(store: StorePath) -> Restored | None:
  """The newest good snapshot; its `value` is a `GlobalSnapshot`.

  Returns:
    None where nothing was ever saved.

  Raises:
    DecoupledError: there are snapshots, but none is good.
  """
  return commit.restore(_group(store), _read, rank=term_of)


def restore_version0(store: StorePath) -> Restored | None:
  """As `restore_newest`, for the parameters the run began with."""
  return commit.restore(_group(store), _read, number=0, rank=term_of)


def listed(store: StorePath) -> list[Listed]:
  """Every committed snapshot, the newest first; their arrays are not read."""
  found = []
  for folder in commit.folders(_group(store), term_of):
    try:
      if not (folder / commit.MARKER).exists():
        continue
      said = json.loads((folder / STATE).read_text())
      versions = tuple(Version(*version) for version in said["versions"])
      run_id, term, rounds = said["run_id"], said["term"], said["rounds"]
    except (OSError, ValueError, KeyError, TypeError):
      continue  # being dropped, or damaged: whoever restores it says so
    found.append(Listed(folder, run_id, term, rounds, versions))
  return found


def read(folder: StorePath) -> GlobalSnapshot:
  """Reads one snapshot, if it is what was written.

  Raises:
    Damaged: it is not, or it is there no more.
  """
  path = epath.Path(folder)
  try:
    commit.verify(path)
    return _read(path)
  except commit.Damaged:
    raise
  except Exception as error:  # Orbax raises many kinds
    raise commit.Damaged(f"{folder} cannot be read: {error}") from None


def term_of(folder: epath.Path) -> int:
  """The term that cut it: what a fenced syncer still wrote is never newest.

  One that does not say is looked at first, so that it is named.
  """
  try:
    return int(json.loads((folder / STATE).read_text())["term"])
  except (OSError, ValueError, KeyError, TypeError):
    return sys.maxsize


def _group(store: StorePath) -> epath.Path:
  return epath.Path(store).absolute() / GROUP


def _flat(state: GlobalSnapshot) -> dict[str, np.ndarray]:
  groups = {"fragment": state.fragments, "outer": state.outer}
  return {
    f"{name}.{p}.{i}": np.asarray(array)
    for name, of_fragment in groups.items()
    for p, arrays in enumerate(of_fragment)
    for i, array in enumerate(arrays)
  }


def _read(folder: epath.Path) -> GlobalSnapshot:
  from decoupled.checkpoint import arrays

  said = json.loads((folder / STATE).read_text())
  if said["format"] != FORMAT:
    raise commit.Damaged(
      f"{folder} has format {said['format']}, this program reads {FORMAT}"
    )
  flat = arrays.restore_flat(folder)

  def group(name: str) -> tuple[Arrays, ...]:
    return tuple(
      tuple(flat[f"{name}.{p}.{i}"] for i in range(count))
      for p, count in enumerate(said["arrays"][name])
    )

  return GlobalSnapshot(
    run_id=said["run_id"],
    term=said["term"],
    rounds=said["rounds"],
    common_step=said["common_step"],
    fullest=said["fullest"],
    versions=tuple(Version(*version) for version in said["versions"]),
    manifest=_manifest(said["manifest"]),
    contract=tuple((key, value) for key, value in said["contract"]),
    fragments=group("fragment"),
    outer=group("outer"),
    learners={
      int(key): LearnerPlace(
        place["incarnation"], place["tokens"], tuple(place["position"])
      )
      for key, place in said["learners"].items()
    },
    units=said.get("units"),
  )


def _to_json(state: GlobalSnapshot) -> dict[str, Any]:
  return {
    "format": FORMAT,
    "run_id": state.run_id,
    "term": state.term,
    "rounds": state.rounds,
    "common_step": state.common_step,
    "fullest": state.fullest,
    "versions": [list(version) for version in state.versions],
    "manifest": {
      "tensors": [dataclasses.asdict(spec) for spec in state.manifest.tensors],
      "fragments": [
        [list(unit) for unit in units] for units in state.manifest.fragments
      ],
      "owners": list(state.manifest.owners),
    },
    "contract": [list(line) for line in state.contract],
    "learners": {
      str(key): dataclasses.asdict(place)
      for key, place in state.learners.items()
    },
    "units": state.units,
    "arrays": {
      "fragment": [len(arrays) for arrays in state.fragments],
      "outer": [len(arrays) for arrays in state.outer],
    },
  }


def _manifest(said: dict[str, Any]) -> Manifest:
  return Manifest(
    tensors=tuple(
      TensorSpec(
        name=spec["name"],
        shape=tuple(spec["shape"]),
        dtype=spec["dtype"],
        role=Role(spec["role"]),
        stacked=spec["stacked"],
      )
      for spec in said["tensors"]
    ),
    fragments=tuple(
      tuple(Unit(tensor, layer) for tensor, layer in units)
      for units in said["fragments"]
    ),
    owners=tuple(said["owners"]),
  )


def _dtype(name: str) -> np.dtype[Any]:
  import ml_dtypes

  found = ml_dtypes.bfloat16 if name == "bfloat16" else name
  return np.dtype(found)
