"""`decoupled doctor`: this machine and this config, before anything starts."""

import dataclasses
import importlib.metadata
import os
import shutil
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from decoupled.config import Config, validate
from decoupled.errors import DecoupledError
from decoupled.launch import devices
from decoupled.launch.options import DoctorOptions

_PYTHON = ((3, 11), (3, 14))
_FREE_BYTES = 1 << 30
_MIN_CORPUS_FILES = 20
# What a process with JAX takes before it has a model (measured).
_PROCESS_BYTES = 400 << 20


@dataclasses.dataclass(frozen=True)
class Finding:
  """One line of the table.

  Attributes:
    subject: what was looked at.
    good: green or red.
    found: what there is.
    fix: what to do about it; empty where it is good.
  """

  subject: str
  good: bool
  found: str
  fix: str = ""


def run(config: Config, options: DoctorOptions) -> int:
  """Prints the table; 1 where anything is red."""
  findings = list(examine(config, options))
  colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
  width = max(len(finding.subject) for finding in findings)
  for finding in findings:
    mark = "ok " if finding.good else "BAD"
    if colour:
      mark = f"\033[{32 if finding.good else 31}m{mark}\033[0m"
    print(f"{mark}  {finding.subject:<{width}}  {finding.found}")
    if finding.fix:
      print(f"{'':<{width + 5}}  -> {finding.fix}")
  return 0 if all(finding.good for finding in findings) else 1


def examine(config: Config, options: DoctorOptions) -> Iterator[Finding]:
  """Yields a finding for everything a run depends on."""
  yield _python()
  yield _packages()
  yield _devices(config, options)
  yield _cores(options)
  yield _memory(options)
  yield _disk(options.workdir)
  yield _corpus(config)
  yield _port("127.0.0.1", socket.AF_INET)
  yield _port("::1", socket.AF_INET6)
  yield _inherited()
  yield _config(config, options)


def _python() -> Finding:
  low, high = _PYTHON
  version = ".".join(map(str, sys.version_info[:3]))
  good = low <= sys.version_info[:2] < high
  return Finding(
    "python",
    good,
    f"{version}, {sys.executable}",
    "" if good else "use Python 3.11, 3.12 or 3.13",
  )


def _packages() -> Finding:
  names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grpcio")
  found, missing = [], []
  for name in names:
    try:
      found.append(f"{name} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
      missing.append(name)
  fix = f"pip install {' '.join(missing)}" if missing else ""
  return Finding("packages", not missing, ", ".join(found), fix)


def _devices(config: Config, options: DoctorOptions) -> Finding:
  asked = options.devices_per_host or devices.suiting(config.mesh)
  try:
    plan = devices.plan(options.learners, asked)
  except DecoupledError as error:
    return Finding("devices", False, str(error), "see the line above")
  kind = "simulated CPU" if plan.platform == "cpu" else plan.platform
  return Finding(
    "devices",
    True,
    f"{options.learners} learners x {plan.per_learner} {kind} devices",
  )


def _cores(options: DoctorOptions) -> Finding:
  cores = usable_cores()
  good = cores >= 2
  return Finding(
    "cores",
    good,
    f"{cores} usable, {options.learners + 1} processes",
    "" if good else "a run on one core works, but its pauses mean nothing",
  )


def _memory(options: DoctorOptions) -> Finding:
  need = (options.learners + 2) * _PROCESS_BYTES
  free = _available_bytes()
  if free is None:
    return Finding("memory", True, f"about {_gib(need)} wanted")
  return Finding(
    "memory",
    free >= need,
    f"{_gib(free)} free, about {_gib(need)} wanted",
    "" if free >= need else "start fewer --learners, or free some memory",
  )


def _disk(workdir: Path) -> Finding:
  parent = workdir.absolute()
  while not parent.exists():
    parent = parent.parent
  try:
    with tempfile.TemporaryFile(dir=parent):
      free = shutil.disk_usage(parent).free
  except OSError as error:
    return Finding(
      "workdir",
      False,
      f"{parent} cannot be written: {error.strerror}",
      "choose another --workdir",
    )
  good = free >= _FREE_BYTES
  return Finding(
    "workdir",
    good,
    f"{parent} is writable, {_gib(free)} free",
    "" if good else f"free {_gib(_FREE_BYTES)}, or choose another --workdir",
  )


def _corpus(config: Config) -> Finding:
  if config.corpus.path:
    names = config.corpus.path.replace(",", " ").split()
    missing = [
      name
      for name in names
      if not any(c in name for c in "*?[") and not Path(name).exists()
    ]
    return Finding(
      "corpus",
      not missing,
      f"Corpus.path = {config.corpus.path}",
      f"there is no {missing[0]}" if missing else "",
    )
  library = Path(sysconfig.get_path("stdlib"))
  files = sum(1 for _ in library.glob("*.py"))
  good = files >= _MIN_CORPUS_FILES
  return Finding(
    "corpus",
    good,
    f"Python's own library in {library}, {files} files at its top",
    "" if good else "set Corpus.path to text of your own",
  )


def _port(host: str, family: socket.AddressFamily) -> Finding:
  try:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
      probe.bind((host, 0))
      port = probe.getsockname()[1]
  except OSError as error:
    # A machine without IPv6 runs everything over IPv4.
    optional = family == socket.AF_INET6
    return Finding(
      f"port on {host}",
      optional,
      f"none: {error.strerror}" + (", not needed" if optional else ""),
      "" if optional else "bring the loopback interface up: ip link set lo up",
    )
  return Finding(f"port on {host}", True, f"free ones, such as {port}")


def _inherited() -> Finding:
  names = devices.inherited()
  found = f"{', '.join(names)}: not passed on" if names else "none"
  return Finding("XLA/JAX variables", True, found)


def _config(config: Config, options: DoctorOptions) -> Finding:
  try:
    validate(
      config,
      learners=options.learners,
      devices=options.devices_per_host or devices.suiting(config.mesh),
    )
  except DecoupledError as error:
    return Finding("config", False, str(error), "change it as the line says")
  changed = sum(origin != "default" for origin in config.origins.values())
  return Finding("config", True, f"valid, {changed} values are not defaults")


def usable_cores() -> int:
  """Cores this process may use."""
  count: Callable[[int], set[int]] | None = getattr(
    os, "sched_getaffinity", None
  )
  return len(count(0)) if count else os.cpu_count() or 1


def _available_bytes() -> int | None:
  try:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
  except OSError:
    return None
  for line in lines:
    if line.startswith("MemAvailable:"):
      return int(line.split()[1]) * 1024
  return None


def _gib(size: int) -> str:
  return f"{size / (1 << 30):.1f} GiB"
