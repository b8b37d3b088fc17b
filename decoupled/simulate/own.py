"""One scenario of one's own, from flags and the configuration."""

import ast
import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from decoupled.algorithm.policy import Exchange
from decoupled.errors import ConfigError
from decoupled.simulate import presets
from decoupled.simulate.result import POLICIES
from decoupled.simulate.scenario import Correlated, Maintenance, Scenario

# Flags whose name or unit is not the field's: name, part, field, factor.
_FLAGS = {
  "mtbi_days": ("Failures", "mtbi_chip_days", 1.0),
  "repair_h": ("Failures", "return_s", 3600.0),
  "price": ("Scenario", "price_chip_hour", 1.0),
}


def scenario(
  exchange: Exchange,
  params: float,
  flags: Mapping[str, object],
  assigned: Iterable[str] = (),
  correlated: Iterable[str] = (),
  maintenance: Iterable[str] = (),
) -> Scenario:
  """The scenario that a command line describes.

  Args:
    exchange: of the configuration; its quorum holds unless a flag sets one.
    params: parameters of the configuration's model.
    flags: values of the flags that were given, by name.
    assigned: texts `Part.field=value`, which win over flags.
    correlated: texts `CHIPS:MTBI_DAYS:RETURN_H`.
    maintenance: texts `CHIPS:EVERY_DAYS:LASTS_H`.

  Raises:
    ConfigError: an unknown name, or a value that a field cannot take.
  """
  changes: dict[str, dict[str, Any]] = {part: {} for part in parts()}
  own = changes["Scenario"]
  own |= {"exchange": exchange, "quorum": exchange.quorum, "params": params}
  policy = str(flags.get("policy", "decoupled"))
  check_policy(policy)
  if policy.startswith("dp_"):  # one job; no rounds to wait for
    own |= {"learners": 1, "quorum": 1}
  for name, value in flags.items():
    part, field, factor = _FLAGS.get(name, ("Scenario", name, 0.0))
    changes[part][field] = float(str(value)) * factor if factor else value
  for text in assigned:
    part, field, value = _read(text)
    changes[part][field] = value
  changes["Failures"] |= _groups(correlated, maintenance)
  if changes["Stragglers"]:
    changes["Failures"]["stragglers"] = _changed("Stragglers", changes)
  own["failures"] = _changed("Failures", changes)
  own["recovery"] = _changed("Recovery", changes)
  return Scenario(**own)


def check_policy(policy: str) -> None:
  """Raises ConfigError, with the nearest name, for an unknown policy."""
  if policy not in POLICIES:
    raise ConfigError(presets.unknown("--policy", policy, POLICIES))


def parts() -> dict[str, Any]:
  """What `--set` may name, with its defaults."""
  scenario = Scenario()
  return {
    "Scenario": scenario,
    "Failures": scenario.failures,
    "Stragglers": scenario.failures.stragglers,
    "Recovery": scenario.recovery,
  }


def _changed(part: str, changes: Mapping[str, dict[str, Any]]) -> Any:
  return dataclasses.replace(parts()[part], **changes[part])


def _groups(
  correlated: Iterable[str], maintenance: Iterable[str]
) -> dict[str, Any]:
  found: dict[str, Any] = {}
  groups = [_three("--correlated", text) for text in correlated]
  if groups:
    found["correlated"] = tuple(
      Correlated(chips, days, hours * 3600) for chips, days, hours in groups
    )
  groups = [_three("--maintenance", text) for text in maintenance]
  if groups:
    found["maintenance"] = tuple(
      Maintenance(chips, days, hours * 3600) for chips, days, hours in groups
    )
  return found


def _three(flag: str, text: str) -> tuple[int, float, float]:
  words = text.split(":")
  try:
    chips, days, hours = words
    return int(chips), float(days), float(hours)
  except ValueError:
    raise ConfigError(
      f"{flag}={text} does not read CHIPS:DAYS:HOURS, three numbers above 0 "
      "such as 64:30:1"
    ) from None


def _read(text: str) -> tuple[str, str, Any]:
  """Splits and checks one `Part.field=value`."""
  name, equals, word = text.partition("=")
  part, dot, field = name.strip().partition(".")
  if not (equals and dot):
    raise ConfigError(
      f"--set {text!r} does not read Part.field=value, such as "
      "Recovery.restart_s=300"
    )
  if part == "Exchange":
    raise ConfigError(f"--set {text!r}: write {text} without --set")
  known = _settable()
  name = f"{part}.{field}"
  if name not in known:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
      f"--set {text!r}: there is no {name}: {hint}there are " + ", ".join(known)
    )
  return part, field, _value(name, word.strip(), known[name])


def _settable() -> dict[str, Any]:
  """`Part.field` -> default, of the fields that are plain values."""
  return {
    f"{part}.{field.name}": getattr(value, field.name)
    for part, value in parts().items()
    for field in dataclasses.fields(value)
    if isinstance(getattr(value, field.name), bool | int | float | str)
    or field.name == "speeds"
  }


def _value(name: str, word: str, default: Any) -> Any:
  try:
    value = ast.literal_eval(word)
  except (SyntaxError, ValueError):
    value = word
  if isinstance(default, float):
    if type(value) is int:
      value = float(value)
    elif word in ("inf", "never"):
      value = float("inf")
  if type(value) is not type(default):
    raise ConfigError(
      f"--set {name}={word} must be of type {type(default).__name__}, such as "
      f"{default!r}"
    )
  return value
