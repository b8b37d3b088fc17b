"""What every standby does: prepare, wait in the pool, take what it is offered.

While it waits it says how far it is; it ends with the run.
"""

import abc
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from decoupled.config import Config
from decoupled.errors import DecoupledError, Refused, Unreachable
from decoupled.launch.options import LearnerOptions, StandbyOptions
from decoupled.launch.termination import Termination
from decoupled.learner import joining
from decoupled.learner.phases import Phases
from decoupled.types import (
  NO_VERSION,
  Lines,
  Manifest,
  MergedFragment,
  Offer,
  Phase,
  PoolWord,
  RunContract,
  Standing,
  Version,
)
from decoupled.wire.pool import PoolStream

_LOG = logging.getLogger("decoupled.standby")
LOOK_S = 0.5
_FOLLOW_S = 0.5  # a fragment is followed no more often
AGAIN_S = 0.5
_SAY_S = 30.0


class Made(Protocol):
  """What a standby has prepared, as it says so."""

  @property
  def contract(self) -> Lines: ...
  @property
  def lines(self) -> Lines: ...
  @property
  def fingerprint(self) -> str: ...


MadeT = TypeVar("MadeT", bound=Made)
ClaimedT = TypeVar("ClaimedT")


class Waiting(abc.ABC, Generic[MadeT, ClaimedT]):
  """One process: what it has prepared, and what it follows.

  Args:
    config: may lack what the run has.
    options: of this standby.
    end: of this process.
  """

  def __init__(self, config: Config, options: StandbyOptions, end: Termination):
    self._config = config
    self._options = options
    self._end = end
    self._phases = Phases()
    self._wire = joining.dial(config, options)
    self._made: MadeT | None = None
    self._run_id = ""
    self._contract: Lines = ()
    self._manifest: Manifest | None = None
    self._followed: dict[int, MergedFragment] = {}
    self._declined = 0
    self._prepared = 0  # offer of a planned swap
    self._said_at = 0.0

  def run(self) -> int:
    self._end.goodbye = self._wire.leave
    while True:
      try:
        claimed = self._wait()
        break
      except Unreachable as error:
        self._say_lost(error)
      except Refused as error:
        if error.reason == "ended":
          print(f"nothing to stand by for: {error}")
          return 0
        if error.reason != "fenced":
          raise
        _LOG.warning("%s; entering it again", error)
      time.sleep(AGAIN_S)
    return 0 if claimed is None else self._play(claimed)

  def _say_lost(self, error: Unreachable) -> None:
    now = time.monotonic()
    if now - self._said_at > _SAY_S:
      self._said_at = now
      _LOG.warning("no syncer: %s; standing by", error)

  # --- warm-up ---------------------------------------------------------------

  def _wait(self) -> ClaimedT | None:
    """In the pool, until an id is claimed; None: until the run has ended."""
    self._declined = self._prepared = 0  # another syncer counts anew
    self._forgo()
    asked = self._wire.contract(joining.holder())
    config, options = joining.adopt(self._config, self._options, asked)
    agreed = joining.agreed(config, options.seed or 0)
    if agreed != self._contract or asked.run_id != self._run_id:
      self._forget()
      self._contract, self._run_id = agreed, asked.run_id
    pool = self._wire.pool(self._standing(self._missing()))
    try:
      if self._made is None:
        with self._unless_ended(pool):
          self._made = self._prepare(config, options, asked)
      if self._manifest is None:
        # the run may have got its first learner meanwhile
        asked = self._wire.contract(joining.holder())
        if asked.manifest is not None:
          self._warm(self._made, asked.manifest, asked.lines)
      pool.say(self._standing(self._missing()))
      return self._in_pool(pool)
    finally:
      pool.close()

  @contextlib.contextmanager
  def _unless_ended(self, pool: PoolStream) -> Iterator[None]:
    """Ends the process with the run, also while its main thread compiles."""
    over = threading.Event()

    def watch() -> None:
      word: PoolWord | None = None
      with contextlib.suppress(DecoupledError):
        while not over.is_set():
          word = pool.wait(word, LOOK_S)
          if word and word.phase is Phase.ENDED and not over.is_set():
            print(f"run {word.run_id} has ended", flush=True)
            os._exit(0)  # there is nothing to lose

    threading.Thread(target=watch, name="pool-watch", daemon=True).start()
    try:
      yield
    finally:
      over.set()

  def _forget(self) -> None:
    """Another run, or another contract: all is made anew."""
    self._made, self._manifest = None, None
    self._followed.clear()

  @abc.abstractmethod
  def _prepare(
    self, config: Config, options: LearnerOptions, asked: RunContract
  ) -> MadeT:
    """Everything that takes long, short of the fragments."""

  @abc.abstractmethod
  def _warm(self, made: MadeT, manifest: Manifest, lines: Lines) -> None:
    """What needs to know how the run cuts its parameters."""

  def _forgo(self) -> None:
    """What it had prepared for a planned swap is given up."""

  def _prepare_for(
    self, made: MadeT, offer: Offer, pool: PoolStream, word: PoolWord
  ) -> None:
    """Gets ready to relieve a learner that trains; declines, unless it can."""
    self._declined = offer.number
    pool.say(self._standing(self._missing()))

  @abc.abstractmethod
  def _claim(self, made: MadeT, offer: Offer) -> ClaimedT | None:
    """Claims what is offered; None where it is somebody else's by now."""

  @abc.abstractmethod
  def _play(self, claimed: ClaimedT) -> int:
    """The part that was claimed, to its end; returns the exit status."""

  def _missing(self) -> str:
    if self._made is None:
      return "it compiles the program"
    if self._manifest is None:
      return "the run has no learner yet, hence no fragments"
    return ""

  def _standing(self, missing: str) -> Standing:
    made = self._made
    return Standing(
      name=self._options.name,
      holder=joining.holder(),
      run_id=self._run_id,
      contract=self._contract if made is None else made.contract,
      program=() if made is None else made.lines,
      fingerprint="" if made is None else made.fingerprint,
      missing=missing,
      declined=self._declined,
      prepared=self._prepared,
    )

  # --- waiting ---------------------------------------------------------------

  def _in_pool(self, pool: PoolStream) -> ClaimedT | None:
    made, look_at = self._made, 0.0
    assert made is not None
    word: PoolWord | None = None
    stale: list[int] = []
    missing = self._missing()
    while True:
      word = pool.wait(word, 0.0 if stale else LOOK_S)
      if missing != (missing := self._missing()):
        pool.say(self._standing(missing))
      if word is None:
        continue
      if word.phase is Phase.ENDED:
        print(f"run {word.run_id} has ended; {self._options.name} ends, too")
        return None
      if self._manifest is None and word.versions:
        asked = self._wire.contract(joining.holder())
        if asked.manifest is not None:
          self._warm(made, asked.manifest, asked.lines)
          pool.say(self._standing(self._missing()))
      offer = word.offer
      if offer is None or offer.number != self._prepared:
        self._forgo()
      if offer is not None and offer.number > self._declined:
        if not offer.prepare:
          claimed = self._claim(made, offer)
          if claimed is not None:
            return claimed
          pool.say(self._standing(self._missing()))
        elif offer.number > self._prepared:
          self._prepare_for(made, offer, pool, word)
          continue
      now = time.monotonic()
      if not stale and now >= look_at:
        stale, look_at = self._behind(word), now + _FOLLOW_S
      if stale and self._manifest is not None:
        self._follow(self._manifest, stale.pop())

  def _behind(self, word: PoolWord) -> list[int]:
    """The fragments of which there is a newer version."""
    if self._manifest is None:
      return []
    return [
      p for p, version in enumerate(word.versions) if version > self._version(p)
    ]

  def _version(self, fragment: int) -> Version:
    held = self._followed.get(fragment)
    return NO_VERSION if held is None else held.version

  def _follow(self, manifest: Manifest, fragment: int) -> None:
    """Gets the newest version of a fragment; a failure is tried again later."""
    held = self._followed.get(fragment)
    try:
      merged = self._wire.follow(
        manifest,
        fragment,
        self._version(fragment),
        None if held is None else held.arrays,
      )
    except (Refused, Unreachable) as error:
      _LOG.info("fragment %d is not followed: %s", fragment, error)
      return
    if merged.version > self._version(fragment):
      self._followed[fragment] = merged
