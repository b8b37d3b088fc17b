"""The hosts of a learner speak as one member of the run.

Every host has connections of its own, all share one incarnation. A claim is
complete when every host has said hello; what the hosts report is joined into
one report (what all of them have, the least of their counters) before the
rounds see it; the claim ends with the first connection that is lost. The rank
0 speaks for the ledger of units and for the clock. Of a learner of one host
everything passes through unchanged.
"""

import dataclasses
from collections.abc import Sequence

from decoupled.errors import Refused
from decoupled.types import (
  Announcement,
  CopyId,
  Heartbeat,
  Hello,
  Report,
  Stage,
)

_SAME = ("hosts", "run_id", "tensors", "contract", "program")


class Gathering:
  """Hellos of one learner's hosts, until all of them are there."""

  def __init__(self) -> None:
    self._said: dict[int, Hello] = {}

  def add(self, hello: Hello) -> tuple[int, ...]:
    """Takes a host's hello in place of its last one.

    Returns:
      Hosts whose hellos are void now: of an earlier epoch, or said again.

    Raises:
      Refused: it is of an earlier epoch, or differs from those of the others;
        both sides are named.
    """
    newest = max((h.epoch for h in self._said.values()), default=0)
    if hello.epoch < newest:
      raise Refused(
        "fenced",
        f"{hello.holder} is of epoch {hello.epoch}, other hosts of learner "
        f"{hello.learner_id} are of epoch {newest}: it has been replaced",
      )
    void = [
      host
      for host, other in self._said.items()
      if other.epoch < hello.epoch or host == hello.host
    ]
    for host in void:
      del self._said[host]
    for other in self._said.values():
      _check_same(hello, other)
    self._said[hello.host] = hello
    return tuple(void)

  def take_back(self, hello: Hello) -> None:
    """Whoever said it waits no longer."""
    if self._said.get(hello.host) is hello:
      del self._said[hello.host]

  @property
  def missing(self) -> tuple[int, ...]:
    """Ranks that have said nothing; all, where nobody has."""
    hosts = max((h.hosts for h in self._said.values()), default=0)
    return tuple(r for r in range(hosts) if r not in self._said)

  @property
  def complete(self) -> bool:
    return bool(self._said) and not self.missing

  def joined(self) -> Hello:
    """One claim for all of them."""
    said = [self._said[host] for host in sorted(self._said)]
    return dataclasses.replace(
      said[0],
      holder=",".join(hello.holder for hello in said),
      previous=max(hello.previous for hello in said),
      gives_state=all(hello.gives_state for hello in said),
    )


class Group:
  """The hosts of one incarnation.

  Args:
    incarnation: their fencing number.
    hosts: how many there are.
  """

  def __init__(self, incarnation: int, hosts: int):
    self.incarnation = incarnation
    self.hosts = hosts
    self._heard: dict[int, Heartbeat] = {}
    self._reports: dict[int, Report] = {}
    self._left: set[int] = set()
    self._ends: tuple[float, ...] = ()
    self._seq = 0
    self._refused: dict[CopyId, str] = {}

  def beat(self, beat: Heartbeat) -> Heartbeat | None:
    """A sign of life of the learner, once every host has given one.

    A lease that one host could keep alone would hide a frozen one.
    """
    self._heard[beat.host] = beat
    if any(r not in self._heard for r in self._staying()):
      return None
    first = min(self._heard)
    said = self._heard[first]
    self._heard.clear()
    return dataclasses.replace(said, host=0)

  def report(self, report: Report) -> Report | None:
    """What the learner has, once every host has reported; else None."""
    if self.hosts == 1:
      return report
    before = self._reports.get(report.host)
    if before is not None and report.seq <= before.seq:
      return None
    self._reports[report.host] = report
    if report.host == 0:
      self._ends += report.step_ends_s
    if len(self._reports) < self.hosts:
      return None
    self._seq += 1
    ends, self._ends = self._ends, ()
    reports = [self._reports[host] for host in range(self.hosts)]
    return join(reports, self._seq, ends)

  def leave(self, host: int) -> bool:
    """A host goes of its own will; True once all of them have."""
    self._left.add(host)
    return len(self._left) == self.hosts

  def announced(
    self, host: int, said: Announcement, sent: Sequence[CopyId] = ()
  ) -> Announcement:
    """An announcement to the learner, as one of its hosts gets it.

    Args:
      host: which.
      said: to the learner.
      sent: copies whose part this host has sent already.

    Returns:
      It asks for no part twice, and repeats a refusal for as long as this host
      still lists the copy: the rounds forget it once one host has dropped it.
    """
    if self.hosts == 1:
      return said
    self._refused |= dict(said.refused)
    listed = {
      rank: {header.copy for header in report.copies}
      for rank, report in self._reports.items()
    }
    named = set().union(*listed.values()) | {copy for copy, _ in said.refused}
    self._refused = {c: why for c, why in self._refused.items() if c in named}
    mine = listed.get(host, set())
    refused = dict(said.refused) | {
      copy: why for copy, why in self._refused.items() if copy in mine
    }
    wanted = tuple(copy for copy in said.wanted if copy not in sent)
    return dataclasses.replace(
      said, refused=tuple(refused.items()), wanted=wanted
    )

  def _staying(self) -> list[int]:
    return [r for r in range(self.hosts) if r not in self._left]


def join(
  reports: Sequence[Report], seq: int, step_ends_s: tuple[float, ...]
) -> Report:
  """One report of a learner out of those of its hosts, in rank order.

  Versions and copies are those that all hosts have, counters the least; units
  of the corpus, position, loss and times are those of rank 0.

  Args:
    reports: the newest one of each host.
    seq: of the joined one.
    step_ends_s: ends of steps on the clock of rank 0.

  Raises:
    Refused: they speak of different numbers of fragments.
  """
  first = reports[0]
  if len({len(report.versions) for report in reports}) > 1:
    raise Refused(
      "malformed",
      f"hosts of learner {first.learner_id} report different numbers of "
      "fragments",
    )
  everywhere = set(first.copies).intersection(*(r.copies for r in reports))
  return dataclasses.replace(
    first,
    seq=seq,
    stage=_stage([report.stage for report in reports]),
    step=min(report.step for report in reports),
    tokens=min(report.tokens for report in reports),
    schedule_step=min(report.schedule_step for report in reports),
    copies=tuple(h for h in first.copies if h in everywhere),
    versions=tuple(
      min(versions)
      for versions in zip(*(r.versions for r in reports), strict=True)
    ),
    step_ends_s=step_ends_s,
  )


def _stage(stages: Sequence[Stage]) -> Stage:
  """What all do; where they differ, what the one that is behind does."""
  for stage in (Stage.JOINING, Stage.TRAINING, Stage.PAUSED):
    if stage in stages:
      return stage
  return Stage.DRAINED


def incomplete(
  learner_id: int, missing: Sequence[int], limit_s: float
) -> Refused:
  """A claim for which some hosts have not spoken in time."""
  ranks = ", ".join(map(str, missing))
  return Refused(
    "incomplete",
    f"learner {learner_id} is not complete: host {ranks} did not join within "
    f"{limit_s:g} s; every host of a learner must say hello",
  )


def _check_same(hello: Hello, other: Hello) -> None:
  """Raises Refused where two hosts of a learner would differ."""
  for name in _SAME:
    ours, theirs = getattr(other, name), getattr(hello, name)
    if ours != theirs:
      raise Refused(
        "contract",
        f"{name} of host {hello.host} ({hello.holder}) is not that of host "
        f"{other.host} ({other.holder}): {_brief(theirs)}, not {_brief(ours)}; "
        "hosts of a learner must be started alike",
      )


def _brief(value: object) -> str:
  return str(value)[:100]
