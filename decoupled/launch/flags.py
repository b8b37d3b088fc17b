"""The flags of each command, and the options they become."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from decoupled.errors import ConfigError
from decoupled.launch import folders
from decoupled.launch.options import (
  CertsOptions,
  CheckpointsOptions,
  CoordinatorOptions,
  DoctorOptions,
  EvaluateOptions,
  JobOptions,
  LearnerOptions,
  ReplayOptions,
  RunOptions,
  SimulateOptions,
  StandbyOptions,
  SyncerOptions,
)

RESUME = ("auto", "never", "required")
DEFAULT_ROUNDS = 600

# Flags of `simulate` that are values of its scenario, which checks them.
_SCENARIO: dict[str, tuple[Callable[..., object], str]] = {
  "policy": (
    flags.DEFINE_string,
    "dp_rigid, dp_elastic, diloco or decoupled (default: decoupled)",
  ),
  "chips": (flags.DEFINE_integer, "chips of the job, without standbys"),
  "learners": (flags.DEFINE_integer, "learners that share them"),
  "quorum": (
    flags.DEFINE_integer,
    "reports a round waits for (default: Exchange.quorum)",
  ),
  "standbys": (flags.DEFINE_integer, "idle hosts kept warm"),
  "chips_per_host": (flags.DEFINE_integer, "chips that fail together"),
  "days": (flags.DEFINE_float, "days to simulate"),
  "mtbi_days": (
    flags.DEFINE_float,
    "mean days between interruptions of one chip (default: a year)",
  ),
  "repair_h": (flags.DEFINE_float, "mean hours until a failed chip is back"),
  "step_s": (flags.DEFINE_float, "seconds of an inner step"),
  "speed_spread": (
    flags.DEFINE_float,
    "share by which the speed of learners differs",
  ),
  "params": (
    flags.DEFINE_float,
    "parameters of the model, such as 5e9 (default: those of Transformer)",
  ),
  "price": (flags.DEFINE_float, "price of a chip-hour"),
  "tokens_per_chip_s": (
    flags.DEFINE_float,
    "tokens a chip processes a second, for the cost of one",
  ),
}


def none(values: flags.FlagValues) -> None:
  """A command without flags of its own."""


def config_flags(values: flags.FlagValues) -> None:
  """What every command with a configuration takes."""
  _define(flags.DEFINE_multi_string, values)(
    "gin_file", [], "configuration file; a positional FILE.gin is the same"
  )
  _define(flags.DEFINE_multi_string, values)(
    "gin_bindings",
    [],
    "one value, Component.param=value; positional ones are the same",
  )


def run(values: flags.FlagValues) -> None:
  _workdir(values, "everything the job writes (default: runs/<config name>)")
  _store(values)
  _whole(values, "learners", 3, "number of learners")
  _whole(values, "hosts_per_learner", 1, "processes of one learner")
  _whole(
    values,
    "devices_per_host",
    0,
    "CPU devices to simulate per process where there are no accelerators "
    "(0 = what the mesh wants, else 2)",
  )
  _whole(values, "standbys", 0, "idle hosts kept warm")
  _ends(values, f"default: {DEFAULT_ROUNDS} unless --tokens")
  _define(flags.DEFINE_string, values)(
    "chaos", "", "faults to inject, such as 'kill learner/1 @150r', or @FILE"
  )
  _seed(values)
  _resume(values)
  _whole(values, "http_port", 0, "port of a status page (0 = none)")
  _tape(values)


def syncer(values: flags.FlagValues) -> None:
  _workdir(values, "where syncer.address and events.jsonl are written")
  _store(values)
  _define(flags.DEFINE_string, values)(
    "bind", "127.0.0.1:0", "host:port or [::1]:port; port 0 = any free one"
  )
  _whole(values, "learners", 1, "learners to wait for at the start")
  _ends(values, "0 = no such end")
  _seed(values)
  _resume(values)
  _token_file(values)
  text = _define(flags.DEFINE_string, values)
  text(
    "tls_cert", "", "PEM file of the certificate to show: TLS, not plain text"
  )
  text("tls_key", "", "PEM file of its key (see `decoupled certs`)")
  _started_at(values)
  _tape(values)


def learner(values: flags.FlagValues) -> None:
  _joins(values)
  _define(flags.DEFINE_integer, values)(
    "learner_id", -1, "id to claim (-1 = any free one)", lower_bound=-1
  )
  _whole(values, "learners", 1, "learners among whom the data is divided")
  _whole(values, "process_id", 0, "rank of this host in its learner")
  _whole(values, "num_processes", 1, "hosts of the learner")
  _define(flags.DEFINE_string, values)(
    "coordinator_address", "", "of the learner's own jax.distributed job"
  )


def standby(values: flags.FlagValues) -> None:
  _joins(values)
  _define(flags.DEFINE_string, values)(
    "name", "standby", "how logs and `decoupled status` call it"
  )
  _whole(values, "num_processes", 1, "hosts of the learners that it is for")
  _define(flags.DEFINE_string, values)(
    "coordinator_address", "", "where the hosts of a learner meet"
  )


def _joins(values: flags.FlagValues) -> None:
  """What every process that dials a syncer to train takes."""
  _workdir(
    values,
    "where it writes what is its own (default: a folder of this machine's "
    "temporary one, private and the same for the same syncer)",
  )
  _store(values)
  _define(flags.DEFINE_string, values)(
    "syncer_address",
    "",
    "host:port or [::1]:port of the syncer, or @FILE in which it publishes it "
    "(default: @<workdir>/syncer.address)",
  )
  _whole(
    values, "devices_per_host", 0, "CPU devices to simulate (0 = real ones)"
  )
  _define(flags.DEFINE_integer, values)(
    "seed", None, "the run's seed (default: whatever it has)", lower_bound=0
  )
  _token_file(values)
  _tls_ca(values)
  _started_at(values)


def coordinator(values: flags.FlagValues) -> None:
  _workdir(values, "where coordinator.address is written")
  text = _define(flags.DEFINE_string, values)
  text("bind", "127.0.0.1:0", "host:port or [::1]:port; port 0 = any free one")
  _token_file(values)
  text(
    "tls_cert", "", "PEM file of the certificate to show: TLS, not plain text"
  )
  text("tls_key", "", "PEM file of its key (see `decoupled certs`)")


def evaluate(values: flags.FlagValues) -> None:
  _workdir(values, "of the run")
  _store(values)
  _whole(
    values, "devices_per_host", 0, "CPU devices to simulate (0 = real ones)"
  )
  _seed(values)
  _started_at(values)

  _define(flags.DEFINE_boolean, values)(
    "follow",
    False,
    "evaluate every snapshot as it comes, until the run has ended; the curve "
    "goes to events.jsonl and to <workdir>/metrics/eval",
  )


def replay(values: flags.FlagValues) -> None:
  _workdir(values, "of the run, made with --tape (default: runs/default)")
  _store(values)


def doctor(values: flags.FlagValues) -> None:
  _workdir(values, "where a run would write (default: runs/<config name>)")
  _whole(values, "learners", 3, "number of learners")
  _whole(values, "devices_per_host", 0, "CPU devices to simulate per process")


def simulate(values: flags.FlagValues) -> None:
  text = _define(flags.DEFINE_string, values)
  yes = _define(flags.DEFINE_boolean, values)
  text("preset", "", "reproduce published figures: table1, heterogeneous, …")
  yes("plan", False, "recommend learners, quorum, standbys, codec and H")
  yes("json", False, "print JSON, not tables")
  text("plot", "", "PNG to write")
  _whole(values, "seed", 0, "of every simulation")
  _define(flags.DEFINE_integer, values)(
    "repeats",
    None,
    "simulations a figure is averaged over (default: enough for its interval)",
    lower_bound=1,
  )
  yes("quick", False, "a reduced size")
  _define(flags.DEFINE_float, values)(
    "link_gbps", 10.0, "of one learner to the syncer, each way, for a plan"
  )
  for name, (kind, says) in _SCENARIO.items():
    _define(kind, values)(name, None, says)
  many = _define(flags.DEFINE_multi_string, values)
  many(
    "correlated",
    [],
    "CHIPS:MTBI_DAYS:RETURN_H, failures of whole groups such as racks, slices "
    "or sites",
  )
  many("maintenance", [], "CHIPS:EVERY_DAYS:LASTS_H, planned absences")
  many(
    "set",
    [],
    "any other value of the scenario, such as Recovery.restart_s=300 or "
    "Failures.shape=0.7; docs/simulator.md lists them",
  )


def config(values: flags.FlagValues) -> None:
  _define(flags.DEFINE_boolean, values)("json", False, "print JSON, not gin")


def job(values: flags.FlagValues) -> None:
  _workdir(values, "of the job")


def status(values: flags.FlagValues) -> None:
  job(values)
  _define(flags.DEFINE_string, values)(
    "syncer_address",
    "",
    "host:port of a syncer, or @FILE in which it publishes it, to ask instead "
    "of looking at the workdir",
  )
  _token_file(values)
  _tls_ca(values)


def stop(values: flags.FlagValues) -> None:
  status(values)
  _define(flags.DEFINE_float, values)(
    "limit_s", 120.0, "how long to wait until it has ended", lower_bound=0.0
  )


def drain(values: flags.FlagValues) -> None:
  status(values)
  _define(flags.DEFINE_float, values)(
    "limit_s",
    120.0,
    "how long to wait until the standby has the learner's id",
    lower_bound=0.1,
  )


def checkpoints(values: flags.FlagValues) -> None:
  _workdir(values, "of the run (default: runs/default)")
  _store(values)
  _define(flags.DEFINE_boolean, values)("json", False, "print JSON, no table")


def certs(values: flags.FlagValues) -> None:
  text = _define(flags.DEFINE_string, values)
  text("out", "", "folder for the certificates; nothing in it is overwritten")
  text(
    "hosts",
    "",
    "names and addresses by which learners dial the syncer, separated by "
    "commas (default: those of this machine)",
  )
  _define(flags.DEFINE_integer, values)("days", 365, "how long they are good")


# ---- options -----------------------------------------------------------------


def run_options(values: flags.FlagValues, default: Path) -> RunOptions:
  rounds, tokens = _get(values, "rounds"), _get(values, "tokens")
  if rounds is None:
    rounds = 0 if tokens else DEFAULT_ROUNDS
  return RunOptions(
    workdir=_path(values, default),
    store=_url(values),
    learners=_get(values, "learners"),
    hosts_per_learner=_get(values, "hosts_per_learner"),
    devices_per_host=_get(values, "devices_per_host"),
    standbys=_get(values, "standbys"),
    rounds=rounds,
    tokens=tokens,
    chaos=_get(values, "chaos"),
    seed=_get(values, "seed"),
    resume=_get(values, "resume"),
    http_port=_get(values, "http_port"),
    tape=_get(values, "tape"),
  )


def syncer_options(values: flags.FlagValues, default: Path) -> SyncerOptions:
  _check_pair(values)
  return SyncerOptions(
    workdir=_path(values, default),
    store=_url(values),
    bind=_get(values, "bind"),
    learners=_get(values, "learners"),
    rounds=_get(values, "rounds") or 0,
    tokens=_get(values, "tokens"),
    seed=_get(values, "seed"),
    resume=_get(values, "resume"),
    token_file=_optional_path(values, "token_file"),
    tls_cert=_optional_path(values, "tls_cert"),
    tls_key=_optional_path(values, "tls_key"),
    started_at=_get(values, "started_at"),
    tape=_get(values, "tape"),
  )


def learner_options(values: flags.FlagValues, default: Path) -> LearnerOptions:
  where = _get(values, "syncer_address")
  workdir = _path(values, folders.learner(where) if where else default)
  ranks, rank = _get(values, "num_processes"), _get(values, "process_id")
  if ranks < 1 or rank >= ranks:
    raise ConfigError(
      f"--process_id={rank} must be below --num_processes={ranks}"
    )
  return LearnerOptions(
    workdir=workdir,
    store=_url(values),
    syncer_address=where or f"@{workdir / 'syncer.address'}",
    learner_id=_get(values, "learner_id"),
    learners=_get(values, "learners"),
    process_id=rank,
    num_processes=ranks,
    coordinator_address=_get(values, "coordinator_address"),
    token_file=_optional_path(values, "token_file"),
    tls_ca=_optional_path(values, "tls_ca"),
    seed=_get(values, "seed"),
    devices_per_host=_get(values, "devices_per_host"),
    started_at=_get(values, "started_at"),
  )


def standby_options(values: flags.FlagValues, default: Path) -> StandbyOptions:
  where = _get(values, "syncer_address")
  workdir = _path(values, folders.learner(where) if where else default)
  return StandbyOptions(
    workdir=workdir,
    store=_url(values),
    syncer_address=where or f"@{workdir / 'syncer.address'}",
    token_file=_optional_path(values, "token_file"),
    tls_ca=_optional_path(values, "tls_ca"),
    seed=_get(values, "seed"),
    devices_per_host=_get(values, "devices_per_host"),
    started_at=_get(values, "started_at"),
    num_processes=_get(values, "num_processes"),
    coordinator_address=_get(values, "coordinator_address"),
    name=_get(values, "name"),
  )


def coordinator_options(
  values: flags.FlagValues, default: Path
) -> CoordinatorOptions:
  _check_pair(values)
  return CoordinatorOptions(
    workdir=_path(values, default),
    bind=_get(values, "bind"),
    token_file=_optional_path(values, "token_file"),
    tls_cert=_optional_path(values, "tls_cert"),
    tls_key=_optional_path(values, "tls_key"),
  )


def _check_pair(values: flags.FlagValues) -> None:
  if bool(_get(values, "tls_cert")) != bool(_get(values, "tls_key")):
    raise ConfigError(
      "--tls_cert and --tls_key go together: a certificate and its own key "
      "(see `decoupled certs`)"
    )


def evaluate_options(
  values: flags.FlagValues, default: Path
) -> EvaluateOptions:
  return EvaluateOptions(
    workdir=_path(values, default),
    store=_url(values),
    seed=_get(values, "seed"),
    devices_per_host=_get(values, "devices_per_host"),
    started_at=_get(values, "started_at"),
    follow=_get(values, "follow"),
  )


def replay_options(values: flags.FlagValues, default: Path) -> ReplayOptions:
  return ReplayOptions(_path(values, default), _url(values))


def doctor_options(values: flags.FlagValues, default: Path) -> DoctorOptions:
  return DoctorOptions(
    workdir=_path(values, default),
    learners=_get(values, "learners"),
    devices_per_host=_get(values, "devices_per_host"),
  )


def simulate_options(
  values: flags.FlagValues, default: Path
) -> SimulateOptions:
  del default  # it has no workdir
  given = {
    name: _get(values, name)
    for name in _SCENARIO
    if _get(values, name) is not None
  }
  return SimulateOptions(
    preset=_get(values, "preset"),
    plan=_get(values, "plan"),
    json=_get(values, "json"),
    plot=_get(values, "plot"),
    seed=_get(values, "seed"),
    repeats=_get(values, "repeats"),
    quick=_get(values, "quick"),
    link_gbps=_get(values, "link_gbps"),
    scenario=given,
    assign=tuple(_get(values, "set")),
    correlated=tuple(_get(values, "correlated")),
    maintenance=tuple(_get(values, "maintenance")),
  )


def job_options(values: flags.FlagValues, default: Path) -> JobOptions:
  limit_s = _get(values, "limit_s") if "limit_s" in values else 60.0
  workdir = _path(values, default)
  if "syncer_address" not in values:
    return JobOptions(workdir, limit_s)
  return JobOptions(
    workdir,
    limit_s,
    syncer_address=_get(values, "syncer_address"),
    token_file=_optional_path(values, "token_file"),
    tls_ca=_optional_path(values, "tls_ca"),
  )


def certs_options(values: flags.FlagValues, default: Path) -> CertsOptions:
  del default  # it has no workdir
  if not _get(values, "out"):
    raise ConfigError("name a folder for the certificates: --out DIR")
  hosts = [host.strip() for host in _get(values, "hosts").split(",")]
  return CertsOptions(
    Path(_get(values, "out")), tuple(filter(None, hosts)), _get(values, "days")
  )


def checkpoints_options(
  values: flags.FlagValues, default: Path
) -> CheckpointsOptions:
  return CheckpointsOptions(
    _path(values, default), _url(values), bool(_get(values, "json"))
  )


def _get(values: flags.FlagValues, name: str) -> Any:
  return values[name].value


# ---- one flag each -----------------------------------------------------------


def _define(
  definer: Callable[..., object], values: flags.FlagValues
) -> Callable[..., object]:
  def define(name: str, default: object, text: str, **more: object) -> object:
    return definer(name, default, text, flag_values=values, **more)

  return define


def _workdir(values: flags.FlagValues, text: str) -> None:
  _define(flags.DEFINE_string, values)("workdir", "", text)


def _store(values: flags.FlagValues) -> None:
  _define(flags.DEFINE_string, values)(
    "store", "", "URL of the checkpoints (default: <workdir>/checkpoints)"
  )


def _whole(
  values: flags.FlagValues, name: str, default: int, text: str
) -> None:
  _define(flags.DEFINE_integer, values)(name, default, text, lower_bound=0)


def _ends(values: flags.FlagValues, default: str) -> None:
  _define(flags.DEFINE_integer, values)(
    "rounds",
    None,
    f"rounds after which the run ends ({default})",
    lower_bound=0,
  )
  _whole(
    values, "tokens", 0, "tokens after which the run ends (0 = no such end)"
  )


def _seed(values: flags.FlagValues) -> None:
  _whole(values, "seed", 0, "of initial parameters, data order and storms")


def _resume(values: flags.FlagValues) -> None:
  flags.DEFINE_enum(
    "resume",
    "auto",
    list(RESUME),
    "continue what the workdir holds: if its contract matches, never, or "
    "refuse to start anew",
    flag_values=values,
  )


def _token_file(values: flags.FlagValues) -> None:
  _define(flags.DEFINE_string, values)(
    "token_file", "", "file with the token that every call must carry"
  )


def _tls_ca(values: flags.FlagValues) -> None:
  _define(flags.DEFINE_string, values)(
    "tls_ca",
    "",
    "PEM file of the authority that signed the syncer's certificate: TLS, not "
    "plain text",
  )


def _tape(values: flags.FlagValues) -> None:
  _define(flags.DEFINE_boolean, values)(
    "tape",
    False,
    "record every merged contribution in <workdir>/tape, for `decoupled "
    "replay`; at most Checkpoint.tape_mib",
  )


def _started_at(values: flags.FlagValues) -> None:
  _define(flags.DEFINE_float, values)(
    "started_at",
    None,
    "the job's t = 0 on this machine's monotonic clock (default: now)",
  )


def _path(values: flags.FlagValues, default: Path) -> Path:
  return Path(_get(values, "workdir") or default)


def _url(values: flags.FlagValues) -> str:
  """The store; a URL of this machine's own files is the folder itself."""
  store = str(_get(values, "store"))
  return store.removeprefix("file://")


def _optional_path(values: flags.FlagValues, name: str) -> Path | None:
  return Path(_get(values, name)) if _get(values, name) else None
