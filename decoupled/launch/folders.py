"""Where a learner keeps what is its own when nobody has said where."""

import getpass
import os
import re
import stat
import tempfile
from pathlib import Path

from decoupled.errors import ConfigError


def learner(syncer_address: str) -> Path:
  """A folder of this machine and user, the same for the same syncer.

  A learner that comes back finds its compiled programs and its optimizer
  state there. Several learners may share it, as those of one job do.
  """
  slug = re.sub(r"[^\w.-]+", "_", syncer_address).strip("_")
  return _mine() / slug


def prepare(workdir: Path) -> None:
  """Makes a workdir; one below the temporary folder only for its owner.

  Raises:
    ConfigError: it cannot be written, or somebody else made it.
  """
  try:
    if workdir.parent == _mine():
      _make_private(workdir.parent)
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ConfigError(
      f"workdir {workdir} cannot be written: {error.strerror}; choose another "
      "--workdir"
    ) from None


def _mine() -> Path:
  try:
    user = getpass.getuser()
  except (KeyError, OSError):  # a user id without a name
    user = str(os.getuid())
  return Path(tempfile.gettempdir()) / f"decoupled-{user}"


def _make_private(folder: Path) -> None:
  """Anybody may have made a name in a folder for everybody."""
  folder.mkdir(mode=0o700, exist_ok=True)
  found = folder.lstat()
  private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
  if found.st_uid != os.getuid() or not private:
    raise ConfigError(
      f"{folder} is not a folder that only you can use: name a --workdir"
    )
