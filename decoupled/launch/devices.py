"""Which devices each process of a local run gets, and its environment."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from decoupled.errors import ConfigError
from decoupled.learner.settings import Mesh

# Settings for one process that would change, or break, another one.
_SCRUBBED = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC", "PJRT_NPROC")
_KEPT_JAX = frozenset({"JAX_COMPILATION_CACHE_DIR"})
_THREAD_VARIABLES = (
  "OMP_NUM_THREADS",
  "OPENBLAS_NUM_THREADS",
  "MKL_NUM_THREADS",
  "VECLIB_MAXIMUM_THREADS",
  "NUMEXPR_NUM_THREADS",
)
_PROBE_S = 60.0
_PROBE = "import jax; d = jax.local_devices(); print(d[0].platform, len(d))"
_VISIBLE = {"gpu": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}


@dataclasses.dataclass(frozen=True)
class Devices:
  """How the learners of a run share this machine.

  Attributes:
    platform: cpu (simulated devices), gpu or tpu.
    per_learner: devices of one learner.
    chips: per learner the accelerators it sees; () for cpu.
  """

  platform: str
  per_learner: int
  chips: tuple[tuple[str, ...], ...] = ()

  @property
  def simulated(self) -> int:
    """CPU devices a learner must simulate, 0 where it has real ones."""
    return self.per_learner if self.platform == "cpu" else 0


def plan(
  learners: int, simulate: int, environ: Mapping[str, str] = os.environ
) -> Devices:
  """Divides visible accelerators among the learners, else simulates.

  Args:
    learners: number of learners.
    simulate: CPU devices per learner where there is no accelerator.
    environ: of this process; JAX_PLATFORMS=cpu asks for the simulation.

  Raises:
    ConfigError: fewer accelerators than learners.
  """
  platform, names = visible_accelerators(environ)
  if not names:
    return Devices("cpu", simulate)
  return Devices(platform, len(names) // learners, divide(names, learners))


def suiting(mesh: Mesh, hosts: int = 1) -> int:
  """CPU devices each host simulates for a mesh: two where it takes any."""
  wanted = mesh.data * mesh.fsdp if mesh.data else max(2 * hosts, mesh.fsdp)
  return -(-wanted // hosts)


def divide(
  names: tuple[str, ...], learners: int
) -> tuple[tuple[str, ...], ...]:
  """Equal shares of the accelerators, neighbours together; a rest stays idle.

  Raises:
    ConfigError: fewer accelerators than learners.
  """
  each = len(names) // learners
  if not each:
    raise ConfigError(
      f"{len(names)} accelerators are visible, fewer than "
      f"--learners={learners}: start fewer learners, or simulate CPU devices "
      "with JAX_PLATFORMS=cpu"
    )
  return tuple(names[i * each : (i + 1) * each] for i in range(learners))


def visible_accelerators(
  environ: Mapping[str, str] = os.environ,
) -> tuple[str, tuple[str, ...]]:
  """(platform, names) of what JAX would use here; ("cpu", ()) for none.

  JAX is asked in a process of its own, as one that has looked at an
  accelerator also holds it.
  """
  asked = environ.get("JAX_PLATFORMS", "").split(",")[0]
  if asked == "cpu" or not _has_device_files():
    return "cpu", ()
  try:
    answer = subprocess.run(
      [sys.executable, "-c", _PROBE],
      capture_output=True,
      text=True,
      timeout=_PROBE_S,
      check=True,
      env=dict(environ),
    )
    platform, count = answer.stdout.split()[-2:]
  except (subprocess.SubprocessError, ValueError):
    return "cpu", ()  # device files without a JAX that can use them
  if platform not in _VISIBLE:
    return "cpu", ()
  named = environ.get(_VISIBLE[platform], "")
  names = named.split(",") if named else [str(i) for i in range(int(count))]
  return platform, tuple(names[: int(count)])


def environment(
  devices: Devices | None,
  learner: int = 0,
  threads: int = 1,
  environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
  """The environment of a child process.

  Args:
    devices: how learners share the machine; None for a process that needs no
      accelerator.
    learner: which learner.
    threads: size of each thread pool (0 = as many as there are cores). NPROC
      is what XLA's CPU client reads; no XLA flag limits it.
    environ: what to start from.
  """
  env = {
    key: value
    for key, value in environ.items()
    if key not in _SCRUBBED and (not key.startswith("JAX_") or key in _KEPT_JAX)
  }
  # gRPC writes a line of its own for every connection that ends
  env.setdefault("GRPC_VERBOSITY", "ERROR")
  if devices is None or devices.platform == "cpu":
    env["JAX_PLATFORMS"] = "cpu"
    if threads:
      env["NPROC"] = str(threads)
  else:
    env[_VISIBLE[devices.platform]] = ",".join(devices.chips[learner])
  if threads:
    env |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
  env["PYTHONUNBUFFERED"] = "1"
  return env


def inherited(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
  """Variables that `environment` does not pass on, named by `doctor`."""
  return tuple(
    sorted(
      key
      for key in environ
      if key in _SCRUBBED or (key.startswith("JAX_") and key not in _KEPT_JAX)
    )
  )


def _has_device_files() -> bool:
  return any(
    any(Path("/dev").glob(pattern))
    for pattern in ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*", "kfd", "dxg")
  )
