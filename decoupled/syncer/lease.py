"""Who serves a run, and under which term: a lease, not a lock.

Each term has a file of its own below `<workdir>/lease`, and the highest one
counts. A syncer makes the next one before it serves anybody, in one step that
only one of several can win, and renews only its own: a process that was
stopped and continues cannot overwrite its successor's claim. Wherever it then
looks, it finds a higher term, and leaves.

Whether a claim has lapsed is told by watching it for as long as it is good
for; clocks of different machines are never compared. A holder that is known
to be dead (same machine, its process is gone) is not waited for.
"""

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from decoupled import faults
from decoupled.clock import Clock, MonotonicClock
from decoupled.errors import DecoupledError

_POLL_S = 0.05
_KEPT = 4  # files of earlier terms that stay
_UNKNOWN = "unknown"


class Fenced(DecoupledError):
  """Another syncer serves the run under a higher term; this one must leave."""


@dataclasses.dataclass(frozen=True)
class Claim:
  """What the file of a term says.

  Attributes:
    term: which.
    holder: `host:pid` of the syncer.
    place: where that process id means something (boot and namespace).
    run_id: the run that it serves.
    lease_s: how long the claim is good for without being renewed.
    renewals: rises with each renewal.
    deadline: when it lapses, in seconds since 1970; for people.
    released: its holder ended in order.
  """

  term: int
  holder: str = _UNKNOWN
  place: str = ""
  run_id: str = ""
  lease_s: float = 5.0
  renewals: int = 0
  deadline: float = 0.0
  released: bool = False


class Lease:
  """The claim of this process; made by `claim`.

  Attributes:
    term: granted to this process alone.
    before: the claim it succeeded, None for the first.
  """

  def __init__(
    self, folder: Path, mine: Claim, before: Claim | None, clock: Clock
  ):
    self.term = mine.term
    self.before = before
    self._folder = folder
    self._mine = mine
    self._clock = clock
    self._lock = threading.Lock()
    self._good_until = clock.now() + mine.lease_s

  def rise_above(self, term: int) -> None:
    """Takes a higher term where a snapshot was made under this one or later.

    Raises:
      Fenced: another process holds a higher term.
    """
    with self._lock:
      self.check()
      if self.term > term:
        return
      mine = dataclasses.replace(self._mine, term=term + 1)
      if _make(_path(self._folder, mine.term), _text(mine)):
        self._mine, self.term = mine, mine.term
    self.check()

  def serve(self, run_id: str) -> None:
    """Says which run is served, for whoever has to go on with it."""
    self._renew(run_id=run_id)

  def renew(self) -> None:
    """Prolongs the claim.

    Raises:
      Fenced: another process holds a higher term.
      OSError: the disk does not take it; try again.
    """
    self._renew(renewals=self._mine.renewals + 1)

  def check(self) -> None:
    """Raises Fenced if another process holds a higher term."""
    newest = _newest(self._folder)
    if newest is None or newest.term <= self.term:
      return
    raise Fenced(
      f"fenced: {newest.holder} serves this run under term {newest.term}; "
      f"process {os.getpid()} held term {self.term}, was silent for more than "
      f"{self._mine.lease_s:g} s and leaves. Nothing is lost but what it did "
      "since then"
    )

  def guard(self) -> None:
    """`check`, whenever others may have taken the claim for lapsed."""
    now = self._clock.now()
    if now < self._good_until:
      return
    self.check()
    self._good_until = now + _POLL_S

  def release(self) -> None:
    """Lets the next syncer begin at once; never raises."""
    with contextlib.suppress(OSError, Fenced):
      self._renew(released=True)

  def _renew(self, **changes: object) -> None:
    with self._lock:
      self.check()
      began = self._clock.now()
      changes["deadline"] = round(time.time() + self._mine.lease_s, 3)
      self._mine = dataclasses.replace(self._mine, **changes)  # type: ignore[arg-type]
      path = _path(self._folder, self.term)
      staged = path.with_name(f".{path.name}.{os.getpid()}")
      staged.write_text(_text(self._mine), encoding="utf-8")
      faults.reached("syncer.renewing")
      staged.replace(path)
      self._good_until = began + self._mine.lease_s


def claim(
  folder: Path,
  lease_s: float,
  clock: Clock | None = None,
  sleep: Callable[[float], None] = time.sleep,
  here: tuple[str, str] | None = None,
) -> Lease:
  """Waits until nobody else serves the run, then takes the next term.

  Args:
    folder: of the lease files; is made.
    lease_s: how long the claim is to be good for without being renewed.
    clock: for intervals only.
    sleep: waits.
    here: (holder, place) of this process, for tests.

  Raises:
    DecoupledError: another syncer serves the run, and is named.
  """
  clock = clock or MonotonicClock()
  holder, place = here or (f"{socket.gethostname()}:{os.getpid()}", _place())
  try:
    folder.mkdir(parents=True, exist_ok=True)
    while True:
      before = _newest(folder)
      if before is not None and before.holder != holder:
        _await_lapse(folder, before, clock, sleep, place)
      term = 1 if before is None else before.term + 1
      run_id = "" if before is None else before.run_id
      mine = Claim(
        term, holder, place, run_id, lease_s, 0, round(time.time() + lease_s, 3)
      )
      newest = _newest(folder)
      unchanged = newest is None or newest.term < term
      if unchanged and _make(_path(folder, term), _text(mine)):
        break
    lease = Lease(folder, mine, before, clock)
    lease.check()
    _forget(folder, term)
  except OSError as error:
    raise DecoupledError(
      f"the lease in {folder} cannot be written: {error.strerror}; a syncer "
      "needs it so that nobody else serves the run: choose another --workdir"
    ) from None
  return lease


def _await_lapse(
  folder: Path,
  held: Claim,
  clock: Clock,
  sleep: Callable[[float], None],
  place: str,
) -> None:
  """Returns once a claim has lapsed; raises if it is being renewed."""
  until = clock.now() + held.lease_s
  while not (held.released or _dead(held, place)) and clock.now() < until:
    sleep(_POLL_S)
    now = _newest(folder)
    if now is None or now == held:
      continue
    if now.released:
      return
    raise DecoupledError(
      f"{now.holder} serves this run under term {now.term} (its lease in "
      f"{folder} was renewed a moment ago): end that syncer first, or choose "
      "another --workdir"
    )


def _dead(held: Claim, place: str) -> bool:
  """Whether the holder is known to have ended; False where nobody knows."""
  host, _, pid = held.holder.rpartition(":")
  if held.place != place or host != socket.gethostname() or not pid.isdigit():
    return False
  try:
    os.kill(int(pid), 0)
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
  except ProcessLookupError:
    return True
  except (OSError, ValueError):
    return False
  return stat.rpartition(")")[2].split()[0] == "Z"


def _place() -> str:
  """This boot of this machine and this namespace of process ids."""
  parts = []
  with contextlib.suppress(OSError):
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts.append(boot.read_text(encoding="ascii").strip())
  with contextlib.suppress(OSError):
    parts.append(os.readlink("/proc/self/ns/pid"))
  return " ".join(parts)


def _newest(folder: Path) -> Claim | None:
  terms = [int(p.stem) for p in folder.glob("*.json") if p.stem.isdigit()]
  if not terms:
    return None
  try:
    said = json.loads(_path(folder, max(terms)).read_text(encoding="utf-8"))
    return Claim(**{**said, "term": max(terms)})
  except (OSError, ValueError, TypeError):
    return Claim(max(terms))  # held by somebody, whoever that is


def _make(path: Path, text: str) -> bool:
  """Makes a file with its content in one step; False if it exists."""
  staged = path.with_name(f".{path.name}.{os.getpid()}")
  staged.write_text(text, encoding="utf-8")
  try:
    os.link(staged, path)
  except FileExistsError:
    return False
  finally:
    staged.unlink()
  return True


def _forget(folder: Path, term: int) -> None:
  for path in folder.glob("*.json"):
    if path.stem.isdigit() and int(path.stem) < term - _KEPT:
      path.unlink(missing_ok=True)


def _path(folder: Path, term: int) -> Path:
  return folder / f"{term:09d}.json"


def _text(claim: Claim) -> str:
  return json.dumps(dataclasses.asdict(claim), indent=1) + "\n"
