"""A pad stands for accelerator time, and only where there is no accelerator."""

import types

import numpy as np
import pytest

from decoupled import config as configs
from decoupled.learner import taking_part


@pytest.mark.parametrize(("platform", "slept"), [("cpu", 0.2), ("tpu", 0.0)])
def test_only_steps_on_the_cpu_are_padded(platform, slept):
  config = configs.resolve([], ["Local.pad_s=0.2"])
  device = types.SimpleNamespace(platform=platform)
  mesh = types.SimpleNamespace(devices=np.array([device]))
  assert taking_part._pad(config, 0, mesh)() == slept


def test_jitter_spreads_it_evenly_and_by_learner():
  config = configs.resolve([], ["Local.pad_s=0.2", "Local.jitter=0.05"])
  device = types.SimpleNamespace(platform="cpu")
  mesh = types.SimpleNamespace(devices=np.array([device]))
  draws = [
    [taking_part._pad(config, i, mesh)() for _ in range(9)] for i in (0, 1)
  ]
  assert all(0.19 <= x <= 0.21 for row in draws for x in row)
  assert draws[0] != draws[1]
