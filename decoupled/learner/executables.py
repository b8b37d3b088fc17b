"""Compiled programs kept as files, so that a takeover compiles nothing.

An executable names its devices by id, not by process: what one rank compiled
loads on every rank, in every epoch with as many hosts, for as long as the dead
rank's id is reused. Loading is unpickling, hence running what is there. So a
file comes only from a folder that nobody but this user can write, is checked
against its own digest, and never from the network.
"""

import dataclasses
import hashlib
import json
import logging
import os
import pickle
import re
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax.experimental import serialize_executable

from decoupled.errors import ConfigError

_LOG = logging.getLogger("decoupled.executables")
_MAGIC = b"decoupled executable 1\n"
_MAX_HEADER = 64 * 1024
_NAME = re.compile(r"[\w.-]{1,100}")


def fingerprint(parts: Sequence[str]) -> str:
  """A digest of what a program depends on: equal where executables fit.

  Asks for the devices, so that the epoch has to be there.

  Args:
    parts: whatever shapes the program: contract lines, mesh, microbatches.
  """
  devices = jax.devices()
  whole = [
    *parts,
    f"jax {jax.__version__}, jaxlib {jaxlib.version.__version__}",
    devices[0].client.platform_version,
    os.environ.get("XLA_FLAGS", ""),
    f"{jax.process_count()} processes",
    *(f"{d.id} {d.process_index} {d.device_kind}" for d in devices),
  ]
  return hashlib.sha256("\n".join(whole).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Executables:
  """A folder of executables that fit one fingerprint.

  Attributes:
    folder: of this user alone; made if it is not there.
    fits: from `fingerprint`.
  """

  folder: Path
  fits: str

  def __post_init__(self) -> None:
    """Raises ConfigError unless only this user can write the folder."""
    self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = self.folder.lstat()
    if found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode):
      if not found.st_mode & 0o077:
        return
      problem = f"has mode {stat.S_IMODE(found.st_mode):04o}"
    else:
      problem = f"is of user {found.st_uid}, or no folder"
    raise ConfigError(
      f"{self.folder} {problem}: compiled programs are run as they are found, "
      f"so it has to be yours alone (chmod 700), or name another --workdir"
    )

  def save(self, name: str, compiled: Any) -> None:
    """Writes a compiled program, in one atomic step.

    Raises:
      ConfigError: the program cannot be serialised (it captured constants).
    """
    try:
      blob, in_tree, out_tree = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError) as error:
      raise ConfigError(
        f"program {name} cannot be kept: {error}; hand arrays to it as "
        "arguments, not as constants"
      ) from None
    body = pickle.dumps((blob, in_tree, out_tree, _device_ids(compiled)))
    header = {"fits": self.fits, "sha256": _digest(body), "bytes": len(body)}
    handle, written = tempfile.mkstemp(dir=self.folder, prefix=".new-")
    try:
      with os.fdopen(handle, "wb") as file:
        file.write(_MAGIC + json.dumps(header).encode() + b"\n" + body)
      os.replace(written, self._path(name))
    except BaseException:
      Path(written).unlink(missing_ok=True)
      raise

  def load(self, name: str) -> Any | None:
    """A program to call, on the devices of this epoch; None if none fits.

    What is damaged, of another program or of somebody else is left alone, and
    said.
    """
    try:
      handle = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
      return None
    except OSError as error:
      _LOG.warning("%s is not loaded: %s", self._path(name), error)
      return None
    with os.fdopen(handle, "rb") as file:
      found = os.fstat(file.fileno())
      if found.st_uid != os.getuid() or found.st_mode & 0o022:
        return self._not(name, "somebody else can write it")
      if file.readline(len(_MAGIC)) != _MAGIC:
        return self._not(name, "it is no executable")
      try:
        header = json.loads(file.readline(_MAX_HEADER))
        expected = {key: header[key] for key in ("fits", "sha256", "bytes")}
      except (ValueError, KeyError, TypeError):
        return self._not(name, "its header is damaged")
      body = file.read()
    if expected["fits"] != self.fits:
      return self._not(name, "it was compiled for something else")
    if len(body) != expected["bytes"] or _digest(body) != expected["sha256"]:
      return self._not(name, "it is damaged")
    try:
      blob, in_tree, out_tree, ids = pickle.loads(body)
      here = {device.id: device for device in jax.devices()}
      return serialize_executable.deserialize_and_load(
        blob, in_tree, out_tree, execution_devices=[here[i] for i in ids]
      )
    except Exception as error:  # XLA says in many ways that it does not fit
      return self._not(name, f"it cannot be loaded ({error})")

  def _not(self, name: str, why: str) -> Any | None:
    _LOG.warning("%s is not loaded: %s", self._path(name), why)
    return None

  def _path(self, name: str) -> Path:
    if not _NAME.fullmatch(name):
      raise ValueError(f"{name!r} is no name of a program")
    return self.folder / f"{name}.exe"


def _device_ids(compiled: Any) -> list[int]:
  """The devices that a program runs on, in its order."""
  shardings = jax.tree.leaves(
    (compiled.input_shardings, compiled.output_shardings)
  )
  for sharding in shardings:
    if isinstance(sharding, jax.sharding.NamedSharding):
      return [device.id for device in sharding.mesh.devices.flat]
  every = {d.id for sharding in shardings for d in sharding.device_set}
  return sorted(every)


def _digest(body: bytes) -> str:
  return hashlib.sha256(body).hexdigest()
