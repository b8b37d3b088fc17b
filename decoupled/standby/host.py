"""A standby for hosts of learners that have several.

It takes shadow steps of the whole learner by itself, on as many devices as all
its hosts have, and lets go of them: the devices of a learner's job are only
there once an epoch forms. Its executables are those that the learners of this
user have kept on this machine (`learner.executables`).
"""

import dataclasses
import logging
from typing import Any

from decoupled import faults
from decoupled.config import Config
from decoupled.errors import Refused
from decoupled.launch import affinity
from decoupled.launch.options import LearnerOptions, StandbyOptions
from decoupled.launch.termination import Termination
from decoupled.learner import epochs, program, reforming
from decoupled.learner.program import Outline, Program
from decoupled.standby import shadow
from decoupled.standby.waiting import Waiting
from decoupled.types import Lines, Manifest, Offer, PoolWord, RunContract

_LOG = logging.getLogger("decoupled.standby")
_SEAT_S = 5.0


@dataclasses.dataclass(frozen=True, eq=False)
class _Warm:
  """What is there before a role is known.

  Attributes:
    outline: of the program.
    layout: of its state.
    contract: for which it was made.
    lines: what else shapes its executables.
    fingerprint: of both.
  """

  outline: Outline
  layout: Any
  contract: Lines
  lines: Lines
  fingerprint: str


class HostStandby(Waiting[_Warm, reforming.Host]):
  """One process that can be any host of any learner of the run."""

  def __init__(self, config: Config, options: StandbyOptions, end: Termination):
    epochs.prepare(reforming.limits_of(config))
    super().__init__(config, options, end)

  def _prepare(
    self, config: Config, options: LearnerOptions, asked: RunContract
  ) -> _Warm:
    outline = program.outline(config, options, asked)
    self._phases.mark("compiled")
    said: list[tuple[Lines, Lines, str]] = []

    def steps(made: Program) -> None:
      said.append((made.contract, made.lines, made.fingerprint))
      shadow.run(made)

    # all its hosts have as many devices as this one will
    devices = outline.hosts * options.devices_per_host
    layout = reforming.shadow(outline, steps, devices)
    return _Warm(outline, layout, *said[0])

  def _warm(self, made: _Warm, manifest: Manifest, lines: Lines) -> None:
    del lines
    self._manifest = manifest
    self._phases.mark("warm")
    affinity.release()

  def _missing(self) -> str:
    if self._made is not None and self._manifest is not None:
      folder = program.executables_folder(self._made.outline)
      if not any(folder.glob(f"*/ready-{self._made.fingerprint}")):
        return f"no learner has kept executables that fit in {folder}"
    return super()._missing()

  def _behind(self, word: PoolWord) -> list[int]:
    del word  # the other hosts have what it needs
    return []

  def _claim(self, made: _Warm, offer: Offer) -> reforming.Host | None:
    faults.reached("standby.offered")
    host = reforming.Host(
      made.outline,
      self._wire,
      self._end,
      offer.learner_id,
      offer.rank,
      layout=made.layout,
      cold=False,
      programs=made.outline.compiles.programs,
    )
    try:
      host.await_seat(_SEAT_S)
    except Refused as error:
      host.close()
      if error.reason not in ("claimed", "fenced"):
        raise
      _LOG.info("not needed after all: %s", error)
      self._declined = offer.number
      return None
    faults.reached("standby.claimed")
    return host

  def _play(self, claimed: reforming.Host) -> int:
    return claimed.run()
