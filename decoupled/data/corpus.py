"""The text: which files it is, and which of them are never trained on.

The same files give the same corpus on every machine: they are listed in order
of their names relative to the folder they come from, and a hash of that name
decides to which split a file belongs.
"""

import dataclasses
import fnmatch
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from decoupled.data.settings import Corpus
from decoupled.errors import ConfigError

Bytes: TypeAlias = np.ndarray  # uint8[n]

# Present in some installations of the standard library only.
_NOT_STDLIB = frozenset(
  {"site-packages", "dist-packages", "test", "tests", "idle_test"}
)

# Below this many files whole files are too coarse a cut, so blocks are cut.
_FEW_FILES = 64
_BLOCK = 4096
_LEAST_BLOCK = 256


class Source(NamedTuple):
  """A file of the corpus: its place here, and its name everywhere."""

  name: str
  path: Path


@dataclasses.dataclass(frozen=True)
class Text:
  """A corpus in memory, cut into splits that share no file.

  Attributes:
    train: uint8[n], what learners train on.
    heldout: uint8[n], for the final evaluation.
    validation: uint8[n], for sweeps; may be empty.
    digest: of names, sizes and contents; peers of a run must agree on it.
    files: number of files read.
  """

  train: Bytes
  heldout: Bytes
  validation: Bytes
  digest: str
  files: int


def load(config: Corpus) -> Text:
  """Reads the corpus.

  Raises:
    ConfigError: nothing matches, a file cannot be read, or a split is too
      short for a single sequence.
  """
  contents = list(_read(config, find(config)))
  digest = hashlib.blake2b(digest_size=16)
  for name, data in contents:
    digest.update(f"{name}\0{len(data)}\0".encode())
    digest.update(data)
  splits: dict[str, list[bytes]] = {
    s: [] for s in ("train", "heldout", "validation")
  }
  for name, data in _pieces(contents):
    splits[_split(name, config)].append(data)
  joined = {
    split: np.frombuffer(b"".join(parts), np.uint8)
    for split, parts in splits.items()
  }
  for split in ("train", "heldout"):
    _check_length(split, joined[split], config)
  return Text(**joined, digest=digest.hexdigest(), files=len(contents))


def find(config: Corpus) -> list[Source]:
  """Lists the files of a corpus, in the order of their names.

  Raises:
    ConfigError: naming the path and the patterns, where nothing matches.
  """
  if config.path:
    entries = [entry for entry in re.split(r"[,\s]+", config.path) if entry]
    found = [s for entry in entries for s in _expand(entry, config)]
  else:
    stdlib = Path(sysconfig.get_path("stdlib"))
    found = list(_walk(stdlib, config.patterns.split(), _NOT_STDLIB))
  unique = {source.path.resolve(): source for source in reversed(found)}
  sources = sorted(unique.values())
  if not sources:
    where = config.path or "the Python standard library's source"
    raise ConfigError(
      f"the corpus is empty: no file matches Corpus.path = {where!r} with "
      f"Corpus.patterns = {config.patterns!r}"
    )
  return sources


def _expand(entry: str, config: Corpus) -> Iterator[Source]:
  """A file, a folder (by the patterns) or a glob (folders in it likewise)."""
  path = Path(entry).expanduser()
  if path.is_dir():
    yield from _walk(path, config.patterns.split())
  elif path.is_file():
    yield Source(path.name, path)
  elif glob.has_magic(entry):
    root = _fixed_part(path)
    for match in sorted(glob.glob(str(path), recursive=True)):
      hit = Path(match)
      if hit.is_file():
        yield Source(hit.relative_to(root).as_posix(), hit)
      elif "**" not in entry:
        for source in _walk(hit, config.patterns.split()):
          yield Source(source.path.relative_to(root).as_posix(), source.path)
  else:
    raise ConfigError(
      f"Corpus.path = {config.path!r}: there is no file or folder {entry!r} "
      "(paths are separated by commas or spaces)"
    )


def _fixed_part(pattern: Path) -> Path:
  """The leading folders of a glob that hold no wildcard."""
  fixed = Path()
  for part in pattern.parts[:-1]:
    if glob.has_magic(part):
      break
    fixed /= part
  return fixed


def _walk(
  root: Path, patterns: Sequence[str], skip: frozenset[str] = frozenset()
) -> Iterator[Source]:
  """Files below a folder that match; hidden folders are left out."""
  for folder, folders, files in os.walk(root):
    folders[:] = sorted(
      f for f in folders if f not in skip and not f.startswith(".")
    )
    for file in sorted(files):
      if any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns):
        path = Path(folder, file)
        yield Source(path.relative_to(root).as_posix(), path)


def _read(
  config: Corpus, sources: Sequence[Source]
) -> Iterator[tuple[str, bytes]]:
  """Yields (name, content) within `max_bytes`, in the order of the names."""
  try:
    sizes = {source: source.path.stat().st_size for source in sources}
    left = config.max_bytes
    kept: dict[Source, int] = {}
    for source in sorted(sources, key=lambda s: _hash(s.name, b"thin")):
      kept[source] = min(sizes[source], left)
      left -= kept[source]
    for source in sources:
      if kept[source]:
        with source.path.open("rb") as file:
          yield source.name, file.read(kept[source])
  except OSError as error:
    raise ConfigError(
      f"cannot read {error.filename} of the corpus: {error.strerror}"
    ) from error


def _pieces(
  contents: Sequence[tuple[str, bytes]],
) -> Iterator[tuple[str, bytes]]:
  """What the splits are made of: files, or blocks where files are few."""
  if len(contents) >= _FEW_FILES:
    yield from contents
    return
  total = sum(len(data) for _, data in contents)
  block = min(_BLOCK, max(_LEAST_BLOCK, total // _FEW_FILES))
  for name, data in contents:
    for start in range(0, len(data), block):
      yield f"{name}#{start}", data[start : start + block]


def _split(name: str, config: Corpus) -> str:
  place = _hash(name, b"split")
  if place < config.heldout_share:
    return "heldout"
  if place < config.heldout_share + config.validation_share:
    return "validation"
  return "train"


def _hash(name: str, purpose: bytes) -> float:
  """A stable number in [0, 1) per name."""
  digest = hashlib.blake2b(name.encode(), digest_size=8, person=purpose)
  return int.from_bytes(digest.digest(), "big") / 2**64


def _check_length(split: str, data: Bytes, config: Corpus) -> None:
  least = 2 * config.context  # one sequence, wherever the windows start
  if len(data) < least:
    where = config.path or "the Python standard library's source"
    raise ConfigError(
      f"the {split} split of Corpus.path = {where!r} has {len(data)} bytes, "
      f"Corpus.context = {config.context} needs at least {least}: give more "
      f"text, or change Corpus.heldout_share = {config.heldout_share}"
    )
