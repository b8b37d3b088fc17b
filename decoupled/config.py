"""The configuration: gin files and bindings in, frozen components out.

gin-config is known to this module alone. A component is a frozen dataclass
that lives with the code it configures; here it only gets its name. Later wins:
file < binding < flag. Nothing is executed from a config: imports are refused.

Two kinds (design section 7): components of the *contract* belong to the run
and every peer must agree on them; *local* ones are each peer's own.
"""

import contextlib
import dataclasses
import difflib
import io
import json
import re
import threading
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
from gin import config_parser

from decoupled.algorithm.policy import Exchange, Outer
from decoupled.checkpoint.settings import Checkpoint
from decoupled.data.settings import Batch, Corpus
from decoupled.errors import ConfigError
from decoupled.learner.settings import Local, Mesh, Optimizer, Schedule
from decoupled.models.config import Transformer
from decoupled.syncer.settings import Limits

CONTRACT: dict[str, type] = {
  "Exchange": Exchange,
  "Outer": Outer,
  "Transformer": Transformer,
  "Optimizer": Optimizer,
  "Schedule": Schedule,
  "Corpus": Corpus,
  "Batch": Batch,
}
LOCAL: dict[str, type] = {
  "Mesh": Mesh,
  "Local": Local,
  "Limits": Limits,
  "Checkpoint": Checkpoint,
}
COMPONENTS = CONTRACT | LOCAL

# Each peer may keep the corpus elsewhere; the learner adds a digest line.
_NOT_IN_CONTRACT = frozenset({"Corpus.path"})

# gin keeps its bindings in a module-wide table.
_GIN = threading.Lock()
_registered = False


@dataclasses.dataclass(frozen=True)
class Config:
  """The resolved components, and where each value came from.

  Attributes:
    origins: per `Component.param`: `default`, `FILE:LINE`, `binding` or the
      flag that set it.
  """

  exchange: Exchange
  outer: Outer
  transformer: Transformer
  optimizer: Optimizer
  schedule: Schedule
  corpus: Corpus
  batch: Batch
  mesh: Mesh
  local: Local
  limits: Limits
  checkpoint: Checkpoint
  origins: Mapping[str, str] = dataclasses.field(
    default_factory=dict, compare=False
  )

  def values(self) -> Iterator[tuple[str, Any]]:
    """Yields (`Component.param`, value), components in their order."""
    for name in COMPONENTS:
      component = getattr(self, name.lower())
      for field in dataclasses.fields(component):
        yield f"{name}.{field.name}", getattr(component, field.name)


def resolve(
  files: Sequence[str | Path] = (),
  bindings: Sequence[str] = (),
  overrides: Mapping[str, tuple[object, str]] | None = None,
) -> Config:
  """Resolves files, then bindings, then flags into a `Config`.

  Args:
    files: gin files, later ones over earlier ones.
    bindings: texts `Component.param=value`; a string may go without quotes.
    overrides: per `Component.param` a value and the flag that set it.

  Raises:
    ConfigError: an unknown name (with the nearest real one), a value of the
      wrong type, or an impossible combination; with file and line.
  """
  origins: dict[str, str] = {}
  with _GIN:
    _register()
    gin.clear_config()
    try:
      for file in files:
        _read_file(Path(file), origins, ())
      for binding in bindings:
        _read_binding(binding, origins)
      for name, (value, flag) in (overrides or {}).items():
        _check_name(*_split(name, flag), flag)
        gin.bind_parameter(name, value)
        origins[name] = flag
      bound = {name: _bound(name) for name in COMPONENTS}
    finally:
      gin.clear_config()
  built = {
    name.lower(): _build(name, bound[name], origins) for name in COMPONENTS
  }
  config = Config(**built, origins={})
  filled = {name: origins.get(name, "default") for name, _ in config.values()}
  return dataclasses.replace(config, origins=types.MappingProxyType(filled))


def validate(
  config: Config,
  *,
  learners: int | None = None,
  devices: int | None = None,
) -> None:
  """Checks what only becomes impossible together with the command line.

  Args:
    config: what was resolved.
    learners: how many learners the run has (None = unknown).
    devices: how many devices one learner has (None = unknown).

  Raises:
    ConfigError: naming both sides.
  """
  quorum = config.exchange.quorum
  if learners is not None and quorum > learners:
    raise ConfigError(
      f"Exchange.quorum = {quorum} is more than --learners={learners}, so no "
      f"round could ever close: choose a quorum of at most {learners}"
      + _sources(config.origins, "Exchange.quorum")
    )
  tokenizer, vocab = config.corpus.tokenizer, config.transformer.vocab
  if tokenizer == "bytes" and vocab < 256:
    raise ConfigError(
      f"Transformer.vocab = {vocab} is too small for Corpus.tokenizer = "
      "'bytes', which has 256 ids: choose at least 256"
      + _sources(config.origins, "Transformer.vocab", "Corpus.tokenizer")
    )
  if devices is not None:
    _validate_mesh(config, devices)


def _validate_mesh(config: Config, devices: int) -> None:
  mesh, sequences = config.mesh, config.batch.sequences
  data = mesh.data or max(1, devices // mesh.fsdp)
  if data * mesh.fsdp > devices:
    raise ConfigError(
      f"Mesh.data = {data} x Mesh.fsdp = {mesh.fsdp} wants "
      f"{data * mesh.fsdp} devices, a learner has {devices}: choose a smaller "
      "mesh, or more --devices_per_host"
      + _sources(config.origins, "Mesh.data", "Mesh.fsdp")
    )
  pieces = data * mesh.fsdp * config.local.microbatches
  if sequences % pieces:
    raise ConfigError(
      f"Batch.sequences = {sequences} is not a multiple of {pieces} = "
      f"{data * mesh.fsdp} devices x Local.microbatches = "
      f"{config.local.microbatches}: choose "
      f"{pieces * max(1, round(sequences / pieces))}, or a smaller mesh"
      + _sources(config.origins, "Batch.sequences", "Local.microbatches")
    )


def replaced(
  config: Config, values: Mapping[str, object], origin: str
) -> Config:
  """The same configuration with other values, checked like any other.

  Args:
    config: what was resolved.
    values: `Component.param` -> value; names must exist.
    origin: where they come from, for people.

  Raises:
    ConfigError: a value of the wrong type, or an impossible combination.
  """
  origins = {**config.origins, **dict.fromkeys(values, origin)}
  bound: dict[str, dict[str, Any]] = {name: {} for name in COMPONENTS}
  for name, value in config.values():
    component, _, param = name.partition(".")
    bound[component][param] = values.get(name, value)
  built = {
    name.lower(): _build(name, bound[name], origins) for name in COMPONENTS
  }
  return Config(**built, origins=types.MappingProxyType(origins))


def contract_lines(config: Config) -> tuple[tuple[str, str], ...]:
  """The `key -> value` lines that every peer of a run must agree on."""
  return tuple(
    (name, _literal(value))
    for name, value in config.values()
    if name.partition(".")[0] in CONTRACT and name not in _NOT_IN_CONTRACT
  )


def contract_difference(
  ours: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]]
) -> tuple[str, str, str] | None:
  """The first (key, our value, their value) that differs, None if all agree."""
  mine, other = dict(ours), dict(theirs)
  for key in [*mine, *(key for key in other if key not in mine)]:
    pair = mine.get(key, "(unset)"), other.get(key, "(unset)")
    if pair[0] != pair[1]:
      return key, *pair
  return None


def gin_text(config: Config) -> str:
  """A gin file that resolves to the same components, origins as comments."""
  lines = ["# Resolved configuration; each value with where it came from."]
  component = ""
  for name, value in config.values():
    if name.partition(".")[0] != component:
      component = name.partition(".")[0]
      kind = "contract" if component in CONTRACT else "local"
      lines += ["", f"# {component} ({kind})"]
    lines.append(f"{name} = {_literal(value)}  # {config.origins[name]}")
  return "\n".join(lines) + "\n"


def json_text(config: Config) -> str:
  """The same as one JSON object: `name -> {value, origin}`."""
  table = {
    name: {"value": value, "origin": config.origins[name]}
    for name, value in config.values()
  }
  return json.dumps(table, indent=2) + "\n"


def show(config: Config, as_json: bool) -> int:
  """`decoupled config`: prints the resolved configuration."""
  print(json_text(config) if as_json else gin_text(config), end="")
  return 0


# ---- reading -----------------------------------------------------------------


def _register() -> None:
  global _registered
  if not _registered:
    for name, component in COMPONENTS.items():
      gin.external_configurable(component, name, module="decoupled")
    _registered = True


def _read_file(
  path: Path, origins: dict[str, str], parents: tuple[Path, ...]
) -> None:
  if path in parents:
    raise ConfigError(f"{path} includes itself, through {parents[-1]}")
  try:
    text = path.read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(_unreadable(path, error)) from None
  for statement in _statements(text, str(path)):
    where = f"{path}:{statement.location.line_num}"
    if isinstance(statement, config_parser.IncludeStatement):
      _read_file(path.parent / statement.filename, origins, (*parents, path))
    else:
      _apply(statement, where, where, origins)


def _read_binding(binding: str, origins: dict[str, str]) -> None:
  where = f"binding {binding!r}"
  for statement in _statements(_quoted(binding), where):
    if isinstance(statement, config_parser.IncludeStatement):
      raise ConfigError(f"{where}: a binding cannot include a file")
    _apply(statement, where, "binding", origins)


def _statements(text: str, where: str) -> Iterator[Any]:
  """Parses with gin; turns its errors into one line with the position."""
  try:
    # Names are checked by `_apply`, which knows the nearest real one.
    yield from config_parser.ConfigParser(
      io.StringIO(text), gin.config.ParserDelegate(skip_unknown=False)
    )
  except ConfigError:
    raise
  except SyntaxError as error:
    line = f":{error.lineno}" if where.endswith(".gin") else ""
    raise ConfigError(
      f"{where}{line}: {str(error.msg).splitlines()[0].rstrip('.')}: "
      f"{(error.text or '').strip()!r}; a line reads Component.param = value"
    ) from None
  except Exception as error:  # gin raises what it likes, with its own location
    message = " ".join(str(error).split())
    raise ConfigError(f"{where}: {message}") from None


def _apply(
  statement: Any, where: str, origin: str, origins: dict[str, str]
) -> None:
  """Binds one statement in gin's table, after checking its names."""
  if isinstance(statement, config_parser.ImportStatement):
    raise ConfigError(
      f"{where}: import {statement.module}: a config only names values, code "
      "is never imported from it; remove the line"
    )
  if statement.scope:
    raise ConfigError(
      f"{where}: scope {statement.scope!r}: every component exists once, so "
      f"write {statement.selector} without a scope"
    )
  selector = statement.selector
  if isinstance(statement, config_parser.BlockDeclaration):
    _check_component(selector, where)
    return
  if not statement.arg_name:  # a macro, `NAME = value`
    gin.bind_parameter((selector, "gin.macro", "value"), statement.value)
    return
  _check_name(selector, statement.arg_name, where)
  gin.bind_parameter(("", selector, statement.arg_name), statement.value)
  origins[f"{selector}.{statement.arg_name}"] = origin


def _bound(name: str) -> dict[str, Any]:
  try:
    return dict(gin.get_bindings(name))
  except Exception as error:  # a macro that nobody defined
    message = " ".join(str(error).split())
    raise ConfigError(f"{name}: {message}") from None


def _quoted(binding: str) -> str:
  """Lets a shell user write `Corpus.path=/data/*.txt` without quotes."""
  key, equals, value = binding.partition("=")
  component, _, param = key.strip().partition(".")
  if not equals or param not in _fields(component):
    return binding
  hint = typing.get_type_hints(COMPONENTS[component])[param]
  value = value.strip()
  if str not in (hint, *typing.get_args(hint)) or value[:1] in ("'", '"', "%"):
    return binding
  if value == "None" and hint is not str:
    return binding
  return f"{key.strip()} = {value!r}"


# ---- names and types ---------------------------------------------------------


def _fields(component: str) -> tuple[str, ...]:
  known = COMPONENTS.get(component)
  return tuple(f.name for f in dataclasses.fields(known)) if known else ()


def _split(name: str, where: str) -> tuple[str, str]:
  component, dot, param = name.partition(".")
  if not dot:
    raise ConfigError(f"{where}: {name!r} does not read Component.param")
  return component, param


def _check_component(component: str, where: str) -> None:
  if component not in COMPONENTS:
    raise ConfigError(
      f"{where}: there is no component {component!r}"
      + _nearest(component, list(COMPONENTS))
    )


def _check_name(component: str, param: str, where: str) -> None:
  name = f"{component}.{param}"
  if component in COMPONENTS and param in _fields(component):
    return
  elsewhere = [f"{c}.{param}" for c in COMPONENTS if param in _fields(c)]
  every = [f"{c}.{p}" for c in COMPONENTS for p in _fields(c)]
  own = [f"{component}.{p}" for p in _fields(component)]
  hint = _nearest(name, own, cutoff=0.75)
  if not hint and elsewhere:
    hint = f"; did you mean {' or '.join(elsewhere)}?"
  raise ConfigError(
    f"{where}: there is no {name}"
    + (hint or _nearest(name, own or every, cutoff=0.0))
  )


def _nearest(name: str, known: list[str], cutoff: float = 0.4) -> str:
  lower = {word.lower(): word for word in known}
  close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=cutoff)
  if close:
    return f"; did you mean {lower[close[0]]}?"
  return "" if cutoff else f"; there are {', '.join(known)}"


def _build(
  name: str, values: dict[str, Any], origins: Mapping[str, str]
) -> Any:
  """Constructs a component; errors get the origin of the values they name."""
  component = COMPONENTS[name]
  hints = typing.get_type_hints(component)
  fitted = {}
  for param, value in values.items():
    key = f"{name}.{param}"
    try:
      fitted[param] = _fit(value, hints[param])
    except TypeError:
      raise ConfigError(
        f"{origins[key]}: {key} = {value!r} must be {_words(hints[param])}, "
        f"not {type(value).__name__}"
      ) from None
  try:
    return component(**fitted)
  except ConfigError as error:
    named = re.findall(r"\b[A-Z]\w*\.\w+", str(error))
    raise ConfigError(f"{error}{_sources(origins, *named)}") from None


def _fit(value: Any, hint: Any) -> Any:
  """Returns `value` as the annotated type; TypeError where it is another."""
  options = typing.get_args(hint) if _is_union(hint) else (hint,)
  for option in options:
    with contextlib.suppress(TypeError):
      return _fit_one(value, option)
  raise TypeError


def _fit_one(value: Any, hint: Any) -> Any:
  if hint is None or hint is types.NoneType:
    if value is None:
      return None
  elif hint is float and type(value) in (int, float):
    return float(value)
  elif typing.get_origin(hint) is tuple and isinstance(value, tuple | list):
    args = typing.get_args(hint)
    kinds = args[:1] * len(value) if args[1:] == (...,) else args
    if len(kinds) == len(value):
      return tuple(map(_fit, value, kinds))
  elif type(value) is hint:  # a bool is not an int here
    return value
  raise TypeError


def _is_union(hint: Any) -> bool:
  return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _words(hint: Any) -> str:
  return (
    getattr(hint, "__name__", str(hint)) if not _is_union(hint) else str(hint)
  )


def _sources(origins: Mapping[str, str], *names: str) -> str:
  """` (name from FILE:LINE, …)` for the named values that were set."""
  known = [
    f"{name} from {origins[name]}"
    for name in dict.fromkeys(names)
    if origins.get(name, "default") != "default"
  ]
  return f" ({', '.join(known)})" if known else ""


def _literal(value: Any) -> str:
  return repr(value)


def _unreadable(path: Path, error: Exception) -> str:
  reason = getattr(error, "strerror", None) or "not UTF-8 text"
  message = f"config {path}: {reason}"
  if not path.exists() and path.parent.is_dir():
    known = [str(other) for other in path.parent.glob("*.gin")]
    close = difflib.get_close_matches(str(path), known, n=1)
    if close:
      return f"{message}; did you mean {close[0]}?"
  return message
