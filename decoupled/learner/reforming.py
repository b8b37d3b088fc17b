"""One host of a learner of several, from epoch to epoch.

The hosts of a learner are one `jax.distributed` job, which breaks with the
first of them that dies. Those that live keep their processes, and with them the
corpus, the connections and copies of the state:

  1. sit: take the seat of a rank, and wait until every seat is taken;
  2. meet: the epoch forms, with whoever has the dead rank's id now;
  3. build: executables are loaded, not compiled;
  4. recover: the newest copy of the state that the hosts agree on;
  5. train, as any learner does (`taking_part`), under a new incarnation;
  6. when the epoch breaks: let go of every array, tear down, and begin again.

The syncer says who sits where (`syncer.seats`); a host that it has given up is
refused, and ends.
"""

import contextlib
import dataclasses
import gc
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from decoupled import faults
from decoupled.config import Config
from decoupled.errors import (
  ConfigError,
  DecoupledError,
  Refused,
  Unreachable,
)
from decoupled.launch.termination import Termination
from decoupled.learner import (
  buddies,
  epochs,
  joining,
  program,
  rendezvous,
  taking_part,
)
from decoupled.learner.buddy_wire import BuddyClient, BuddyServer
from decoupled.learner.keeping import Keeper
from decoupled.learner.loop import Trained
from decoupled.learner.phases import Phases
from decoupled.learner.program import Outline, Program
from decoupled.link.boundary import Resumed
from decoupled.types import Phase, SeatWord, Sitting, Version
from decoupled.wire import address as addresses
from decoupled.wire import client, credentials, tls
from decoupled.wire.address import Address

_LOG = logging.getLogger("decoupled.learner")

_LOOK_S = 0.2
_SAY_S = 10.0
_LET_GO_S = 0.05
_OVER = ("old_epoch", "claimed", "incomplete", "fenced")
_BEATS = 10  # within the limit of a collective


def limits_of(config: Config) -> epochs.EpochLimits:
  """How long an epoch may wait for a rank."""
  limits = config.limits
  return epochs.EpochLimits(limits.reform_s, int(limits.collective_s))


class Host:
  """One process that is a rank of a learner.

  Args:
    outline: what needs no device.
    wire: to the syncer; stays open from epoch to epoch.
    end: of this process.
    learner_id: whose host it is.
    rank: which of its hosts.
    layout: of the state, where it is known already.
    cold: whether the process was started for this seat.
    programs: compiled or loaded when it was given the seat.

  Raises:
    ConfigError: the coordinator is not named.
  """

  def __init__(
    self,
    outline: Outline,
    wire: client.GrpcLearnerWire,
    end: Termination,
    learner_id: int,
    rank: int,
    *,
    layout: Any = None,
    cold: bool = True,
    programs: int = 0,
  ):
    options = outline.options
    if not options.coordinator_address:
      raise ConfigError(
        f"--num_processes={outline.hosts} needs --coordinator_address: the "
        "address of `decoupled coordinator`, or @FILE that it writes"
      )
    options = dataclasses.replace(
      options, learner_id=learner_id, process_id=rank
    )
    self._outline = dataclasses.replace(outline, options=options)
    self._wire, self._end = wire, end
    self._learner_id, self._rank = learner_id, rank
    self._layout, self._cold, self._programs = layout, cold, programs
    self._limits = limits_of(outline.config)
    self._token = (
      credentials.read_token(options.token_file) if options.token_file else ""
    )
    self._tls = tls.client(options.tls_ca) if options.tls_ca else None
    self._memory = buddies.Memory()
    # copies stay on this machine, and nobody puts any here: they are fetched
    self._server = BuddyServer(
      self._memory, learner_id, self._token, Address("127.0.0.1", 0), 0
    )
    self._epoch = 0
    self._phases = Phases()
    self._trained = False  # in an epoch before
    self._status = 0
    self._seat = wire.seat(
      Sitting(
        learner_id=learner_id,
        rank=rank,
        hosts=outline.hosts,
        holder=joining.holder(),
        address=str(self._server.address),
      ),
      self._limits.collective_s / _BEATS,
    )

  def await_seat(self, limit_s: float) -> None:
    """Returns once the seat is this host's.

    Raises:
      Refused: `claimed`: it is somebody else's.
      Unreachable: no syncer says so within the limit.
    """
    holder = joining.holder()
    found = self._seat.wait(
      lambda word: word.seats[self._rank].holder == holder, limit_s
    )
    if found is None:
      raise Unreachable(
        f"no syncer has given host {self._rank} of learner {self._learner_id} "
        f"its seat within {limit_s:g} s"
      )

  def run(self) -> int:
    """Trains to the end of the run; returns the exit status.

    Raises:
      DecoupledError: with the line that the user reads.
    """
    try:
      while True:
        word = self._form()
        if word is None:
          return self._end.status
        broken = self._try(word)
        if not broken:
          return self._status
        _LOG.warning(
          "epoch %d of learner %d broke under host %d: %s",
          *(self._epoch, self._learner_id, self._rank, broken),
        )
        epochs.tear_down()
        self._phases.mark("torn_down")
    finally:
      self.close()

  def close(self) -> None:
    """Gives the seat up."""
    self._seat.close()
    self._server.close()

  def _try(self, word: SeatWord) -> str:
    """Trains in an epoch; "" at the end, else what broke it.

    Whatever lies on the devices is gone when it returns.
    """
    try:
      self._status = self._train(word)
      return ""
    except Exception as error:
      if isinstance(error, Refused) and error.reason == "ended":
        _LOG.info("%s", error)
        self._status = 0
        return ""
      if not epochs.lost_peer(error):
        raise
      self._phases = Phases()
      self._phases.mark("noticed")
      sitting = dataclasses.replace(
        self._seat.sitting, left=word.epoch, ready=0
      )
      self._seat.say(sitting)
      said = " ".join(str(error).split())[:300]
      _forget_frames(error)
    self._programs = self._outline.compiles.programs
    self._phases.mark("let_go")
    return said

  # --- 1: seats --------------------------------------------------------------

  def _form(self) -> SeatWord | None:
    """Waits for a membership that every host of it is ready for.

    Returns:
      None where the run has ended meanwhile, or this process is to end.

    Raises:
      Refused: the seat is somebody else's, or the learner begins anew.
      Unreachable: nobody has come for the others' seats.
    """
    limits = self._outline.config.limits
    deadline = time.monotonic() + limits.seat_s + 2 * limits.reform_s
    said_at = time.monotonic()
    ready = 0
    while not self._end.requested.is_set():
      word = self._seat.wait(self._wanted, _LOOK_S)
      now = time.monotonic()
      if word is not None:
        if word.phase is Phase.ENDED:
          return None
        formed = word.state in ("committed", "seated")
        if formed and word.epoch == ready:
          self._phases.mark("decided")
          return word
        if word.state == "preparing" and word.epoch > max(ready, self._epoch):
          ready = word.epoch
          sitting = self._seat.sitting
          self._seat.say(
            dataclasses.replace(sitting, ready=ready, copies=self._held())
          )
      if now - said_at > _SAY_S:
        said_at = now
        known = self._seat.word
        why = "no word from the syncer" if known is None else known.why
        _LOG.warning("waiting for the learner's other hosts: %s", why)
      if now > deadline:
        known = self._seat.word
        raise Unreachable(
          f"the hosts of learner {self._learner_id} did not meet: "
          f"{known.why if known else 'no word from the syncer'}"
        )
    return None

  def _wanted(self, word: SeatWord) -> bool:
    """Whether a word is worth waking up for."""
    if word.phase is Phase.ENDED:
      return True
    ready = self._seat.sitting.ready
    if word.state == "preparing":
      return word.epoch > max(ready, self._epoch)
    return word.epoch == ready and word.state in ("committed", "seated")

  def _held(self) -> tuple[tuple[int, int], ...]:
    """(epoch, step) of this host's own copies."""
    steps = self._memory.held().get(self._rank, ())
    copies = [self._memory.get(self._rank, step) for step in steps]
    return tuple((c.epoch, c.step) for c in copies if c is not None)

  # --- 2 to 5: an epoch ------------------------------------------------------

  def _train(self, word: SeatWord) -> int:
    self._epoch, phases = word.epoch, self._phases
    options = self._outline.options
    with _over_if(*_OVER):
      rendezvous.meet(
        options.coordinator_address,
        self._token,
        self._learner_id,
        word.epoch,
        self._outline.hosts,
        self._rank,
        joining.holder(),
        self._limits,
        self._tls,
      )
    self._seat.say(dataclasses.replace(self._seat.sitting, epoch=word.epoch))
    phases.mark("connected")
    faults.reached("host.connected")
    made = program.build(self._outline, self._layout, keeps=True)
    self._layout = made.layout
    phases.mark("executable_loaded")
    phases.mark("compiled")
    copy = self._recovered(word, made)
    resumed, state, source = None, None, "fresh"
    if copy is not None:
      resumed = _resumed_of(copy, self._outline.config.exchange.P)
      state, source = buddies.place(made.specs, [copy]), "survivor"
    begins_at = 0 if copy is None else copy.step
    part = taking_part.assemble(
      made,
      self._wire,
      made.initial() if state is None else state,
      self._end,
      resumed=resumed,
      epoch=word.epoch,
    )
    del state
    every = self._outline.config.local.copy_every
    keeper = Keeper(
      self._memory,
      self._rank,
      word.epoch,
      every,
      made.copy,
      lambda copy: None,
    )
    first, copies = True, _replicated(made)

    def after_step(now: Trained) -> None:
      nonlocal first
      if first:
        first = False
        self._stepped(part, made, word, begins_at, source)
      if copies and now.step % every == 0:
        keeper.after_step(now.step, now.state, _counters(part, now))
      self._check(word)

    try:
      with _over_if(*_OVER):
        welcome = taking_part.claim(part, self._learner_id)
      # what has to be compiled is compiled by now, sooner here than there
      limit_s = self._limits.connect_s
      epochs.together("begin", limit_s, lambda: self._check(word))
      entries = () if copy is None else _entries_of(copy)
      place = None if copy is None else _position_of(copy)
      return taking_part.take_part(
        part,
        welcome,
        phases,
        beginning=None
        if copy is None
        else taking_part.Beginning(
          source, copy.step, copy.counters["tokens"],
          copy.counters["schedule_step"], place or (0, 0), entries,
        ),
        after_step=after_step,
      )  # fmt: skip
    finally:
      keeper.close(_LET_GO_S)
      part.link.abandon(_LET_GO_S)

  def _check(self, word: SeatWord) -> None:
    """Raises Lost where a newer epoch than that is about to form."""
    newest = self._seat.word
    if newest is None or newest.epoch <= word.epoch:
      return
    if newest.state != "short":  # else there is nobody to form one with
      raise epochs.Lost(newest.why)

  def _stepped(
    self,
    part: taking_part.Part,
    made: Program,
    word: SeatWord,
    step: int,
    source: str,
  ) -> None:
    """After the first step of an epoch: it needs its service no more."""
    self._phases.mark("first_step")
    epochs.settle()
    sitting = self._seat.sitting
    self._seat.say(dataclasses.replace(sitting, stepped=word.epoch))
    if made.kept is not None:
      (made.kept.folder / f"ready-{made.fingerprint}").touch()
    welcome = part.link.welcome
    if self._trained or step or not self._cold:
      log = taking_part.log_of(self._outline.options)
      log.emit(
        "reformed",
        learner=welcome.learner_id,
        incarnation=welcome.incarnation,
        host=self._rank,
        epoch=word.epoch,
        step=step,
        compiles=self._outline.compiles.programs - self._programs,
        cold=self._cold,
        state_source=source,
        phases=self._phases.since(self._outline.options.started_at or 0.0),
      )
      log.close()
    self._trained, self._cold = True, False

  # --- 4: state --------------------------------------------------------------

  def _recovered(
    self, word: SeatWord, made: Program
  ) -> buddies.HostCopy | None:
    """The copy to go on from, in this host's memory; None: there is none.

    Raises:
      epochs.Lost: whoever has it is gone.
    """
    if not _replicated(made):
      return None
    held = {
      rank: [epoch << 32 | step for epoch, step in seat.copies]
      for rank, seat in enumerate(word.seats)
    }
    found = buddies.newest_replicated(held, self._outline.hosts)
    if found is None:
      return None
    epoch, step = divmod(found.step, 1 << 32)
    self._memory.drop_after(step)
    giver = found.sources[self._rank]
    own = self._memory.get(self._rank, step)
    if giver == self._rank and own is not None and own.epoch == epoch:
      return own
    copy = self._fetched(word.seats[giver].address, giver, step, made)
    if copy.epoch != epoch:
      raise epochs.Lost(f"host {giver} holds another copy of step {step}")
    copy = dataclasses.replace(copy, owner=self._rank)
    self._memory.keep(copy)
    return copy

  def _fetched(
    self, where: str, giver: int, step: int, made: Program
  ) -> buddies.HostCopy:
    leaves = jax.tree.leaves(made.specs)
    most = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in leaves)
    limit_s = self._outline.config.limits.transfer_s
    try:
      peer = BuddyClient(
        addresses.parse(where), self._learner_id, self._token, limit_s, most
      )
      try:
        return peer.get(giver, step)
      finally:
        peer.close()
    except (Refused, Unreachable) as error:
      raise epochs.Lost(f"no copy from host {giver}: {error}") from None


@contextlib.contextmanager
def _over_if(*reasons: str) -> Iterator[None]:
  """Some refusals only say that the epoch is over: another one will form."""
  try:
    yield
  except Refused as error:
    if error.reason not in reasons:
      raise
    raise epochs.Lost(str(error)) from None


def _forget_frames(error: BaseException | None) -> None:
  """Lets go of whatever an error, and what led to it, holds."""
  while error is not None:
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    error = error.__context__


def leave(error: Exception, role: str) -> NoReturn:
  """Ends this process at once: its learner's other hosts may be gone.

  To go in order would mean to wait for them.
  """
  if not isinstance(error, DecoupledError):
    _LOG.error("a host of several failed", exc_info=error)
  first = (str(error).splitlines() or [type(error).__name__])[0]
  print(
    f"decoupled learner: {role} leaves: {first}", file=sys.stderr, flush=True
  )
  logging.shutdown()
  os._exit(1)


def _replicated(made: Program) -> bool:
  """Whether every host holds the whole state."""
  return all(
    x.sharding.is_fully_replicated for x in jax.tree.leaves(made.specs)
  )


# --- what a copy says beside its arrays --------------------------------------


def _counters(part: taking_part.Part, now: Trained) -> dict[str, int]:
  at = part.link.resumable(now.step, now.tokens)
  counters = {
    "tokens": now.tokens,
    "schedule_step": now.schedule_step,
    "common_step": at.common_step,
    "place": now.position[0],
    "offset": now.position[1],
  }
  rows = zip(at.held, at.step_at, at.tokens_at, strict=True)
  for p, (version, step_at, tokens_at) in enumerate(rows):
    counters |= {
      f"term.{p}": version.term,
      f"round.{p}": version.round,
      f"step_at.{p}": step_at,
      f"tokens_at.{p}": tokens_at,
    }
  if part.shared is not None:
    for i, entry in enumerate(part.shared.remaining(now.position)):
      counters[f"next_place.{i}"], counters[f"next_offset.{i}"] = entry
  return counters


def _resumed_of(copy: buddies.HostCopy, fragments: int) -> Resumed:
  c, every = copy.counters, range(fragments)
  return Resumed(
    step=copy.step,
    tokens=c["tokens"],
    held=tuple(Version(c[f"term.{p}"], c[f"round.{p}"]) for p in every),
    step_at=tuple(c[f"step_at.{p}"] for p in every),
    tokens_at=tuple(c[f"tokens_at.{p}"] for p in every),
    common_step=c["common_step"],
  )


def _position_of(copy: buddies.HostCopy) -> tuple[int, int]:
  return copy.counters["place"], copy.counters["offset"]


def _entries_of(copy: buddies.HostCopy) -> tuple[tuple[int, int], ...]:
  """The units to go on with, first the one that was begun."""
  c: Mapping[str, int] = copy.counters
  entries: list[tuple[int, int]] = []
  while f"next_place.{len(entries)}" in c:
    i = len(entries)
    entries.append((c[f"next_place.{i}"], c[f"next_offset.{i}"]))
  return tuple(entries)


def shadow(
  outline: Outline, steps: Callable[[Program], None], devices: int
) -> Any:
  """Takes shadow steps of the whole learner on this machine; see `standby`.

  Args:
    outline: of the program.
    steps: what to do with it.
    devices: of all its hosts.

  Returns:
    The layout of the state; nothing of it is left on any device.
  """
  program.simulate(devices)
  made = program.build(outline)
  layout = made.layout
  steps(made)
  del made
  gc.collect()
  epochs.tear_down()
  program.simulate(outline.options.devices_per_host)
  return layout
