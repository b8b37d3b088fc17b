"""The directory of a run: its files, its lock, and whether it goes on."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from decoupled.config import contract_difference
from decoupled.errors import ConfigError, DecoupledError
from decoupled.observe import events


@dataclasses.dataclass(frozen=True)
class Standing:
  """What a workdir already holds.

  Attributes:
    resumed: an earlier job of the same contract is continued.
    complete: everything asked for has been done.
    rounds: rounds that counted so far.
    tokens: tokens processed so far.
  """

  resumed: bool = False
  complete: bool = False
  rounds: int = 0
  tokens: int = 0


class Workdir:
  """Layout of design section 7, and who may write there.

  Raises:
    DecoupledError: the directory cannot be made or written.
  """

  def __init__(self, path: Path):
    self.path = path
    self.config = path / "config.gin"
    self.contract = path / "contract.json"
    self.events = path / "events.jsonl"
    self.token = path / "run.token"
    self.address = path / "syncer.address"
    self.report = path / "report.json"
    self.chaos = path / "chaos"
    self._lock_file = path / "run.lock"
    self._lock: int | None = None

  def log(self, role: str) -> Path:
    return self.path / "logs" / f"{role.replace('/', '-')}.log"

  def create(self) -> None:
    try:
      (self.path / "logs").mkdir(parents=True, exist_ok=True)
      probe = self.path / f".probe.{os.getpid()}"
      probe.write_bytes(b"x")
      probe.unlink()
    except OSError as error:
      raise DecoupledError(
        f"workdir {self.path} cannot be written: {error.strerror}; choose "
        "another --workdir"
      ) from None

  # ---- the lock --------------------------------------------------------------

  def lock(self) -> None:
    """Claims the directory until `unlock` or the death of this process.

    Raises:
      DecoupledError: another run holds it; its process is named.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    handle = os.open(self._lock_file, flags, 0o644)
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      os.close(handle)
      if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
        raise DecoupledError(
          f"workdir {self.path} cannot be locked: {error.strerror}"
        ) from None
      raise DecoupledError(
        f"workdir {self.path} belongs to a run that is going on, process "
        f"{self._holder()}: choose another --workdir, or end that one with "
        f"`decoupled stop --workdir {self.path}`"
      ) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    self._lock = handle

  def unlock(self) -> None:
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None

  def live_process(self) -> int | None:
    """Process id of the run that is going on here, None if none is."""
    try:
      handle = os.open(self._lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
      return None
    try:
      fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
      holder = self._holder()
      return int(holder) if holder.isdigit() else None
    finally:
      os.close(handle)
    return None

  def _holder(self) -> str:
    with contextlib.suppress(OSError):
      return self._lock_file.read_text(encoding="utf-8").strip() or "unknown"
    return "unknown"

  # ---- beginning and going on ------------------------------------------------

  def standing(
    self,
    contract: Sequence[tuple[str, str]],
    resume: str,
    rounds: int,
    tokens: int,
  ) -> Standing:
    """Decides between a new run, one that goes on and a refusal.

    Args:
      contract: of the run that is asked for.
      resume: auto, never or required.
      rounds: rounds asked for, 0 = no such end.
      tokens: tokens asked for, 0 = no such end.

    Raises:
      ConfigError: the directory does not allow what `resume` asks.
    """
    held = self._held_contract()
    if held is None:
      if resume == "required":
        raise ConfigError(
          f"--resume=required, but {self.path} holds no run: name the "
          "--workdir of the run, or say --resume=auto"
        )
      return Standing()
    if resume == "never":
      raise ConfigError(
        f"--resume=never, but {self.path} holds a run already: choose another "
        "--workdir, or say --resume=auto to continue it"
      )
    difference = contract_difference(contract, held)
    if difference is not None:
      key, ours, theirs = difference
      raise ConfigError(
        f"{self.path} holds a run with another contract: {key} is {ours} here "
        f"and {theirs} there; choose another --workdir, or {key} = {theirs}"
      )
    return self._progress(rounds, tokens)

  def begin(
    self, config_text: str, contract: Sequence[tuple[str, str]]
  ) -> None:
    """Writes what the processes of a job read, removes what is of the last.

    Raises:
      DecoupledError: the disk does not take it.
    """
    try:
      for stale in (self.address, self.report):
        stale.unlink(missing_ok=True)
      shutil.rmtree(self.chaos, ignore_errors=True)
      _replace(self.config, config_text, 0o644)
      _replace(self.contract, json.dumps(contract, indent=1) + "\n", 0o644)
      # Owner-only before it has any content: a secret.
      _replace(self.token, secrets.token_hex(32) + "\n", 0o600)
    except OSError as error:
      raise DecoupledError(
        f"workdir {self.path} cannot be written: {error.strerror}"
      ) from None

  def _held_contract(self) -> list[tuple[str, str]] | None:
    try:
      text = self.contract.read_text(encoding="utf-8")
    except FileNotFoundError:
      return None
    except OSError as error:
      raise ConfigError(f"{self.contract}: {error.strerror}") from None
    try:
      return [(str(key), str(value)) for key, value in json.loads(text)]
    except (ValueError, TypeError):
      raise ConfigError(
        f"{self.contract} is damaged, so it cannot be said whether this run "
        "continues that one: restore it, or choose another --workdir"
      ) from None

  def _progress(self, rounds: int, tokens: int) -> Standing:
    """How far the earlier jobs got, from their log and report."""
    done = 0
    if self.events.exists():
      for event in events.read(self.events):
        if event["kind"] == "round" and event.get("counted"):
          done = max(done, int(event["round"]))
    try:
      report = json.loads(self.report.read_text(encoding="utf-8"))
    except (OSError, ValueError):
      report = {}
    processed = int(report.get("tokens_total") or 0)
    enough = (rounds and done >= rounds) or (tokens and processed >= tokens)
    complete = bool(report.get("status") == "completed" and enough)
    return Standing(True, complete, done, processed)


def _replace(path: Path, text: str, mode: int) -> None:
  """Replaces a file in one move, with its permissions from the beginning."""
  staged = path.with_name(f".{path.name}.{os.getpid()}")
  staged.unlink(missing_ok=True)
  flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
  handle = os.open(staged, flags, mode)
  with os.fdopen(handle, "w", encoding="utf-8") as file:
    file.write(text)
  staged.replace(path)
