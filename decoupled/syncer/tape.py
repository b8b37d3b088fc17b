"""Recorded contributions, so that a merge can be done again, bit for bit.

One file a round, in the order of merging: the arrays of every contribution and
a JSON header. A recording is bounded; when it is full, it stops and says so.
"""

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from decoupled.errors import ConfigError
from decoupled.syncer.model import GlobalModel
from decoupled.syncer.rounds import MergeJob
from decoupled.types import Contribution, CopyHeader, CopyId, Version

_LOG = logging.getLogger("decoupled.syncer")
_HEADER = "header"


class Tape:
  """Writes merge jobs into a folder, beside those of earlier terms.

  Args:
    folder: is created.
    limit_bytes: most that the recording may take.
  """

  def __init__(self, folder: Path, limit_bytes: int = 1 << 30):
    self._folder = folder
    self._count = 0
    self._full = False
    folder.mkdir(parents=True, exist_ok=True)
    before = sum(path.stat().st_size for path in folder.glob("*.npz"))
    self._left = limit_bytes - before

  def record(self, job: MergeJob) -> None:
    """Appends one finished job; never raises."""
    if self._full:
      return
    data = _pack(job)
    if len(data) > self._left:
      self._full = True
      _LOG.warning(
        "the recording in %s is full after %d rounds", self._folder, self._count
      )
      return
    name = f"{job.round.version.term:06d}-{self._count:09d}.npz"
    try:
      (self._folder / name).write_bytes(data)
    except OSError as error:
      self._full = True
      _LOG.warning("cannot record to %s: %s", self._folder, error)
      return
    self._left -= len(data)
    self._count += 1


def replay(folder: Path, model: GlobalModel) -> int:
  """Merges a recording again.

  Args:
    folder: of the recording.
    model: as it was when the recording began; is brought to its end.

  Returns:
    How many rounds were replayed.

  Raises:
    ConfigError: the recording does not go on from where the model stands.
  """
  count = 0
  for path in sorted(folder.glob("*.npz")):
    with np.load(path, allow_pickle=False) as saved:
      header = json.loads(str(saved[_HEADER]))
      contributions = tuple(
        _unpack(said, i, saved) for i, said in enumerate(header["copies"])
      )
    stands = model.get(header["fragment"]).version
    for c in contributions:
      if c.header.base != stands:
        raise ConfigError(
          f"{path} was merged into {c.header.base}, but fragment "
          f"{header['fragment']} stands at {stands}: start from the snapshot "
          "that the recording began with"
        )
    successor = model.merged(
      header["fragment"],
      Version(*header["version"]),
      contributions,
      header["weights"],
      header["rate_scale"],
      header["common_step"],
      restored=header["restored"],
    )
    model.commit(header["fragment"], successor)
    count += 1
  return count


def _pack(job: MergeJob) -> bytes:
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
  arrays: dict[str, Any] = {
    f"{i}_{k}": array
    for i, c in enumerate(job.contributions)
    for k, array in enumerate(c.arrays)
  }
  out = io.BytesIO()
  np.savez(out, **{_HEADER: np.array(json.dumps(header)), **arrays})
  return out.getvalue()


def _unpack(said: dict[str, Any], i: int, saved: Any) -> Contribution:
  header = CopyHeader(
    copy=CopyId(*said["copy"]),
    base=Version(*said["base"]),
    steps=said["steps"],
    tokens=said["tokens"],
    total_tokens=said["total_tokens"],
  )
  arrays = tuple(saved[f"{i}_{k}"] for k in range(said["arrays"]))
  return Contribution(said["learner"], header, arrays)
