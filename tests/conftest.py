"""Simulated CPU devices for every test: asked for here, before any backend."""

import os
from pathlib import Path

# Tests compile many small programs once: optimising them costs more than it
# saves. Before JAX is imported, or it is ignored silently.
_QUICK = "--xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}".strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# How fast a machine is says nothing about whether a property holds.
hypothesis.settings.register_profile(
  "any machine",
  deadline=None,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any machine")

DEVICES = 8
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)


def pytest_sessionstart() -> None:
  assert jax.device_count() == DEVICES, (
    f"{jax.device_count()} CPU devices instead of {DEVICES}: something "
    "started the backend before tests/conftest.py"
  )


# Tests that start jobs of many processes; one job at a time, whatever `-n` is.
_JOBS = frozenset({"run", "matrix", "benchmarks", "examples"})


# First, since xdist reads the groups in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  root = Path(__file__).parent
  for item in items:
    if item.path.relative_to(root).parts[0] in _JOBS:
      item.add_marker(pytest.mark.xdist_group("jobs"))


def pytest_collection_finish(session: pytest.Session) -> None:
  """With xdist the group is in the name of a test, or it is in no group."""
  if not getattr(session.config.option, "loadgroup", False):
    return
  for item in session.items:
    if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
      raise pytest.UsageError(
        f"{item.nodeid} is not grouped: jobs would run side by side; this "
        "pytest and this pytest-xdist do not fit each other"
      )
