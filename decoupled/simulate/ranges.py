"""Checks of single numbers; the message names field, value and range."""

import math

from decoupled.errors import ConfigError


def whole(name: str, value: int, least: int) -> None:
  """Raises ConfigError unless a whole number of at least `least`."""
  if isinstance(value, bool) or int(value) != value or value < least:
    raise ConfigError(
      f"{name} = {value} must be a whole number of at least {least}"
    )


def positive(name: str, value: float, endless: bool = False) -> None:
  """Raises ConfigError unless above 0, and finite unless `endless`."""
  if not value > 0 or (math.isinf(value) and not endless):
    most = " (inf = never)" if endless else " and finite"
    raise ConfigError(f"{name} = {value} must be above 0{most}")


def at_least(name: str, value: float, least: float) -> None:
  """Raises ConfigError unless finite and at least `least`."""
  if not least <= value < math.inf:
    raise ConfigError(f"{name} = {value} must be at least {least:g} and finite")
