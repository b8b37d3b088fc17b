"""What the command line asks of each process; model settings are not here.

The configuration (gin) says what is trained; these say where, with whom and
for how long. None of it belongs to the run's contract.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class RunOptions:
  """`decoupled run`: a whole job on this machine.

  Attributes:
    workdir: everything the job writes is below it.
    store: URL of the checkpoints ("" = `<workdir>/checkpoints`).
    learners: number of learners.
    hosts_per_learner: processes of one learner.
    devices_per_host: CPU devices to simulate per process (0 = two).
    standbys: idle hosts kept warm.
    rounds: rounds after which the run ends (0 = no such end).
    tokens: merged tokens after which the run ends (0 = no such end).
    chaos: fault plan, see `chaos.plan` ("" = none).
    seed: of initial parameters, data order and storms.
    resume: auto, never or required.
    http_port: status page (0 = none).
    tape: whether contributions are recorded for `decoupled replay`.
  """

  workdir: Path
  store: str = ""
  learners: int = 3
  hosts_per_learner: int = 1
  devices_per_host: int = 0
  standbys: int = 0
  rounds: int = 0
  tokens: int = 0
  chaos: str = ""
  seed: int = 0
  resume: str = "auto"
  http_port: int = 0
  tape: bool = False


@dataclasses.dataclass(frozen=True)
class SyncerOptions:
  """`decoupled syncer`.

  Attributes:
    workdir: where `syncer.address` and events.jsonl are written.
    store: URL of the checkpoints ("" = `<workdir>/checkpoints`).
    bind: `host:port` or `[::1]:port` to listen on; port 0 = any free one.
    learners: how many learners to wait for at the start.
    rounds: rounds after which the run ends (0 = no such end).
    tokens: merged tokens after which the run ends (0 = no such end).
    seed: the run's seed.
    resume: auto, never or required.
    token_file: file with the run token every call must carry (None = none).
    tls_cert: PEM file with the certificate to show (None = plain text).
    tls_key: PEM file with its key.
    started_at: the job's t = 0 on this machine's monotonic clock (None = now).
    tape: whether contributions are recorded for `decoupled replay`.
  """

  workdir: Path
  store: str = ""
  bind: str = "127.0.0.1:0"
  learners: int = 1
  rounds: int = 0
  tokens: int = 0
  seed: int = 0
  resume: str = "auto"
  token_file: Path | None = None
  tls_cert: Path | None = None
  tls_key: Path | None = None
  started_at: float | None = None
  tape: bool = False


@dataclasses.dataclass(frozen=True)
class LearnerOptions:
  """`decoupled learner`: one host of one learner.

  Attributes:
    workdir: where the learner writes what is its own.
    store: URL of the checkpoints ("" = `<workdir>/checkpoints`).
    syncer_address: `host:port`, `[::1]:port`, or `@FILE` whose one line is
      such an address (it may be written later; see `launch.address`).
    learner_id: the id to claim (-1 = any free one).
    learners: number of learners among whom the data is divided.
    process_id: rank of this host in its learner.
    num_processes: hosts of the learner.
    coordinator_address: of the learner's own `jax.distributed` job.
    token_file: file with the run token (None = none).
    tls_ca: PEM file with the authority to believe (None = plain text).
    seed: the run's seed (None = whatever the run has).
    devices_per_host: CPU devices to simulate (0 = use the devices there are).
    started_at: the job's t = 0 on this machine's monotonic clock (None = now).
  """

  workdir: Path
  store: str = ""
  syncer_address: str = ""
  learner_id: int = -1
  learners: int = 1
  process_id: int = 0
  num_processes: int = 1
  coordinator_address: str = ""
  token_file: Path | None = None
  tls_ca: Path | None = None
  seed: int | None = None
  devices_per_host: int = 0
  started_at: float | None = None

  def role(self, learner_id: int) -> str:
    """What this process is called: of several hosts each by its rank."""
    host = f"/host/{self.process_id}" if self.num_processes > 1 else ""
    return f"learner/{learner_id}{host}"


@dataclasses.dataclass(frozen=True)
class StandbyOptions(LearnerOptions):
  """`decoupled standby`: as a learner, whose id is not known yet.

  Attributes:
    name: how logs and `decoupled status` call it.
  """

  name: str = "standby"


@dataclasses.dataclass(frozen=True)
class CoordinatorOptions:
  """`decoupled coordinator`: where hosts of learners meet.

  Attributes:
    workdir: where `coordinator.address` is written.
    bind: `host:port` or `[::1]:port` to listen on; port 0 = any free one. The
      coordination services take free ports of the same interface.
    token_file: file with the run token (None = `<workdir>/run.token`).
    tls_cert: PEM file with the certificate to show (None = plain text).
    tls_key: PEM file with its key.
    grace_s: from SIGTERM to the end, at most.
  """

  workdir: Path
  bind: str = "127.0.0.1:0"
  token_file: Path | None = None
  tls_cert: Path | None = None
  tls_key: Path | None = None
  grace_s: float = 10.0


@dataclasses.dataclass(frozen=True)
class EvaluateOptions:
  """`decoupled evaluate`: held-out loss of what was saved.

  Attributes:
    workdir: of the run.
    store: URL of the checkpoints ("" = `<workdir>/checkpoints`).
    seed: the run's seed.
    devices_per_host: CPU devices to simulate (0 = use the devices there are).
    started_at: the job's t = 0 on this machine's monotonic clock (None = now).
    follow: evaluate every snapshot as it comes, until the run has ended.
  """

  workdir: Path
  store: str = ""
  seed: int = 0
  devices_per_host: int = 0
  started_at: float | None = None
  follow: bool = False


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
  """`decoupled replay`: which recording, and what it has to lead to.

  Attributes:
    workdir: of the run.
    store: URL of the checkpoints ("" = `<workdir>/checkpoints`).
  """

  workdir: Path
  store: str = ""


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
  """`decoupled doctor`: what a run with these numbers would need.

  Attributes:
    workdir: where it would write.
    learners: number of learners.
    devices_per_host: CPU devices to simulate (0 = two).
  """

  workdir: Path
  learners: int = 3
  devices_per_host: int = 0


@dataclasses.dataclass(frozen=True)
class CheckpointsOptions:
  """`decoupled checkpoints`: which snapshots, unless a path is named.

  Attributes:
    workdir: of the run.
    store: URL of the checkpoints ("" = `<workdir>/checkpoints`).
    as_json: print JSON instead of a table.
  """

  workdir: Path
  store: str = ""
  as_json: bool = False


@dataclasses.dataclass(frozen=True)
class JobOptions:
  """`status`, `stop`, `report`: which job.

  Attributes:
    workdir: of the job.
    limit_s: how long to wait for it.
    syncer_address: of a syncer to ask instead, `host:port` or `@FILE`
      ("" = look at the workdir).
    token_file: file with the run token, for that syncer (None = none).
    tls_ca: PEM file with the authority to believe (None = plain text).
  """

  workdir: Path
  limit_s: float = 60.0
  syncer_address: str = ""
  token_file: Path | None = None
  tls_ca: Path | None = None


@dataclasses.dataclass(frozen=True)
class CertsOptions:
  """`decoupled certs`: certificates for a syncer.

  Attributes:
    out: folder for them.
    hosts: names and addresses of the syncer (none = those of this machine).
    days: how long they are good for.
  """

  out: Path
  hosts: tuple[str, ...] = ()
  days: int = 365


@dataclasses.dataclass(frozen=True)
class SimulateOptions:
  """`decoupled simulate`: a preset, a plan, or one scenario of one's own.

  None leaves a value to the scenario's own default.

  Attributes:
    preset: name of a preset ("" = none).
    plan: recommend a set-up instead of simulating a given one.
    json: print JSON instead of tables.
    plot: PNG to write ("" = none).
    seed: of every simulation.
    repeats: simulations a figure is averaged over (None = a default).
    quick: a reduced size.
    link_gbps: of one learner to the syncer, each way, for a plan.
    scenario: per field of the scenario the value of its flag, where given.
    assign: texts `Part.field=value`, any other field of the scenario.
    correlated: texts `CHIPS:MTBI_DAYS:RETURN_H`, failures of whole groups.
    maintenance: texts `CHIPS:EVERY_DAYS:LASTS_H`, planned absences.
  """

  preset: str = ""
  plan: bool = False
  json: bool = False
  plot: str = ""
  seed: int = 0
  repeats: int | None = None
  quick: bool = False
  link_gbps: float = 10.0
  scenario: Mapping[str, object] = dataclasses.field(default_factory=dict)
  assign: tuple[str, ...] = ()
  correlated: tuple[str, ...] = ()
  maintenance: tuple[str, ...] = ()
