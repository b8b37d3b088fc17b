"""The presets by name: each reproduces figures that somebody published."""

import difflib
import importlib
import inspect
from collections.abc import Iterable

from decoupled.errors import ConfigError
from decoupled.simulate.result import PresetResult

# Name -> (module with a `run`, what it shows). Imported when asked for.
PRESETS: dict[str, tuple[str, str]] = {
  "table1": (
    "decoupled.simulate.table1",
    "goodput of four policies at 150k to 2.4M chips (30 cells)",
  ),
  "heterogeneous": (
    "decoupled.simulate.heterogeneous",
    "learners of two speeds: K = M, K = 1, K = 1 with grace",
  ),
  "scavenging": (
    "decoupled.simulate.scavenging",
    "training time with extra chips for a part of the run",
  ),
  "bandwidth": (
    "decoupled.simulate.bandwidth",
    "Gbit/s of data-parallel and decoupled jobs",
  ),
  "trainmover_64k": (
    "decoupled.simulate.trainmover_64k",
    "GPU-hours a week that restarts and swaps waste",
  ),
  "standby_pool": (
    "decoupled.simulate.standby_pool",
    "how many standbys are enough, by size of the job",
  ),
}


def run(
  name: str, *, repeats: int | None = None, seed: int = 0, quick: bool = False
) -> PresetResult:
  """Runs a preset.

  Args:
    name: a key of `PRESETS`.
    repeats: simulations a cell is averaged over (None = the preset's choice).
    seed: of all of them.
    quick: a reduced size, for tests and notebooks.

  Raises:
    ConfigError: there is no such preset.
  """
  check(name)
  function = importlib.import_module(PRESETS[name][0]).run
  if repeats is None:
    repeats = inspect.signature(function).parameters["repeats"].default
  found = function(repeats=repeats, seed=seed, quick=quick)
  assert isinstance(found, PresetResult)
  return found


def check(name: str) -> None:
  """Raises ConfigError where there is no such preset."""
  if name not in PRESETS:
    raise ConfigError(unknown("--preset", name, PRESETS))


def unknown(field: str, name: str, known: Iterable[str]) -> str:
  """One line: the value, the nearest name and all there are."""
  names = list(known)
  close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
  hint = f"did you mean {close[0]}? " if close else ""
  return (
    f"{field} = {name!r} does not exist: {hint}there are {', '.join(names)}"
  )
