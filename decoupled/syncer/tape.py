"""Recorded contributions, so that every merge can be done again, bit for bit.

One file a round, in the order of merging: the arrays of every contribution and
a JSON header; for each term one file with what it began from, and one that
says how the recording ended. A file is there in full or not at all, so that a
syncer that dies while it records leaves nothing half written. A recording is
bounded; when it is full, it stops and says so.

    <term>-start.npz   <term>-000000000.npz ...   <term>-end.json
"""

import io
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from decoupled.syncer.merging import MergeJob
from decoupled.types import Contribution, CopyHeader, CopyId, Version

_LOG = logging.getLogger("decoupled.syncer")
_HEADER = "header"
_NAME = re.compile(r"^(\d{6})-(\d{9}|start|end)\.(npz|json)$")


class Tape:
  """Writes one term into a folder, beside earlier terms.

  Args:
    folder: is created.
    limit_bytes: most that the whole recording may take.

  Attributes:
    why: why it has stopped, "" while it goes on.
  """

  def __init__(self, folder: Path, limit_bytes: int = 1 << 30):
    self.why = ""
    self._folder = folder
    self._count = 0
    folder.mkdir(parents=True, exist_ok=True)
    for torn in folder.glob(".*"):  # of a process that was killed
      torn.unlink(missing_ok=True)
    sizes = [path.stat().st_size for path in folder.glob("*.npz")]
    self._left = limit_bytes - sum(sizes)

  def has(self, term: int) -> bool:
    """Whether that term was recorded, to its end or to its holder's death."""
    names = files(self._folder).get(term, {})
    return "start" in names and not ("end" in names and read_end(names["end"]))

  def record(self, job: MergeJob) -> None:
    """Appends one finished job; never raises."""
    if self.why:
      return
    header, arrays = packed(job)
    term = job.round.version.term
    if self._write(f"{term:06d}-{self._count:09d}.npz", header, arrays):
      self._count += 1
    else:
      self.end(term)

  def begin(
    self,
    term: int,
    header: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
  ) -> None:
    """Says what a term starts from; never raises."""
    name = f"{term:06d}-start.npz"
    if not self.why and not self._write(name, header, arrays):
      self.end(term)

  def end(self, term: int) -> None:
    """Says that nothing follows, and why; never raises."""
    said = {"records": self._count, "why": self.why}
    try:
      _replace(self._folder / f"{term:06d}-end.json", json.dumps(said).encode())
    except OSError as error:
      _LOG.warning("cannot end the recording in %s: %s", self._folder, error)

  def _write(
    self, name: str, header: Mapping[str, Any], arrays: Mapping[str, Any]
  ) -> bool:
    """Writes one file; where that fails, `why` says so from then on."""
    size = sum(array.nbytes for array in arrays.values())
    data = b"" if size > self._left else _npz(header, arrays)
    if size > self._left or len(data) > self._left:
      self.why = f"it was full after {self._count} rounds"
    else:
      try:
        _replace(self._folder / name, data)
      except OSError as error:
        self.why = f"it could not be written: {error}"
    if self.why:
      _LOG.warning("the recording in %s ends: %s", self._folder, self.why)
      return False
    self._left -= len(data)
    return True


def files(folder: Path) -> dict[int, dict[str, Path]]:
  """Per term its files by name: `start`, `end`, and numbers of nine digits."""
  found: dict[int, dict[str, Path]] = {}
  for path in sorted(folder.iterdir()) if folder.is_dir() else []:
    match = _NAME.match(path.name)
    if match:
      found.setdefault(int(match[1]), {})[match[2]] = path
  return dict(sorted(found.items()))


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """The header and the arrays of a file.

  Raises:
    ValueError: it is not what was written.
  """
  try:
    with np.load(path, allow_pickle=False) as saved:
      arrays = dict(saved)
    return json.loads(str(arrays.pop(_HEADER))), arrays
  except Exception as error:  # zipfile and NumPy raise many kinds
    raise ValueError(f"{path} is not what was recorded: {error}") from None


def read_end(path: Path) -> str:
  """Why a recording ended; "" where it ended in order, or cannot say."""
  try:
    return str(json.loads(path.read_text())["why"])
  except (OSError, ValueError, KeyError, TypeError):
    return ""


def packed(job: MergeJob) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """A finished job as a header and arrays."""
  header = {
    "fragment": job.round.fragment,
    "version": list(job.round.version),
    "weights": list(job.weights),
    "rate_scale": job.rate_scale,
    "common_step": job.common_step,
    "restored": not job.round.counted,
    "copies": [
      {
        "learner": c.learner_id,
        "copy": list(c.header.copy),
        "base": list(c.header.base),
        "steps": c.header.steps,
        "tokens": c.header.tokens,
        "total_tokens": c.header.total_tokens,
        "arrays": len(c.arrays),
      }
      for c in job.contributions
    ],
  }
  arrays = {
    f"{i}_{k}": array
    for i, c in enumerate(job.contributions)
    for k, array in enumerate(c.arrays)
  }
  return header, arrays


def contributions(
  header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[Contribution, ...]:
  """The contributions of a recorded job, in the order of merging."""
  return tuple(
    Contribution(
      said["learner"],
      CopyHeader(
        copy=CopyId(*said["copy"]),
        base=Version(*said["base"]),
        steps=said["steps"],
        tokens=said["tokens"],
        total_tokens=said["total_tokens"],
      ),
      tuple(arrays[f"{i}_{k}"] for k in range(said["arrays"])),
    )
    for i, said in enumerate(header["copies"])
  )


def _npz(header: Mapping[str, Any], arrays: Mapping[str, Any]) -> bytes:
  out = io.BytesIO()
  np.savez(out, **{_HEADER: np.array(json.dumps(header)), **arrays})
  return out.getvalue()


def _replace(path: Path, data: bytes) -> None:
  """Writes a file so that a reader sees all of it or nothing."""
  staged = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    staged.write_bytes(data)
    staged.replace(path)
  except OSError:
    staged.unlink(missing_ok=True)
    raise
