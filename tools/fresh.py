"""Removes an old run, unless it is going on: `python tools/fresh.py WORKDIR`.

For directories that belong to a make target and to nobody else.
"""

import shutil
import sys
from pathlib import Path

from decoupled.launch.workdir import Workdir


def main() -> int:
  path = Path(sys.argv[1])
  workdir = Workdir(path)
  process = workdir.live_process()
  if process is not None:
    print(
      f"{path} belongs to a run that is going on, process {process}: wait for "
      f"it, or end it with `decoupled stop --workdir {path}`",
      file=sys.stderr,
    )
    return 1
  if workdir.contract.exists():  # only ever what a run has made
    shutil.rmtree(path)
  return 0


if __name__ == "__main__":
  sys.exit(main())
