"""The `decoupled` program: parses the command line and calls what it names.

    decoupled <command> [CONFIG.gin ...] [Component.param=value ...] [flags]

Nothing heavy is imported before the command is known.
"""

import dataclasses
import difflib
import importlib
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from decoupled.errors import ConfigError, DecoupledError
from decoupled.launch import child, flags

_BINDING = re.compile(r"^[A-Za-z_][\w/]*(\.\w+)*\s*=")
_USAGE = (
  "usage: decoupled <command> [CONFIG.gin ...] [Component.param=value ...] "
  "[flags]"
)


@dataclasses.dataclass(frozen=True)
class Command:
  """One command.

  Attributes:
    does: one sentence for the help.
    entry: `module:function` that carries it out, "" = not there yet.
    define: defines its flags.
    options: makes its options from the flags and the default workdir.
    configured: whether it takes a configuration.
    words: its positional words, as the help shows them; handed to its entry.
  """

  does: str
  entry: str = ""
  define: Callable[[absl_flags.FlagValues], None] = flags.none
  options: Callable[[absl_flags.FlagValues, Path], Any] | None = None
  configured: bool = False
  words: str = ""


COMMANDS: dict[str, Command] = {
  "run": Command(
    "a whole job on this machine: a syncer and learners as real processes",
    "decoupled.launch.local:run",
    flags.run,
    flags.run_options,
    configured=True,
  ),
  "syncer": Command(
    "the syncer of a job on a cluster",
    "decoupled.syncer.main:run",
    flags.syncer,
    flags.syncer_options,
    configured=True,
  ),
  "learner": Command(
    "one host of one learner of a job on a cluster",
    "decoupled.learner.main:run",
    flags.learner,
    flags.learner_options,
    configured=True,
  ),
  "standby": Command(
    "a host that is kept warm, and takes over for a learner that dies",
    "decoupled.standby.main:run",
    flags.standby,
    flags.standby_options,
    configured=True,
  ),
  "coordinator": Command(
    "where the hosts of each learner meet, in a process of its own",
    "decoupled.learner.coordinator:run",
    flags.coordinator,
    flags.coordinator_options,
  ),
  "config": Command(
    "the resolved configuration, each value with its origin",
    "decoupled.config:show",
    flags.config,
    lambda values, default: bool(values["json"].value),
    configured=True,
  ),
  "status": Command(
    "where a job is: phase, rounds, learners",
    "decoupled.launch.control:show_status",
    flags.status,
    flags.job_options,
  ),
  "drain": Command(
    "has a standby take a learner's place, as planned",
    "decoupled.launch.drain:main",
    flags.drain,
    flags.job_options,
    words="learner/N",
  ),
  "chaos": Command("injects faults into a running job"),
  "stop": Command(
    "ends a running job; it merges and saves what there is",
    "decoupled.launch.control:stop",
    flags.stop,
    flags.job_options,
  ),
  "simulate": Command(
    "goodput of a policy on up to millions of chips",
    "decoupled.simulate.main:run",
    flags.simulate,
    flags.simulate_options,
    configured=True,
  ),
  "evaluate": Command(
    "held-out loss of what was trained",
    "decoupled.evaluate:main",
    flags.evaluate,
    flags.evaluate_options,
    configured=True,
  ),
  "checkpoints": Command(
    "lists the snapshots of a run, or verifies every byte of them",
    "decoupled.launch.checkpoints:main",
    flags.checkpoints,
    flags.checkpoints_options,
    words="list|verify [PATH]",
  ),
  "certs": Command(
    "certificates for a syncer that other machines can reach",
    "decoupled.launch.certs:main",
    flags.certs,
    flags.certs_options,
  ),
  "generate": Command("continues a text with what was trained"),
  "export": Command("writes what was trained in another format"),
  "report": Command(
    "report.json and report.html of a job, from its events",
    "decoupled.launch.control:write_report",
    flags.job,
    flags.job_options,
  ),
  "replay": Command(
    "merges recorded contributions again and compares every bit",
    "decoupled.launch.replay:main",
    flags.replay,
    flags.replay_options,
  ),
  "launch": Command("jobs on a cluster: up, down, logs, status, scale"),
  "doctor": Command(
    "checks this machine and a configuration before anything starts",
    "decoupled.doctor:run",
    flags.doctor,
    flags.doctor_options,
    configured=True,
  ),
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns its exit status and never raises for people."""
  name, *rest = (sys.argv[1:] if argv is None else argv) or ["help"]
  child.enter()
  try:
    return _dispatch(name, rest)
  except ConfigError as error:
    return _complain(name, error, 2)
  except DecoupledError as error:
    return _complain(name, error, 1)
  except KeyboardInterrupt:
    return _complain(name, "interrupted", 130)
  except BrokenPipeError:  # the reader of our output has gone: `| head`
    sys.stderr.close()
    return 141


def parse(
  name: str, arguments: Sequence[str]
) -> tuple[absl_flags.FlagValues, list[str], list[str]]:
  """Parses the arguments of a command.

  Returns:
    The flags, the gin files and the bindings, positional ones first.

  Raises:
    ConfigError: an unknown flag or argument, or a value a flag cannot take.
  """
  values, positional = split(name, arguments)
  if COMMANDS[name].words:
    return values, [], []
  files = [word for word in positional if word.endswith(".gin")]
  rest = [word for word in positional if not word.endswith(".gin")]
  bindings = [word for word in rest if _BINDING.match(word)]
  odd = [word for word in rest if not _BINDING.match(word)]
  if odd or (positional and not COMMANDS[name].configured):
    takes = "CONFIG.gin, Component.param=value and flags"
    raise ConfigError(
      f"unexpected argument {(odd or positional)[0]!r}: {name} takes "
      + (takes if COMMANDS[name].configured else "flags only")
    )
  if COMMANDS[name].configured:
    files += values["gin_file"].value or []
    bindings += values["gin_bindings"].value or []
  return values, files, bindings


def split(
  name: str, arguments: Sequence[str]
) -> tuple[absl_flags.FlagValues, list[str]]:
  """The flags of a command line, and its positional words.

  Raises:
    ConfigError: an unknown flag, or a value a flag cannot take.
  """
  values = flag_values(name)
  try:
    _, *positional = values([f"decoupled {name}", *arguments])
  except absl_flags.Error as error:
    message = " ".join(str(error).split())
    raise ConfigError(f"{message} (see `decoupled {name} --help`)") from None
  return values, positional


def flag_values(name: str) -> absl_flags.FlagValues:
  """The flags of a command."""
  command = COMMANDS[name]
  values = absl_flags.FlagValues()  # type: ignore[no-untyped-call]
  values.set_gnu_getopt(True)  # flags and positional arguments may mix
  if command.configured:
    flags.config_flags(values)
  command.define(values)
  return values


def _dispatch(name: str, arguments: list[str]) -> int:
  if name in ("help", "--help", "-h"):
    known = arguments and arguments[0] in COMMANDS
    print(help_for(arguments[0]) if known else overview())
    return 0
  if name in ("--version", "version"):
    print(importlib.import_module("decoupled").__version__)
    return 0
  command = COMMANDS.get(name)
  if command is None:
    raise ConfigError(f"there is no command {name!r}{_nearest(name)}")
  if any(word in ("--help", "-h", "-help") for word in arguments):
    print(help_for(name))
    return 0
  if command.options is None:
    raise ConfigError(f"this version does not have `decoupled {name}` yet")
  if command.words:
    return _call_with_words(command, *split(name, arguments))
  return _call(command, *parse(name, arguments))


def _call(
  command: Command,
  values: absl_flags.FlagValues,
  files: list[str],
  bindings: list[str],
) -> int:
  assert command.options is not None
  stem = Path(files[0]).stem if files else "default"
  options = command.options(values, Path("runs") / stem)
  module, _, function = command.entry.partition(":")
  if not command.configured:
    return int(getattr(importlib.import_module(module), function)(options))
  config = importlib.import_module("decoupled.config").resolve(files, bindings)
  entry = getattr(importlib.import_module(module), function)
  return int(entry(config, options))


def _call_with_words(
  command: Command, values: absl_flags.FlagValues, words: list[str]
) -> int:
  assert command.options is not None
  options = command.options(values, Path("runs") / "default")
  module, _, function = command.entry.partition(":")
  return int(getattr(importlib.import_module(module), function)(options, words))


# ---- what is printed ---------------------------------------------------------


def overview() -> str:
  """The text of `decoupled help`."""
  there = [n for n, c in COMMANDS.items() if c.options is not None]
  later = [n for n, c in COMMANDS.items() if c.options is None]
  width = max(map(len, COMMANDS))
  lines = [_USAGE, ""]
  lines += [f"  {name:<{width}}  {COMMANDS[name].does}" for name in there]
  lines += ["", "not in this version yet: " + ", ".join(later)]
  return "\n".join([*lines, "`decoupled <command> --help` explains one"])


def help_for(name: str) -> str:
  """The text of `decoupled <command> --help`."""
  command = COMMANDS[name]
  takes = "[CONFIG.gin ...] [Component.param=value ...] "
  if not command.configured:
    takes = f"{command.words} " if command.words else ""
  lines = [
    f"usage: decoupled {name} {takes}[flags]",
    "",
    f"{name}: {command.does}",
  ]
  if command.options is None:
    lines.append("(not in this version yet)")
  values = flag_values(name)
  for flag in sorted(values):
    default = values[flag].default
    shown = "" if default in (None, "", []) else f" (default: {default})"
    text = " ".join((values[flag].help or "").split())
    lines += ["", f"  --{flag}"]
    lines += textwrap.wrap(
      text + shown,
      78,
      initial_indent=" " * 6,
      subsequent_indent=" " * 6,
    )
  return "\n".join(lines)


def _nearest(name: str) -> str:
  close = difflib.get_close_matches(name, COMMANDS, n=1)
  known = f"; did you mean {close[0]}?" if close else ""
  return f"{known} (`decoupled help` lists the commands)"


def _complain(name: str, error: object, status: int) -> int:
  message = " ".join(str(error).split())
  print(f"decoupled {name}: {message}", file=sys.stderr)
  return status


if __name__ == "__main__":
  sys.exit(main())
