"""Fault plans: the grammar of design section 7, parsed and checked.

    plan   = event { ";" event } | "@" FILE          (one event a line)
    event  = action target "@" when { option } | "storm" RATE "/h" { option }
    action = kill | term | pause | slow | partition | throttle | corrupt | fill
    target = "learner/" N [ "/host/" M ] | "syncer" | "standby/" N
    when   = NUMBER "s" | NUMBER "r"                 (r: just after that round)
    option = "for" NUMBER "s" | "by" NUMBER | "norestart" | "seed" NUMBER

`parse(str(event))` gives the event back. In a file, blank lines and what
follows a `#` are ignored.
"""

import dataclasses
import re
from pathlib import Path
from typing import NoReturn, TypeAlias, TypedDict

from decoupled.errors import ConfigError

ACTIONS = (
  "kill",
  "term",
  "pause",
  "slow",
  "partition",
  "throttle",
  "corrupt",
  "fill",
)
OPTIONS = ("for", "by", "norestart", "seed")

_TAKES = {
  "kill": {"norestart"},
  "term": {"norestart"},
  "pause": {"for"},
  "slow": {"for", "by"},
  "partition": {"for"},
  "throttle": {"for", "by"},
  "corrupt": {"for", "by", "seed"},
  "fill": {"for", "by"},
  "storm": {"for", "norestart", "seed"},
}


@dataclasses.dataclass(frozen=True)
class Target:
  """What a fault hits.

  Attributes:
    role: learner, syncer or standby.
    index: which learner or standby (None for the syncer).
    host: which host of a learner (None = all of it).
  """

  role: str
  index: int | None = None
  host: int | None = None

  def __str__(self) -> str:
    index = "" if self.index is None else f"/{self.index}"
    return f"{self.role}{index}" + (
      "" if self.host is None else f"/host/{self.host}"
    )


@dataclasses.dataclass(frozen=True)
class Fault:
  """One thing that goes wrong.

  Attributes:
    action: one of ACTIONS.
    target: what it hits.
    at: when, in `unit`.
    unit: `s` seconds from the job's start, or `r` just after that round closed.
    for_s: how long it lasts (None = for good).
    by: the factor of `slow` and others.
    restart: whether a killed process is started again.
    seed: of a random fault.
  """

  action: str
  target: Target
  at: float
  unit: str = "s"
  for_s: float | None = None
  by: float | None = None
  restart: bool = True
  seed: int | None = None

  def __str__(self) -> str:
    return f"{self.action} {self.target} @{_number(self.at)}{self.unit}" + (
      _options(self)
    )


@dataclasses.dataclass(frozen=True)
class Storm:
  """Random kills of learners, as a Poisson process.

  Attributes:
    rate_per_h: kills per hour, over all learners.
    for_s: how long it lasts from the job's start (None = for good).
    restart: whether a killed process is started again.
    seed: of the process (None = the run's).
  """

  rate_per_h: float
  for_s: float | None = None
  restart: bool = True
  seed: int | None = None

  def __str__(self) -> str:
    return f"storm {_number(self.rate_per_h)}/h{_options(self)}"


Event: TypeAlias = Fault | Storm


def parse(text: str) -> tuple[Event, ...]:
  """Parses a plan, or the file that `@FILE` names.

  Raises:
    ConfigError: where it stops making sense, and what was expected there.
  """
  text = text.strip()
  if not text.startswith("@"):
    return _parse_line(text, "chaos plan") if text else ()
  path = Path(text[1:].strip())
  try:
    lines = path.read_text(encoding="utf-8").splitlines()
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, "strerror", None) or "not UTF-8 text"
    raise ConfigError(f"chaos plan {path}: {reason}") from None
  events: list[Event] = []
  for number, line in enumerate(lines, start=1):
    content = line.partition("#")[0].rstrip()
    if content.strip():
      events += _parse_line(content, f"{path}, line {number}")
  return tuple(events)


def _parse_line(text: str, where: str) -> tuple[Event, ...]:
  scanner = _Scanner(text, where)
  events = [_event(scanner)]
  while scanner.accept(";"):
    if scanner.at_end():
      break
    events.append(_event(scanner))
  if not scanner.at_end():
    scanner.fail(f"one of {', '.join(OPTIONS)}, or ';' and the next event")
  return tuple(events)


def _event(scanner: "_Scanner") -> Event:
  column = scanner.column
  action = scanner.word()
  if action == "storm":
    column = scanner.column
    rate = scanner.number("a rate, such as 12/h")
    scanner.expect("/h", "'/h' after the rate")
    if rate <= 0:
      scanner.fail("a rate above 0", column)
    found = _read_options(scanner, action)
    return Storm(
      rate, found.get("for_s"), found.get("restart", True), found.get("seed")
    )
  if action not in ACTIONS:
    scanner.fail(f"one of {', '.join(ACTIONS)} or storm", column)
  target = _target(scanner)
  scanner.expect("@", "'@' and when, such as @150r or @20s")
  column = scanner.column
  at = scanner.number("a number of seconds or a round, such as 20s or 150r")
  unit = "s" if scanner.accept("s") else "r"
  if unit == "r":
    scanner.expect("r", "'s' (seconds) or 'r' (round) after the number")
    if at < 1 or at != int(at):
      scanner.fail("a whole round from 1 on", column)
  fault = Fault(action, target, at, unit, **_read_options(scanner, action))
  if action == "slow" and fault.by is None:
    scanner.fail("'by' and a factor, such as by 3 (slow)")
  return fault


def _target(scanner: "_Scanner") -> Target:
  column = scanner.column
  role = scanner.word()
  if role == "syncer":
    return Target(role)
  if role not in ("learner", "standby"):
    scanner.fail(
      "a target: learner/N, learner/N/host/M, syncer, standby/N", column
    )
  scanner.expect("/", f"'/' and a number after {role}")
  index = scanner.whole(f"which {role}, such as {role}/1")
  if role == "learner" and scanner.accept("/"):
    scanner.expect("host", "'host/' and a number")
    scanner.expect("/", "'/' and a number after host")
    return Target(role, index, scanner.whole("which host, such as host/0"))
  return Target(role, index)


class _Options(TypedDict, total=False):
  for_s: float
  by: float
  restart: bool
  seed: int


def _read_options(scanner: "_Scanner", action: str) -> _Options:
  found = _Options()
  seen: set[str] = set()
  while not scanner.at_end() and not scanner.sees(";"):
    column = scanner.column
    option = scanner.word()
    if option not in OPTIONS:
      scanner.fail(
        f"one of {', '.join(OPTIONS)}, or ';' and the next event", column
      )
    if option not in _TAKES[action]:
      takes = ", ".join(sorted(_TAKES[action]))
      scanner.fail(f"an option that {action} takes ({takes})", column)
    if option in seen:
      scanner.fail(f"{option!r} only once", column)
    seen.add(option)
    if option == "for":
      found["for_s"] = scanner.number("how long, such as for 20s")
      scanner.expect("s", "'s' after the number (for 20s)")
    elif option == "by":
      column = scanner.column
      found["by"] = scanner.number("a factor, such as by 3")
      if action == "slow" and found["by"] < 1:
        scanner.fail("a factor of at least 1", column)
    elif option == "seed":
      found["seed"] = scanner.whole("a whole number after seed")
    else:
      found["restart"] = False
  return found


class _Scanner:
  """Reads a plan from left to right and knows the column."""

  def __init__(self, text: str, where: str):
    self._text = text
    self._where = where
    self._at = 0
    self._skip()

  @property
  def column(self) -> int:
    return self._at + 1

  def at_end(self) -> bool:
    return self._at >= len(self._text)

  def sees(self, literal: str) -> bool:
    return self._text.startswith(literal, self._at)

  def accept(self, literal: str) -> bool:
    if not self.sees(literal):
      return False
    self._advance(len(literal))
    return True

  def expect(self, literal: str, expected: str) -> None:
    if not self.accept(literal):
      self.fail(expected)

  def word(self) -> str:
    return self._match(r"[A-Za-z_]*")

  def number(self, expected: str) -> float:
    text = self._match(r"(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
    return float(text) if text else self.fail(expected)

  def whole(self, expected: str) -> int:
    text = self._match(r"\d+")
    return int(text) if text else self.fail(expected)

  def fail(self, expected: str, column: int | None = None) -> NoReturn:
    at = self.column if column is None else column
    rest = self._text[at - 1 :].split(";")[0].split()
    found = (
      repr(rest[0]) if rest else "the end" if (at > len(self._text)) else "';'"
    )
    raise ConfigError(
      f"{self._where}, column {at}: expected {expected}, found {found}"
    )

  def _match(self, pattern: str) -> str:
    match = re.compile(pattern).match(self._text, self._at)
    text = match.group() if match else ""
    if text:
      self._advance(len(text))
    return text

  def _advance(self, length: int) -> None:
    self._at += length
    self._skip()

  def _skip(self) -> None:
    while self._at < len(self._text) and self._text[self._at].isspace():
      self._at += 1


def _number(value: float) -> str:
  return str(int(value)) if value == int(value) else repr(value)


def _options(event: Event) -> str:
  by = event.by if isinstance(event, Fault) else None
  return (
    ("" if event.for_s is None else f" for {_number(event.for_s)}s")
    + ("" if by is None else f" by {_number(by)}")
    + ("" if event.restart else " norestart")
    + ("" if event.seed is None else f" seed {event.seed}")
  )
