"""The state of a running job, folded from its events as they come."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from decoupled.observe.events import Event

_TOKENS_OVER_S = 10.0  # stretch over which tokens per second are taken


@dataclasses.dataclass
class LiveStandby:
  """What is known of one standby in the pool."""

  state: str
  why: str
  since_s: float
  fingerprint: str


@dataclasses.dataclass
class LiveLearner:
  """What is known of one learner; `alive` between joining and leaving."""

  alive: bool = False
  incarnation: int = 0
  hosts: int = 1
  step: int = 0
  loss: float | None = None
  position: tuple[int, int] | None = None
  seen_s: float = 0.0
  struck_s: float | None = None  # when it was last struck and is not back


class Live:
  """Folds events; `notes` are sentences about what is worth telling."""

  def __init__(self) -> None:
    self.learners: dict[int, LiveLearner] = {}
    self.standbys: dict[str, LiveStandby] = {}
    self.vacant: dict[int, str] = {}  # why nobody has taken it over yet
    self.phase = "starting"
    self.why = ""
    self.term = 0
    self.round = 0
    self.now_s = 0.0
    self.tokens = 0
    self.participation: float | None = None
    self.ended: Event | None = None
    self.notes: list[str] = []
    self._held: dict[tuple[int, int], int] = {}  # tokens by incarnation
    self._progress: list[tuple[float, int]] = []  # (t, tokens)

  @property
  def alive(self) -> list[int]:
    return sorted(id for id, one in self.learners.items() if one.alive)

  @property
  def loss(self) -> float | None:
    """Mean training loss of the live learners."""
    losses = [
      one.loss
      for one in self.learners.values()
      if one.alive and one.loss is not None
    ]
    return sum(losses) / len(losses) if losses else None

  @property
  def tokens_per_second(self) -> float | None:
    if len(self._progress) < 2:
      return None
    (t0, n0), (t1, n1) = self._progress[0], self._progress[-1]
    return (n1 - n0) / (t1 - t0) if t1 > t0 else None

  def take(self, events: Iterable[Event]) -> None:
    for event in events:
      self._one(event)

  def take_notes(self) -> list[str]:
    """The sentences since the last call."""
    notes, self.notes = self.notes, []
    return notes

  def _one(self, event: Event) -> None:
    if event["kind"] == "start":
      self.__init__()  # type: ignore[misc]  # another job of the same run
    self.now_s = max(self.now_s, float(event["t"]))
    handler = getattr(self, f"_on_{event['kind']}", None)
    if handler is not None:
      handler(event, float(event["t"]))

  def _learner(self, event: Event) -> LiveLearner:
    return self.learners.setdefault(int(event["learner"]), LiveLearner())

  def _on_phase(self, event: Event, t: float) -> None:
    self.phase, self.why = str(event.get("phase")), str(event.get("why") or "")
    self._note(t, f"{self.phase}" + (f": {self.why}" if self.why else ""))

  def _on_join(self, event: Event, t: float) -> None:
    one = self._learner(event)
    one.alive, one.seen_s = True, t
    one.incarnation = int(event["incarnation"])
    one.hosts = int(event.get("hosts") or 1)
    self.vacant.pop(int(event["learner"]), None)
    self._note(
      t, f"learner/{event['learner']} joined, incarnation {one.incarnation}"
    )

  def _on_first_step(self, event: Event, t: float) -> None:
    one = self._learner(event)
    if one.struck_s is not None:
      down = t - one.struck_s
      one.struck_s = None
      self._note(t, f"learner/{event['learner']} is back after {down:.1f} s")

  def _on_leave(self, event: Event, t: float) -> None:
    one = self._learner(event)
    if int(event.get("incarnation") or 0) < one.incarnation:
      return
    one.alive = False
    why = str(event.get("why"))
    if why != "drained":
      one.struck_s = t if one.struck_s is None else one.struck_s
      detail = str(event.get("detail") or "")
      self._note(
        t,
        f"learner/{event['learner']} left: {why}"
        + (f" ({detail})" if detail and detail != why else ""),
      )

  def _on_standby(self, event: Event, t: float) -> None:
    name, state = str(event.get("standby")), str(event.get("state"))
    known = self.standbys.pop(name, None)
    if state != "gone":
      since = event.get("since")
      self.standbys[name] = LiveStandby(
        state,
        str(event.get("why") or ""),
        float(since) if isinstance(since, int | float) else t,
        str(event.get("fingerprint") or ""),
      )
    if state != (known.state if known else ""):
      why = f": {event.get('why')}" if state == "gone" else ""
      self._note(t, f"{name} is {state}{why}")

  def _on_decided(self, event: Event, t: float) -> None:
    learner, standby = int(event["learner"]), event.get("standby")
    why = str(event.get("why") or "")
    self.vacant[learner] = f"{standby} takes it over" if standby else why
    if standby is None:
      self._note(t, f"learner/{learner} waits for a standby: {why}")

  def _on_promoted(self, event: Event, t: float) -> None:
    name = str(event.get("standby"))
    self.standbys.pop(name, None)
    self._note(t, f"{name} takes over learner/{event['learner']}")

  def _on_steps(self, event: Event, t: float) -> None:
    one = self._learner(event)
    one.step, one.seen_s = int(event.get("step") or 0), t
    one.loss = event.get("loss") if event.get("loss") is not None else one.loss
    position = event.get("position")
    if isinstance(position, list) and len(position) == 2:
      one.position = (int(position[0]), int(position[1]))
    key = (int(event["learner"]), int(event.get("incarnation") or 0))
    held = max(self._held.get(key, 0), int(event.get("tokens") or 0))
    self.tokens += held - self._held.get(key, 0)
    self._held[key] = held
    self._progress.append((t, self.tokens))
    while self._progress[-1][0] - self._progress[0][0] > _TOKENS_OVER_S:
      self._progress.pop(0)

  def _on_round(self, event: Event, t: float) -> None:
    self.term = max(self.term, int(event.get("term") or 0))
    if not event.get("counted", True):
      return
    self.round = int(event.get("round") or 0)
    alive = set(event.get("alive") or [])
    if alive:
      share = len(set(event.get("participants") or []) & alive) / len(alive)
      before = self.participation
      self.participation = (
        share if before is None else 0.95 * before + 0.05 * share
      )

  def _on_fault(self, event: Event, t: float) -> None:
    action, target = str(event.get("action")), str(event.get("target"))
    options = "".join(
      f" {key} {event[key]:g}"
      for key in ("for", "by")
      if isinstance(event.get(key), int | float)
    )
    text = f"chaos: {action} {target}{options}"
    if event.get("error"):
      self._note(t, f"{text} not done, {event['error']}")
      return
    self._note(t, text)
    parts = target.split("/")
    if action in ("kill", "term") and parts[0] == "learner":
      self.learners.setdefault(int(parts[1]), LiveLearner()).struck_s = t

  def _on_exit(self, event: Event, t: float) -> None:
    how = event.get("signal") or event.get("code")
    if how and not event.get("planned"):
      word = "by" if event.get("signal") else "with status"
      self._note(t, f"{event.get('role')} ended {word} {how}")

  def _on_restart(self, event: Event, t: float) -> None:
    self._note(t, f"{event.get('role')} is started again")

  def _on_checkpoint(self, event: Event, t: float) -> None:
    if not event.get("ok"):
      self._note(t, f"checkpoint failed: {event.get('error')}")

  def _on_end(self, event: Event, t: float) -> None:
    self.ended = event

  def _note(self, t: float, text: str) -> None:
    self.notes.append(f"[{t:7.1f} s] {text}")


def number(value: Any, pattern: str, unknown: str = "–") -> str:
  """`value` in a format, or a dash where it is None."""
  return unknown if value is None else format(value, pattern)
