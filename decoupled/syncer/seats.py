"""The hosts of one learner as a transaction: who sits where, in which epoch.

Pure logic on times that it is given. A learner of several hosts has a seat for
every rank. When a host is lost, or is to be replaced, its seat goes to another
process under a higher epoch:

    seated -> prepare -> ready -> commit -> seated

`prepare`: the new membership is proposed, with a fresh epoch; every host of it
says *ready* once it has left the old epoch (or, a standby, once it is warm) and
is about to connect. Once all are, the syncer *commits*: from here the new epoch
is the only one, and the old host is a zombie whatever it says. `done`: every
host has finished a step in it.

Until the commit a swap can be called off, where the old host lives after all:
then the old members form once more, under an epoch that is higher still, since
survivors may have left the old one. Where something else is lost, or time is
up, a new membership is prepared with whoever is there; with nobody to sit on an
empty seat the learner waits for one, and after that limit *recovers*: it gives
up its hosts' memory and starts from what donors and snapshots hold.

So a seat has exactly one owner at any time, named by (rank, epoch, holder); a
message of another epoch is refused as `fenced`.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping

from decoupled.errors import Refused


class State(enum.StrEnum):
  """Where a learner's membership is."""

  SEATED = "seated"  # every seat is taken and the epoch has formed
  PREPARING = "preparing"  # a membership is proposed; not all are ready
  COMMITTED = "committed"  # it is decided; not all have finished a step
  SHORT = "short"  # a seat has nobody to take it
  RECOVERING = "recovering"  # given up: the learner starts from elsewhere


@dataclasses.dataclass(frozen=True)
class SeatLimits:
  """How long a swap may take.

  Attributes:
    prepare_s: until all hosts of a proposed membership are ready.
    commit_s: until all have finished a step in it.
    short_s: until somebody is there for an empty seat.
    attempts: memberships that are tried before the learner recovers.
  """

  prepare_s: float = 30.0
  commit_s: float = 60.0
  short_s: float = 120.0
  attempts: int = 5


@dataclasses.dataclass(frozen=True)
class Membership:
  """Who sits where.

  Attributes:
    epoch: its number; the higher one wins.
    holders: per rank `host:pid`, "" for an empty seat.
    fresh: ranks whose holder has no state of this learner.
  """

  epoch: int
  holders: tuple[str, ...]
  fresh: frozenset[int] = frozenset()


class Seats:
  """The seats of one learner.

  Args:
    hosts: how many.
    limits: how long a swap may take.
    epoch: the highest number that the learner has had.

  Attributes:
    state: where its membership is.
    proposed: the membership that is being formed, or that sits.
    why: what is happening, in a sentence.
  """

  def __init__(self, hosts: int, limits: SeatLimits, epoch: int = 0):
    if hosts < 1:
      raise ValueError(f"a learner of {hosts} hosts")
    self.hosts = hosts
    self.state = State.SHORT
    self.why = "no host has come yet"
    self.proposed = Membership(epoch, ("",) * hosts, frozenset(range(hosts)))
    self._limits = limits
    self._seated: Membership | None = None  # the last one that finished a step
    self._ready: set[int] = set()
    self._done: set[int] = set()
    self._since = 0.0
    self._attempts = 0
    self._taken = [0] * hosts  # since which epoch each seat is its holder's
    # holders that are to leave when the swap commits: may still train
    self._leaving: dict[int, str] = {}
    self._broken: set[int] = set()  # under whom the epoch has broken

  @property
  def epoch(self) -> int:
    return self.proposed.epoch

  @property
  def empty(self) -> tuple[int, ...]:
    """Ranks that nobody sits on: what standbys are wanted for."""
    return tuple(r for r, h in enumerate(self.proposed.holders) if not h)

  @property
  def broken(self) -> frozenset[int]:
    """Ranks that have left the epoch, since a peer was lost."""
    return frozenset(self._broken)

  @property
  def formed(self) -> bool:
    """Whether a membership has ever sat, and its state is not given up."""
    return self._seated is not None

  def owner(self, rank: int) -> str:
    """The one process that may act as this rank; "" for nobody.

    Until a planned swap commits that is the old host, from then the new one.
    """
    if self.state is State.PREPARING and rank in self._leaving:
      return self._leaving[rank]
    return self.proposed.holders[rank]

  def wake_at(self) -> float:
    """When `tick` has something to do next, infinity for never."""
    limit_s = self._limit_s()
    return float("inf") if limit_s is None else self._since + limit_s

  # --- who comes and goes --------------------------------------------------

  def take(self, now: float, rank: int, holder: str, fresh: bool) -> Membership:
    """A process sits down on an empty seat.

    Args:
      now: the time.
      rank: which seat.
      holder: `host:pid`.
      fresh: it has no state of this learner: it is to be given one.

    Returns:
      The membership that it is now part of; it forms once all seats are taken.

    Raises:
      Refused: `claimed`: somebody sits there, or was given the seat.
    """
    self._check_rank(rank)
    seated = self.proposed.holders[rank]
    if seated == holder:
      return self.proposed
    if seated or self.state is State.RECOVERING:
      raise Refused(
        "claimed",
        f"host {rank} is {seated or 'given up'} in epoch {self.epoch}, so "
        f"{holder} cannot be it: start it as a standby",
      )
    if holder in self.proposed.holders:
      raise Refused(
        "claimed",
        f"{holder} is host {self.proposed.holders.index(holder)} already and "
        f"cannot be host {rank}, too",
      )
    self._propose(now, {rank: holder}, fresh={rank} if fresh else ())
    return self.proposed

  def resume(self, now: float, rank: int, holder: str, epoch: int) -> None:
    """After the syncer's own restart: a host sits on in an epoch that formed.

    Once all do, the membership sits as before, and nobody has noticed.

    Raises:
      Refused: `claimed`; `fenced`: of another epoch than hosts before it.
    """
    self._check_rank(rank)
    if self.proposed.holders[rank] not in ("", holder):
      raise Refused(
        "claimed", f"host {rank} is {self.proposed.holders[rank]} already"
      )
    if epoch < self.epoch or self._seated is not None:
      raise Refused(
        "fenced", f"{holder} is of epoch {epoch}, epoch {self.epoch} is known"
      )
    holders = list(self.proposed.holders)
    if epoch > self.epoch:  # whoever sat before was of an older one
      holders = [""] * self.hosts
    holders[rank] = holder
    self._taken[rank] = epoch
    blank = frozenset(r for r, h in enumerate(holders) if not h)
    self.proposed = Membership(epoch, tuple(holders), blank)
    self.why = f"epoch {epoch} goes on"
    if not blank:
      self.state, self._since = State.SEATED, now
      self._seated, self.why = self.proposed, ""

  def left(self, now: float, rank: int, holder: str, epoch: int) -> bool:
    """The epoch has broken under a host, whoever was lost.

    Returns:
      Whether all have said so, and none is lost: the same hosts form again.
    """
    self._check_rank(rank)
    formed = self.state in (State.COMMITTED, State.SEATED)
    if not formed or epoch != self.epoch:
      return False
    if self.proposed.holders[rank] != holder:
      return False
    self._broken.add(rank)
    if len(self._broken) < self.hosts:
      return False
    self._propose(now, {}, why=f"epoch {epoch} has broken")
    return True

  def lost(self, now: float, rank: int, holder: str, epoch: int) -> bool:
    """A host has died, frozen or been cut off: its seat is empty.

    Args:
      now: the time.
      rank: which.
      holder: who it was; ignored unless the seat is his.
      epoch: the epoch it was lost in; ignored if it has sat down since.

    Returns:
      Whether it made a difference. A lost host that was to leave anyway makes
      none to the new membership.
    """
    self._check_rank(rank)
    if self._leaving.get(rank) == holder:
      del self._leaving[rank]  # an abort cannot return to it any more
      return True
    if self.proposed.holders[rank] != holder or epoch < self._taken[rank]:
      return False
    self._propose(now, {rank: ""}, why=f"host {rank} ({holder}) is lost")
    return True

  def swap(self, now: float, rank: int, holder: str) -> Membership:
    """A planned swap: `holder`, warm, is to take the seat of who sits there.

    The old host trains on until all are ready, and owns the seat until then.

    Raises:
      Refused: `busy`: a membership is being formed already; `claimed`.
    """
    self._check_rank(rank)
    if self.state is not State.SEATED:
      raise Refused(
        "busy",
        f"host {rank} cannot be swapped while its learner is {self.state}: "
        f"{self.why}",
      )
    if holder in self.proposed.holders:
      raise Refused("claimed", f"{holder} has a seat of this learner already")
    self._leaving = {rank: self.proposed.holders[rank]}
    self._propose(
      now, {rank: holder}, fresh={rank}, why=f"host {rank} is swapped"
    )
    return self.proposed

  # --- what members say ----------------------------------------------------

  def ready(self, now: float, rank: int, holder: str, epoch: int) -> bool:
    """A host is about to connect to the proposed epoch.

    Returns:
      Whether all are: then it is committed.

    Raises:
      Refused: `fenced`: of another epoch, or not the holder of that seat.
    """
    self._check(rank, holder, epoch)
    if self.state is not State.PREPARING:
      return self.state is State.COMMITTED or self.state is State.SEATED
    self._ready.add(rank)
    if len(self._ready) < self.hosts:
      return False
    self.state, self._since = State.COMMITTED, now
    self._leaving.clear()
    self._done.clear()
    self.why = f"epoch {epoch} is forming"
    return True

  def stepped(self, now: float, rank: int, holder: str, epoch: int) -> bool:
    """A host has finished a step in the epoch.

    Returns:
      Whether all have: the membership sits.

    Raises:
      Refused: `fenced`; `busy`: the epoch is not committed.
    """
    self._check(rank, holder, epoch)
    if self.state is State.SEATED:
      return True
    if self.state is not State.COMMITTED:
      raise Refused(
        "busy", f"epoch {epoch} is {self.state}: nobody may train in it yet"
      )
    self._done.add(rank)
    if len(self._done) < self.hosts:
      return False
    self.proposed = dataclasses.replace(self.proposed, fresh=frozenset())
    self.state, self._since = State.SEATED, now
    self._seated, self._attempts = self.proposed, 0
    self.why = ""
    return True

  def abort(self, now: float, why: str) -> Membership:
    """Calls a swap off: the old members form again, if they all live.

    Raises:
      Refused: `committed`: too late; `gone`: an old host is lost, or nothing
        is being prepared.
    """
    if self.state is State.COMMITTED:
      raise Refused(
        "committed", f"epoch {self.epoch} is decided: it can only go forward"
      )
    if self.state is not State.PREPARING or not self._leaving:
      raise Refused(
        "gone", f"there is no old membership to return to: {self.why}"
      )
    back, self._leaving = dict(self._leaving), {}
    self._propose(now, back, why=f"called off: {why}")
    return self.proposed

  def tick(self, now: float) -> None:
    """Ends what has taken too long."""
    limit_s = self._limit_s()
    if limit_s is None or now < self._since + limit_s:
      return
    if self.state is State.SHORT:
      self._recover(now, f"{self.why}, for {limit_s:g} s")
      return
    said = self._ready if self.state is State.PREPARING else self._done
    late = [rank for rank in range(self.hosts) if rank not in said]
    text = f"host {', '.join(map(str, late))} was not {_SAYS[self.state]}"
    text += f" within {limit_s:g} s"
    newcomers = all(rank in self._leaving for rank in late)
    if self.state is State.PREPARING and self._leaving and newcomers:
      self.abort(now, text)
      return
    self._leaving.clear()
    self._propose(now, dict.fromkeys(late, ""), why=text)

  def recovered(self, now: float, holders: Mapping[int, str]) -> Membership:
    """After a fall back: the learner's hosts begin anew, none with a state.

    Raises:
      Refused: `busy`: it has not given up.
    """
    if self.state is not State.RECOVERING:
      raise Refused("busy", f"the learner is {self.state}: {self.why}")
    self._attempts = 0
    self.state = State.SHORT
    given = {rank: holders.get(rank, "") for rank in range(self.hosts)}
    self._propose(now, given, fresh=range(self.hosts), why="begins anew")
    return self.proposed

  # --- pieces --------------------------------------------------------------

  def _propose(
    self,
    now: float,
    changed: Mapping[int, str],
    fresh: Iterable[int] = (),
    why: str = "",
  ) -> None:
    """The next membership: of a new epoch, so that nothing old fits it."""
    holders = list(self.proposed.holders)
    blank = set(self.proposed.fresh) | set(fresh)
    for rank, holder in changed.items():
      holders[rank] = holder
      self._taken[rank] = self.epoch + 1
      if not holder:
        blank.add(rank)  # whoever comes has to say that it has a state
      elif rank not in set(fresh):
        blank.discard(rank)
    was = self.state
    self.proposed = Membership(self.epoch + 1, tuple(holders), frozenset(blank))
    self._ready.clear()
    self._done.clear()
    self._broken.clear()
    empty = self.empty
    self.state = State.SHORT if empty else State.PREPARING
    if empty:
      nobody = f"nobody is there for host {', '.join(map(str, empty))}"
      self.why = f"{why}; {nobody}" if why else nobody
    else:
      self.why = why or f"epoch {self.epoch} is being prepared"
    # A learner that stays short has been so since the first seat was empty.
    if not (was is State.SHORT and self.state is State.SHORT):
      self._since = now
    if self.state is State.PREPARING:
      self._attempts += 1
      if self._attempts > self._limits.attempts:
        self._recover(now, f"{self._limits.attempts} epochs have not formed")
    if len(self.proposed.fresh) == self.hosts and self._seated is not None:
      self._recover(now, "no host is left that holds the learner's state")

  def _recover(self, now: float, why: str) -> None:
    self.state, self._since = State.RECOVERING, now
    self.why = f"{why}: the learner starts from a donor or a snapshot"
    self._seated = None
    self._leaving.clear()

  def _limit_s(self) -> float | None:
    return {
      State.PREPARING: self._limits.prepare_s,
      State.COMMITTED: self._limits.commit_s,
      State.SHORT: self._limits.short_s if self._seated is not None else None,
    }.get(self.state)

  def _check_rank(self, rank: int) -> None:
    if not 0 <= rank < self.hosts:
      raise Refused(
        "malformed", f"host {rank} of a learner of {self.hosts} hosts"
      )

  def _check(self, rank: int, holder: str, epoch: int) -> None:
    self._check_rank(rank)
    if epoch != self.epoch or self.proposed.holders[rank] != holder:
      raise Refused(
        "fenced",
        f"{holder} speaks as host {rank} of epoch {epoch}; that is "
        f"{self.proposed.holders[rank] or 'nobody'} of epoch {self.epoch}: "
        "ask for a seat again, or become a standby",
      )


_SAYS = {State.PREPARING: "ready", State.COMMITTED: "done with a step"}
