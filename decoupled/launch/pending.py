"""Restarts the local runner owes, in a file that the syncer looks at.

A run does not end while a restart is owed (design section 7): the runner
writes the roles here before it starts them again and removes each once it is
back; the syncer asks `owed` before it ends, `Limits.restart_s` at most.
"""

import json
from collections.abc import Collection
from pathlib import Path

_NAME = "restarts.json"


def write(workdir: Path, roles: Collection[str]) -> None:
  """Replaces the list in one move."""
  staged = workdir / (_NAME + ".tmp")
  staged.write_text(json.dumps(sorted(roles)), encoding="utf-8")
  staged.replace(workdir / _NAME)


def owed(workdir: Path) -> tuple[str, ...]:
  """Roles, such as `learner/1`, that are about to be back; () if none."""
  try:
    return tuple(json.loads((workdir / _NAME).read_text(encoding="utf-8")))
  except (OSError, ValueError, TypeError):
    return ()
