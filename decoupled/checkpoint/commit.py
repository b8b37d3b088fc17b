"""Snapshots that are there in full or not at all.

A snapshot is a folder `<group>/<number>-<attempt>`. Its files are written,
read back and hashed; only then is the marker written, last and in one piece,
with the hash of every file. A folder without a marker is unfinished; one whose
files differ from its marker is damaged. Both are named and passed over, and
the newest good one wins. Nothing that is good is ever written over.

Groups may lie in a local folder or, through `epath`, behind a URL.
"""

import dataclasses
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

from etils import epath

from decoupled import faults
from decoupled.errors import DecoupledError

MARKER = "COMMITTED.json"

StorePath: TypeAlias = str | os.PathLike[str]
T = TypeVar("T")
Rank: TypeAlias = Callable[[epath.Path], int]

_LOG = logging.getLogger(__name__)
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Restored:
  """What was read, and what had to be passed over to get there.

  Attributes:
    value: what `read` made of the folder.
    path: the folder.
    number: its number (a round, or a step).
    skipped: one sentence for each newer snapshot that was not good.
  """

  value: Any
  path: str
  number: int
  skipped: tuple[str, ...]


class Damaged(Exception):
  """A snapshot that cannot be used, and why."""


class Unfinished(Damaged):
  """A snapshot whose marker was never written."""


def save(
  group: StorePath,
  number: int,
  write: Callable[[epath.Path], None],
  keep: int = 3,
  keep_always: Iterable[int] = (),
  *,
  may_commit: Callable[[], None] = lambda: None,
  rank: Rank | None = None,
) -> str:
  """Writes one snapshot and commits it; then drops what is too old.

  Args:
    group: folder of the group; one writer at a time.
    number: orders the snapshots of a group (a round, or a step).
    write: fills an empty folder.
    keep: how many of the newest good snapshots stay.
    keep_always: numbers that stay beside these.
    may_commit: called last before the marker; raises where the writer has
      lost its right to write.
    rank: orders the snapshots of a group before their numbers do.

  Returns:
    The path of the snapshot.

  Raises:
    DecoupledError: it could not be written (disk full, no permission, ...);
      older snapshots are as they were.
  """
  if number < 0:
    raise ValueError(f"a snapshot's number must not be negative: {number}")
  attempt = uuid.uuid4().hex[:8]
  folder = epath.Path(group) / f"{number:012d}-{attempt}"
  try:
    folder.mkdir(parents=True)
    faults.reached("checkpoint.begun")
    write(folder)
    _commit(folder, number, may_commit)
  except Exception as error:
    _remove(folder)
    what = str(error).strip().splitlines() or [type(error).__name__]
    raise DecoupledError(
      f"cannot save {folder}: {what[0]}; older snapshots are kept, free "
      "space or choose another --store"
    ) from error
  faults.reached("checkpoint.committed")
  _retain(epath.Path(group), folder, keep, frozenset(keep_always), rank)
  return str(folder)


def restore(
  group: StorePath,
  read: Callable[[epath.Path], T],
  number: int | None = None,
  rank: Rank | None = None,
) -> Restored | None:
  """Reads the newest good snapshot of a group.

  Args:
    group: folder of the group.
    read: makes a value of a folder whose hashes are right.
    number: only snapshots of this number, if given.
    rank: as it was saved with.

  Returns:
    The value with its path, or None where nothing was ever committed.

  Raises:
    DecoupledError: snapshots were committed, but none of them is good.
  """
  skipped: list[str] = []
  committed = False
  for folder in folders(group, rank):
    if number is not None and number_of(folder) != number:
      continue
    try:
      _verify(folder)
      value = read(folder)
    except Unfinished as error:
      skipped.append(str(error))
    except Exception as error:
      committed = True
      if not isinstance(error, Damaged):
        error = Damaged(f"{folder} cannot be read: {error}")
      skipped.append(str(error))
    else:
      return Restored(
        value, os.fspath(folder), number_of(folder), tuple(skipped)
      )
    _LOG.warning("passed over: %s", skipped[-1])
  if committed:
    raise DecoupledError(
      f"no snapshot under {group} is good ({'; '.join(skipped)}): bring one "
      "back from a copy, or move the folder away to start anew"
    )
  return None


def verify(folder: StorePath) -> None:
  """Checks a snapshot's files against its marker.

  Raises:
    Unfinished: there is no marker.
    Damaged: a file is missing, or its hash is another; the message names it.
  """
  _verify(epath.Path(folder))


def _verify(folder: epath.Path) -> None:
  marker = folder / MARKER
  if not marker.exists():
    raise Unfinished(f"{folder} was not finished: it has no {MARKER}")
  try:
    said = json.loads(marker.read_text())
    files = said["files"]
    whole = said["digest"] == _digest(said["number"], files)
  except (ValueError, KeyError, TypeError):
    whole = False
  if not whole or said["number"] != number_of(folder):
    raise Damaged(f"{folder} is damaged: {MARKER} is not what was written")
  for name, expected in files.items():
    path = folder / name
    if not path.exists():
      raise Damaged(f"{folder} is damaged: {name} is missing")
    if _sha256(path) != expected:
      raise Damaged(f"{folder} is damaged: {name} has other bytes than saved")


def _commit(
  folder: epath.Path, number: int, may_commit: Callable[[], None]
) -> None:
  files = {}
  for path in _files(folder):
    _sync(path)
    files[os.fspath(path.relative_to(folder))] = _sha256(path)
    faults.reached("checkpoint.file")
  if not files:
    raise ValueError("nothing was written")
  marker = {
    "files": files,
    "number": number,
    "digest": _digest(number, files),
    "written_ns": time.time_ns(),
  }
  # A rename is in one piece on a local disk, a write in an object store.
  unmarked = folder / f".{MARKER}"
  unmarked.write_text(json.dumps(marker, indent=1))
  _sync(unmarked)
  may_commit()
  faults.reached("checkpoint.before_commit")
  unmarked.rename(folder / MARKER)
  _sync(folder)


def _retain(
  group: epath.Path,
  newest: epath.Path,
  keep: int,
  always: frozenset[int],
  rank: Rank | None,
) -> None:
  """Drops old snapshots; a failure here is said and does no harm."""
  try:
    kept = 0
    for folder in folders(group, rank):
      good = (folder / MARKER).exists()
      kept += good
      stays = good and (kept <= keep or number_of(folder) in always)
      if folder != newest and not stays:
        _remove(folder)
  except OSError as error:
    _LOG.warning("cannot drop old snapshots under %s: %s", group, error)


def folders(group: StorePath, rank: Rank | None = None) -> list[epath.Path]:
  """Snapshot folders, newest first; of one number the last committed."""
  root = epath.Path(group)
  if not root.exists():
    return []
  found = [
    (
      0 if rank is None else rank(path),
      number_of(path),
      _written(path),
      os.fspath(path),
      path,
    )
    for path in root.iterdir()
    if number_of(path) >= 0
  ]
  return [path for *_, path in sorted(found, reverse=True)]


def is_snapshot(folder: epath.Path) -> bool:
  """Whether a folder is named like a snapshot."""
  return number_of(folder) >= 0


def number_of(folder: epath.Path) -> int:
  """The number in a snapshot's name, -1 for any other name."""
  head, _, attempt = folder.name.partition("-")
  return int(head) if head.isdigit() and attempt else -1


def _written(folder: epath.Path) -> int:
  """When it was committed; stores keep file times in whole seconds at best."""
  try:
    return int(json.loads((folder / MARKER).read_text())["written_ns"])
  except (OSError, ValueError, KeyError, TypeError):
    return 0


def _files(folder: epath.Path) -> list[epath.Path]:
  files = []
  for path in sorted(folder.iterdir()):
    files += _files(path) if path.is_dir() else [path]
  return files


def _sha256(path: epath.Path) -> str:
  digest = hashlib.sha256()
  with path.open("rb") as file:
    while chunk := file.read(_CHUNK):
      digest.update(chunk)
  return digest.hexdigest()


def _digest(number: int, files: dict[str, str]) -> str:
  said = json.dumps([number, sorted(files.items())])
  return hashlib.sha256(said.encode()).hexdigest()


def _sync(path: epath.Path) -> None:
  """Forces a local file or folder to the disk."""
  if "://" in os.fspath(path):
    return
  fd = os.open(path, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)


def _remove(folder: epath.Path) -> None:
  """Removes a folder, its marker first.

  Whoever dies in the middle leaves one that was not finished, not a damaged
  one.
  """
  try:
    if folder.exists():
      (folder / MARKER).unlink(missing_ok=True)
      folder.rmtree()
  except OSError as error:
    _LOG.warning("cannot remove %s: %s", folder, error)
