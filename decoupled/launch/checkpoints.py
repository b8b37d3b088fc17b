"""`decoupled checkpoints`: what is saved, and whether it is still whole."""

import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence

from decoupled.checkpoint import inventory as inventory_lib
from decoupled.checkpoint.inventory import DAMAGED, UNFINISHED, Entry
from decoupled.errors import ConfigError, DecoupledError
from decoupled.launch.options import CheckpointsOptions

_ACTIONS = ("list", "verify")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def main(options: CheckpointsOptions, words: Sequence[str]) -> int:
  """Lists or verifies snapshots.

  Args:
    options: where they are, unless the words say it.
    words: `list` or `verify`, and possibly a path.

  Returns:
    1 where `verify` has found damage.

  Raises:
    DecoupledError: there is no snapshot at all.
  """
  action, where = _parsed(options, words)
  entries = inventory_lib.inventory(where, verify=action == "verify")
  if not entries:
    raise DecoupledError(
      f"no snapshot lies under {where}: was it the --workdir or the --store of "
      "a run?"
    )
  if options.as_json:
    print(json.dumps([dataclasses.asdict(e) for e in entries], indent=1))
  else:
    print("\n".join(table(entries)))
  for entry in entries:
    if entry.state in (DAMAGED, UNFINISHED):
      print(
        f"{entry.state}: {entry.group} {entry.number}: "
        f"{entry.problem or entry.path}",
        file=sys.stderr,
      )
  return int(any(entry.state == DAMAGED for entry in entries))


def table(entries: Sequence[Entry]) -> list[str]:
  """One line a snapshot, the newest of each group first."""
  rows = [
    ("group", "number", "term", "state", "size", "written", "run", "path")
  ]
  rows += [
    (
      entry.group,
      str(entry.number),
      "" if entry.term is None else str(entry.term),
      entry.state,
      _size(entry.bytes),
      _time(entry.written_s),
      entry.run_id,
      entry.path,
    )
    for entry in entries
  ]
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return [
    "  ".join(
      text.ljust(width) for text, width in zip(row, widths, strict=True)
    ).rstrip()
    for row in rows
  ]


def _parsed(
  options: CheckpointsOptions, words: Sequence[str]
) -> tuple[str, str]:
  """(action, where); raises ConfigError with what may be said."""
  if not words or words[0] not in _ACTIONS or len(words) > 2:
    said = " ".join(words) or "nothing"
    raise ConfigError(
      f"{said!r}: say `decoupled checkpoints list` or `verify`, with a path, "
      "--workdir or --store"
    )
  if len(words) == 2:
    return words[0], words[1]
  return words[0], options.store or str(options.workdir / "checkpoints")


def _size(count: int) -> str:
  size, unit = float(count), 0
  while size >= 1024 and unit < len(_UNITS) - 1:
    size, unit = size / 1024, unit + 1
  return (
    f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"
  )


def _time(written_s: float | None) -> str:
  if written_s is None:
    return ""
  at = datetime.datetime.fromtimestamp(written_s).astimezone()
  return at.isoformat(sep=" ", timespec="seconds")
