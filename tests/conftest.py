"""Simulated CPU devices for every test: asked for here, before any backend."""

import jax

DEVICES = 8
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)


def pytest_sessionstart() -> None:
  assert jax.device_count() == DEVICES, (
    f"{jax.device_count()} CPU devices instead of {DEVICES}: something "
    "started the backend before tests/conftest.py"
  )
