"""The process of a standby: prepare, wait in the pool, take over.

It has everything that a learner has before it claims an id, and has done once
whatever a takeover does. While it waits it follows the global fragments on the
host, so that a takeover fetches only what is newer. It ends with the run.
"""

import dataclasses
import logging
from typing import NamedTuple

from decoupled import faults
from decoupled.config import Config
from decoupled.errors import Refused, Unreachable
from decoupled.launch import affinity, folders
from decoupled.launch.options import LearnerOptions, StandbyOptions
from decoupled.launch.termination import Termination
from decoupled.learner import program, reforming, taking_part
from decoupled.learner.origin import Origin, received
from decoupled.learner.taking_part import Part
from decoupled.standby import shadow
from decoupled.standby.host import HostStandby
from decoupled.standby.waiting import AGAIN_S, LOOK_S, Waiting
from decoupled.types import (
  Lines,
  Manifest,
  Offer,
  PoolWord,
  RunContract,
  Welcome,
)
from decoupled.wire.pool import PoolStream

_LOG = logging.getLogger("decoupled.standby")


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
    if options.num_processes == 1:
      return LearnerStandby(config, options, end).run()
    try:
      return HostStandby(config, options, end).run()
    except Exception as error:
      reforming.leave(error, options.name)
  finally:
    end.close()


@dataclasses.dataclass(frozen=True, eq=False)
class _Warm:
  """A part without an id."""

  part: Part

  @property
  def contract(self) -> Lines:
    return self.part.program.contract

  @property
  def lines(self) -> Lines:
    return self.part.program.lines

  @property
  def fingerprint(self) -> str:
    return self.part.program.fingerprint


class _Claimed(NamedTuple):
  """A part with an id.

  Attributes:
    part: of the learner.
    welcome: the syncer's.
    programs: compiled or loaded before that.
  """

  part: Part
  welcome: Welcome
  programs: int


class LearnerStandby(Waiting[_Warm, _Claimed]):
  """One process that can be any learner of one host."""

  _handed: Origin | None = None  # from the learner that it relieves

  def _prepare(
    self, config: Config, options: LearnerOptions, asked: RunContract
  ) -> _Warm:
    prepared = program.prepare(config, options, asked)
    self._phases.mark("compiled")
    shadow.run(prepared)
    return _Warm(
      taking_part.assemble(prepared, self._wire, prepared.initial(), self._end)
    )

  def _warm(self, made: _Warm, manifest: Manifest, lines: Lines) -> None:
    part = made.part
    part.link.warm(part.state.params, manifest, lines)
    for fragment in range(len(manifest.fragments)):
      self._follow(manifest, fragment)
    self._manifest = manifest
    self._phases.mark("warm")
    _LOG.info("ready: fingerprint %s", part.program.fingerprint)
    affinity.release()

  # --- a role ----------------------------------------------------------------

  def _forgo(self) -> None:
    self._handed = None

  def _prepare_for(
    self, made: _Warm, offer: Offer, pool: PoolStream, word: PoolWord
  ) -> None:
    """Gets what the learner that is to go can give while it trains."""
    own = (offer.learner_id, offer.prepare)
    try:
      with self._wire.take_state(own) as incoming:
        self._handed = received(incoming, made.part.program.specs.opt_state)
    except (Refused, Unreachable) as error:
      newer = pool.wait(word, AGAIN_S)
      if newer is None or newer.offer != offer:
        return  # the learner has gone meanwhile, or the plan has
      _LOG.warning("learner %d cannot be relieved: %s", offer.learner_id, error)
      super()._prepare_for(made, offer, pool, word)
      return
    newest = pool.wait(None, LOOK_S) or word
    for fragment in self._behind(newest):
      assert self._manifest is not None
      self._follow(self._manifest, fragment)
    faults.reached("standby.prepared")
    self._prepared = offer.number
    pool.say(self._standing(self._missing()))

  def _claim(self, made: _Warm, offer: Offer) -> _Claimed | None:
    part = made.part
    self._phases.mark("promoted")
    faults.reached("standby.offered")
    programs = part.program.compiles.programs
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
    return _Claimed(part, welcome, programs)

  def _play(self, claimed: _Claimed) -> int:
    """The learner's part, to its end; says what was compiled meanwhile."""
    (part, welcome, programs), phases = claimed, self._phases
    compiles = part.program.compiles
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
