"""The process of a standby: prepare, wait in the pool, take over.

It has everything that a learner has before it claims an id, and has done once
whatever a takeover does. While it waits it follows the global fragments on the
host, so that a takeover fetches only what is newer. It ends with the run.
"""

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Iterator

from decoupled import faults
from decoupled.config import Config
from decoupled.errors import DecoupledError, Refused, Unreachable
from decoupled.launch import affinity, folders
from decoupled.launch.options import LearnerOptions, StandbyOptions
from decoupled.launch.termination import Termination
from decoupled.learner import joining, program, taking_part
from decoupled.learner.origin import Origin, received
from decoupled.learner.phases import Phases
from decoupled.learner.taking_part import Part
from decoupled.standby import shadow
from decoupled.types import (
  NO_VERSION,
  Manifest,
  MergedFragment,
  Offer,
  Phase,
  PoolWord,
  RunContract,
  Standing,
  Version,
  Welcome,
)
from decoupled.wire.pool import PoolStream

_LOG = logging.getLogger("decoupled.standby")
_LOOK_S = 0.5
_FOLLOW_S = 0.5  # a fragment is followed no more often
_AGAIN_S = 0.5
_SAY_S = 30.0


def run(config: Config, options: StandbyOptions) -> int:
  """Waits for a role and plays it; returns the exit status.

  Raises:
    DecoupledError: with the line that the user reads.
  """
  faults.arm(options.name)
  folders.prepare(options.workdir)
  end = Termination(options.name, config.limits.grace_s)
  end.events = taking_part.log_of(options)
  try:
    return _Standby(config, options, end).run()
  finally:
    end.close()


class _Standby:
  """One process: what it has prepared, and what it follows."""

  def __init__(self, config: Config, options: StandbyOptions, end: Termination):
    self._config = config
    self._options = options
    self._end = end
    self._phases = Phases()
    self._wire = joining.dial(config, options)
    self._part: Part | None = None
    self._run_id = ""
    self._contract: tuple[tuple[str, str], ...] = ()
    self._manifest: Manifest | None = None
    self._followed: dict[int, MergedFragment] = {}
    self._declined = 0
    self._prepared = 0
    self._handed: Origin | None = None  # from the learner that it relieves
    self._programs = 0  # compiled or loaded when it was promoted
    self._said_at = 0.0

  def run(self) -> int:
    self._end.goodbye = self._wire.leave
    while True:
      try:
        welcome = self._wait()
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
      time.sleep(_AGAIN_S)
    return 0 if welcome is None else self._play(welcome)

  def _say_lost(self, error: Unreachable) -> None:
    now = time.monotonic()
    if now - self._said_at > _SAY_S:
      self._said_at = now
      _LOG.warning("no syncer: %s; standing by", error)

  # --- warm-up ---------------------------------------------------------------

  def _wait(self) -> Welcome | None:
    """In the pool, until an id is claimed; None: until the run has ended."""
    self._declined = self._prepared = 0  # another syncer counts anew
    self._handed = None
    asked = self._wire.contract(joining.holder())
    config, options = joining.adopt(self._config, self._options, asked)
    agreed = joining.agreed(config, options.seed or 0)
    if agreed != self._contract or asked.run_id != self._run_id:
      self._forget()
      self._contract, self._run_id = agreed, asked.run_id
    pool = self._wire.pool(self._standing(self._missing()))
    try:
      if self._part is None:
        with self._unless_ended(pool):
          self._part = self._prepare(config, options, asked)
      if self._manifest is None:
        # the run may have got its first learner meanwhile
        asked = self._wire.contract(joining.holder())
        if asked.manifest is not None:
          self._warm(self._part, asked.manifest, asked.lines)
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
          word = pool.wait(word, _LOOK_S)
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
    self._part, self._manifest = None, None
    self._followed.clear()

  def _prepare(
    self, config: Config, options: LearnerOptions, asked: RunContract
  ) -> Part:
    prepared = program.prepare(config, options, asked)
    self._phases.mark("compiled")
    shadow.run(prepared)
    return taking_part.assemble(
      prepared, self._wire, prepared.initial(), self._end
    )

  def _warm(
    self,
    part: Part,
    manifest: Manifest,
    lines: tuple[tuple[str, str], ...],
  ) -> None:
    """The device operations of every fragment, and what they bring."""
    part.link.warm(part.state.params, manifest, lines)
    for fragment in range(len(manifest.fragments)):
      self._follow(manifest, fragment)
    self._manifest = manifest
    self._phases.mark("warm")
    _LOG.info("ready: fingerprint %s", part.program.fingerprint)
    affinity.release()

  def _missing(self) -> str:
    if self._part is None:
      return "it compiles the program"
    if self._manifest is None:
      return "the run has no learner yet, hence no fragments"
    return ""

  def _standing(self, missing: str) -> Standing:
    made = None if self._part is None else self._part.program
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

  def _in_pool(self, pool: PoolStream) -> Welcome | None:
    part, look_at = self._part, 0.0
    assert part is not None
    word: PoolWord | None = None
    stale: list[int] = []
    while True:
      word = pool.wait(word, 0.0 if stale else _LOOK_S)
      if word is None:
        continue
      if word.phase is Phase.ENDED:
        print(f"run {word.run_id} has ended; {self._options.name} ends, too")
        return None
      if self._manifest is None and word.versions:
        asked = self._wire.contract(joining.holder())
        if asked.manifest is not None:
          self._warm(part, asked.manifest, asked.lines)
          pool.say(self._standing(self._missing()))
      offer = word.offer
      if offer is None or offer.number != self._prepared:
        self._handed = None  # what it had prepared for is given up
      if offer is not None and offer.number > self._declined:
        if not offer.prepare:
          welcome = self._claim(part, offer)
          if welcome is not None:
            return welcome
          pool.say(self._standing(self._missing()))
        elif offer.number > self._prepared:
          self._prepare_for(part, offer, pool, word)
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

  # --- a role ----------------------------------------------------------------

  def _prepare_for(
    self, part: Part, offer: Offer, pool: PoolStream, word: PoolWord
  ) -> None:
    """Gets what the learner that is to go can give while it trains."""
    own = (offer.learner_id, offer.prepare)
    try:
      with self._wire.take_state(own) as incoming:
        self._handed = received(incoming, part.program.specs.opt_state)
    except (Refused, Unreachable) as error:
      newer = pool.wait(word, _AGAIN_S)
      if newer is None or newer.offer != offer:
        return  # the learner has gone meanwhile, or the plan has
      _LOG.warning("learner %d cannot be relieved: %s", offer.learner_id, error)
      self._declined = offer.number
      pool.say(self._standing(self._missing()))
      return
    newest = pool.wait(None, _LOOK_S) or word
    for fragment in self._behind(newest):
      assert self._manifest is not None
      self._follow(self._manifest, fragment)
    faults.reached("standby.prepared")
    self._prepared = offer.number
    pool.say(self._standing(self._missing()))

  def _claim(self, part: Part, offer: Offer) -> Welcome | None:
    """Claims the id; None where it is somebody else's by now."""
    self._phases.mark("promoted")
    faults.reached("standby.offered")
    self._programs = part.program.compiles.programs
    part.link.hold(self._followed.values())
    try:
      welcome = taking_part.claim(part, offer.learner_id)
    except Refused as error:
      if error.reason != "claimed":
        raise
      _LOG.info("not needed after all: %s", error)
      self._declined = offer.number
      return None
    self._followed.clear()
    faults.reached("standby.claimed")
    return welcome

  def _play(self, welcome: Welcome) -> int:
    """The learner's part, to its end; says what was compiled meanwhile."""
    part, phases = self._part, self._phases
    assert part is not None
    compiles, programs = part.program.compiles, self._programs
    started_at = self._options.started_at or 0.0
    log = taking_part.log_of(self._options)
    said = 0

    def tell() -> None:
      nonlocal said
      said = compiles.programs - programs
      log.emit(
        "takeover",
        learner=welcome.learner_id,
        incarnation=welcome.incarnation,
        standby=self._options.name,
        compiles=said,
        phases=phases.since(started_at),
      )
      log.close()

    def first_step() -> None:
      phases.mark("first_step")
      tell()

    handed, self._handed = self._handed, None
    if handed is not None:
      saved = {"schedule_step": handed.schedule_step}
      handed = dataclasses.replace(handed, saved=saved)
    status = taking_part.take_part(part, welcome, phases, first_step, handed)
    if compiles.programs - programs > said:
      tell()
    return status
