"""Where parameters and batches lie."""

import jax
import pytest
from jax.sharding import PartitionSpec

from decoupled.errors import ConfigError
from decoupled.learner import mesh as meshes
from decoupled.learner.settings import Mesh
from decoupled.types import TensorSpec


def test_axes_and_order_of_devices():
  mesh = meshes.make_mesh(Mesh(data=2, fsdp=3))
  assert dict(mesh.shape) == {"data": 2, "fsdp": 3}
  assert list(mesh.devices.flat) == jax.devices()[:6]


def test_data_zero_takes_what_fsdp_divides():
  assert meshes.make_mesh(Mesh(fsdp=4)).shape["data"] == 2
  assert meshes.make_mesh(Mesh(), jax.devices()[:5]).shape["data"] == 5


@pytest.mark.parametrize(("data", "fsdp"), [(3, 3), (0, 9), (9, 1)])
def test_too_few_devices_names_both_numbers(data, fsdp):
  with pytest.raises(ConfigError) as error:
    meshes.make_mesh(Mesh(data, fsdp))
  assert "wants 9 devices" in str(error.value)
  assert "has 8" in str(error.value)


@pytest.mark.parametrize(
  ("spec", "expected"),
  [
    (TensorSpec("w", (4, 8), "float32"), (None, "fsdp")),
    (TensorSpec("w", (8, 8), "float32"), ("fsdp",)),
    (TensorSpec("w", (6, 5), "float32"), ("fsdp",)),
    (TensorSpec("odd", (3, 5), "float32"), ()),
    (TensorSpec("scalar", (), "float32"), ()),
    (TensorSpec("s", (8, 4, 2), "float32", stacked=True), (None, "fsdp")),
    (TensorSpec("s", (8, 3), "float32", stacked=True), ()),
  ],
)
def test_fsdp_takes_the_largest_axis_that_divides_never_the_layers(
  spec, expected
):
  mesh = meshes.make_mesh(Mesh(data=2, fsdp=2))
  assert meshes.param_sharding(spec, mesh).spec == PartitionSpec(*expected)


def test_without_fsdp_everything_is_replicated():
  mesh = meshes.make_mesh(Mesh(data=8))
  spec = TensorSpec("w", (8, 8), "float32")
  assert meshes.param_sharding(spec, mesh).is_fully_replicated


def test_a_batch_must_fill_devices_and_microbatches():
  mesh = meshes.make_mesh(Mesh(data=2, fsdp=2))
  meshes.check_batch(16, 2, mesh)
  with pytest.raises(ConfigError, match="sequences = 12") as error:
    meshes.check_batch(12, 2, mesh)
  assert "microbatches = 2 x 4 devices" in str(error.value)
