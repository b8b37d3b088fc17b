"""What lies in a store: every snapshot, and whether it is what was written."""

import contextlib
import dataclasses
import json
import os
from typing import Any

from etils import epath

from decoupled.checkpoint import commit, learner_store, syncer_store
from decoupled.checkpoint.commit import StorePath

COMMITTED = "committed"  # its marker is there; its files were not read
GOOD = "good"
UNFINISHED = "unfinished"
DAMAGED = "damaged"


@dataclasses.dataclass(frozen=True)
class Entry:
  """One snapshot.

  Attributes:
    group: `global`, or `learner_<id>`.
    number: the round it holds, or a learner's step of the learning rate.
    path: its folder.
    state: committed (not looked into), good, unfinished or damaged.
    problem: what is wrong with it, "" if nothing is known.
    bytes: of all files that its marker lists.
    written_s: when it was committed, seconds since 1970; None if it never was.
    run_id: of the run it belongs to, "" if it does not say.
    term: of the syncer that cut it; None for a learner's.
  """

  group: str
  number: int
  path: str
  state: str
  problem: str
  bytes: int
  written_s: float | None
  run_id: str
  term: int | None


def inventory(where: StorePath, verify: bool) -> list[Entry]:
  """Every snapshot below a path, the newest of each group first.

  Args:
    where: a store, one of its groups, or one snapshot.
    verify: read every file and compare it with what was written.
  """
  entries = [
    _entry(group, folder, verify) for group, folder in _snapshots(where)
  ]
  # a run that is going on drops old ones while they are looked at
  return [e for e in entries if epath.Path(e.path).exists()]


def _snapshots(where: StorePath) -> list[tuple[str, epath.Path]]:
  root = epath.Path(where)
  if commit.is_snapshot(root):
    return [(root.parent.name, root)] if root.exists() else []
  found = commit.folders(root, syncer_store.term_of)
  if found:
    return [(root.name, folder) for folder in found]
  if not root.exists():
    return []
  groups = sorted(path for path in root.iterdir() if path.is_dir())
  return [
    (group.name, folder)
    for group in groups
    for folder in commit.folders(group, syncer_store.term_of)
  ]


def _entry(group: str, folder: epath.Path, verify: bool) -> Entry:
  state, problem = _state(folder, verify)
  marker = _json(folder / commit.MARKER)
  said = {
    **_json(folder / learner_store.META),
    **_json(folder / syncer_store.STATE),
  }
  written_ns = marker.get("written_ns")
  return Entry(
    group=group,
    number=commit.number_of(folder),
    path=os.fspath(folder),
    state=state,
    problem=problem,
    bytes=_bytes(folder, marker),
    written_s=None if written_ns is None else written_ns / 1e9,
    run_id=str(said.get("run_id") or ""),
    term=said.get("term"),
  )


def _state(folder: epath.Path, verify: bool) -> tuple[str, str]:
  if not verify:
    marked = (folder / commit.MARKER).exists()
    return (COMMITTED, "") if marked else (UNFINISHED, "it has no marker")
  try:
    commit.verify(folder)
  except commit.Unfinished as error:
    return UNFINISHED, str(error)
  except commit.Damaged as error:
    return DAMAGED, str(error)
  except OSError as error:
    return DAMAGED, f"{folder} cannot be read: {error}"
  return GOOD, ""


def _bytes(folder: epath.Path, marker: dict[str, Any]) -> int:
  total = 0
  for name in marker.get("files", {}):
    with contextlib.suppress(OSError):
      total += (folder / name).stat().length
  return total


def _json(path: epath.Path) -> dict[str, Any]:
  """What a file says; nothing where it is missing or damaged."""
  try:
    said = json.loads(path.read_text())
  except (OSError, ValueError):
    return {}
  return said if isinstance(said, dict) else {}
