"""How learners share a machine, and what their environment holds."""

import pytest

from decoupled.errors import ConfigError
from decoupled.launch import devices
from decoupled.launch.devices import Devices
from decoupled.learner.settings import Mesh


def test_accelerators_are_divided_evenly_and_neighbours_stay_together():
  names = tuple("01234567")
  assert devices.divide(names, 3) == (("0", "1"), ("2", "3"), ("4", "5"))
  assert devices.divide(names, 2) == (tuple("0123"), tuple("4567"))
  with pytest.raises(ConfigError, match=r"2 accelerators .* --learners=3"):
    devices.divide(("0", "1"), 3)


def test_cpu_devices_are_simulated_where_that_is_asked_for():
  plan = devices.plan(3, 4, {"JAX_PLATFORMS": "cpu"})
  assert plan == Devices("cpu", 4)
  assert plan.simulated == 4


def test_as_many_devices_as_the_mesh_wants():
  assert devices.suiting(Mesh()) == 2
  assert devices.suiting(Mesh(fsdp=4)) == 4
  assert devices.suiting(Mesh(data=2, fsdp=2)) == 4
  assert devices.suiting(Mesh(data=1, fsdp=1)) == 1


def test_inherited_settings_of_jax_are_dropped_and_the_rest_is_kept():
  environ = {
    "HOME": "/home/me",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_ENABLE_X64": "1",
    "JAX_PLATFORMS": "cuda",
    "JAX_COMPILATION_CACHE_DIR": "/cache",
    "NPROC": "64",
  }
  env = devices.environment(Devices("cpu", 2), 0, 1, environ)
  assert env["HOME"] == "/home/me"
  assert env["JAX_COMPILATION_CACHE_DIR"] == "/cache"
  assert env["JAX_PLATFORMS"] == "cpu"
  assert env["NPROC"] == env["OMP_NUM_THREADS"] == "1"
  assert "XLA_FLAGS" not in env
  assert "JAX_ENABLE_X64" not in env
  assert devices.inherited(environ) == (
    "JAX_ENABLE_X64",
    "JAX_PLATFORMS",
    "NPROC",
    "XLA_FLAGS",
  )


def test_threads_are_left_alone_on_request():
  env = devices.environment(Devices("cpu", 2), 0, 0, {})
  assert "NPROC" not in env
  assert "OMP_NUM_THREADS" not in env


def test_a_learner_sees_its_own_accelerators_only():
  plan = Devices("gpu", 2, (("0", "1"), ("4", "5")))
  env = devices.environment(plan, 1, 1, {"CUDA_VISIBLE_DEVICES": "0,1,4,5"})
  assert env["CUDA_VISIBLE_DEVICES"] == "4,5"
  assert "JAX_PLATFORMS" not in env
  assert plan.simulated == 0
