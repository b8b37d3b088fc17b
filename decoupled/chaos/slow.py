"""The learner's side of `slow`: a factor read from a small control file."""

import json
import os
import threading
from pathlib import Path

# Names the control file in the learner's environment.
VARIABLE = "DECOUPLED_CHAOS_FILE"
_POLL_S = 0.1


class Slowdown:
  """A factor by which the learner stretches its inner steps.

  A daemon thread polls the file, so that the loop only reads an attribute and
  never touches the disk.

  Attributes:
    factor: 1.0 = full speed; 3.0 = each inner step takes three times as long.
  """

  def __init__(self, path: Path | None):
    self.factor = 1.0
    self._path = path
    self._stopped = threading.Event()
    if path is not None:
      threading.Thread(target=self._poll, name="slowdown", daemon=True).start()

  @classmethod
  def from_environment(cls) -> "Slowdown":
    """Reads the file the local runner named; none: full speed for ever."""
    name = os.environ.get(VARIABLE, "")
    return cls(Path(name) if name else None)

  def close(self) -> None:
    self._stopped.set()

  def _poll(self) -> None:
    assert self._path is not None
    while not self._stopped.is_set():
      self.factor = read(self._path)
      self._stopped.wait(_POLL_S)


def read(path: Path) -> float:
  """The factor in the file, 1.0 where there is none."""
  try:
    factor = float(json.loads(path.read_text(encoding="utf-8"))["slow"])
  except (OSError, ValueError, KeyError, TypeError):
    return 1.0
  return max(1.0, factor)


def write(path: Path, factor: float) -> None:
  """Replaces the file in one move: a reader sees the old or the new factor."""
  path.parent.mkdir(parents=True, exist_ok=True)
  staged = path.with_suffix(".tmp")
  staged.write_text(json.dumps({"slow": factor}), encoding="utf-8")
  staged.replace(path)
