"""The syncer's address, waited for where it has yet to be published."""

import time
from pathlib import Path

from decoupled.errors import ConfigError, Unreachable
from decoupled.wire import address

_POLL_S = 0.05


def resolve(spec: str, limit_s: float) -> address.Address:
  """Reads `host:port`, or waits for `@FILE` to hold one.

  Args:
    spec: an address, or `@` and the file in which a syncer publishes it.
    limit_s: how long to wait for the file.

  Raises:
    ConfigError: it reads otherwise.
    Unreachable: no syncer has published its address within the limit.
  """
  if not spec.startswith("@"):
    return address.parse(spec)
  path = Path(spec[1:])
  deadline = time.monotonic() + limit_s
  while (found := address.published_address(path)) is None:
    if time.monotonic() >= deadline:
      raise Unreachable(
        f"no syncer has published its address in {path} within {limit_s:g} s: "
        "is it running?"
      )
    time.sleep(_POLL_S)
  return found


def published(spec: str) -> address.Address | None:
  """What `@FILE` says at this moment; None for an address, or an empty file.

  A syncer that takes over publishes its own address there.
  """
  if not spec.startswith("@"):
    return None
  try:
    return address.published_address(Path(spec[1:]))
  except (ConfigError, OSError):
    return None
