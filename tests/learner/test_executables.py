"""Twins compile, other processes load; nothing foreign or damaged is run."""

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled.errors import ConfigError, Unreachable
from decoupled.learner import twins
from decoupled.learner.executables import Executables, fingerprint
from tests.learner.test_epochs import service

_LIMIT_S = 240.0
_ROOT = Path(__file__).parents[2]
_ENV = os.environ | {
  "JAX_PLATFORMS": "cpu",
  "NPROC": "1",
  "PYTHONPATH": str(_ROOT),
}


def worker(what: str, rank: int, address: str, folder: Path) -> list[str]:
  module = "tests.learner.executables_worker"
  numbers = (str(rank), "2", address, str(folder))
  return [sys.executable, "-m", module, what, *numbers]


@pytest.mark.slow
def test_what_twins_compiled_runs_on_the_other_rank_without_compiling(
  tmp_path: Path,
) -> None:
  folder = tmp_path / "executables"
  twins.run(
    2, lambda rank, address: worker("save", rank, address, folder), 240.0, _ENV
  )
  assert {p.name for p in folder.iterdir()} == {"step-0.exe", "step-1.exe"}
  real = service(2)
  said: dict[int, Any] = {}

  def one(rank: int) -> None:
    done = subprocess.run(
      worker("load", rank, real.bind, folder),
      capture_output=True,
      text=True,
      timeout=_LIMIT_S,
      env=_ENV,
    )
    lines = [line for line in done.stdout.splitlines() if line[:1] == "{"]
    said[rank] = json.loads(lines[0]) if lines else done.stderr  # Gloo prints

  threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(_LIMIT_S)
  real.close()
  assert all(isinstance(said[rank], dict) for rank in range(2)), said
  assert said[0]["loss"] == said[1]["loss"]
  assert said[0]["compiles"] == said[1]["compiles"] == 0


def test_a_twin_that_fails_is_named_and_none_is_left() -> None:
  script = (
    "import sys, time; sys.exit('no such corpus') if {} else time.sleep(600)"
  )
  with pytest.raises(Unreachable, match=r"twin of rank 1 .*no such corpus"):
    twins.run(
      2, lambda rank, _: [sys.executable, "-c", script.format(rank)], 60.0
    )


@pytest.fixture
def kept(tmp_path: Path) -> Executables:
  kept = Executables(tmp_path / "own", fingerprint(["a"]))
  compiled = jax.jit(jnp.sin).lower(np.float32(0)).compile()
  kept.save("sin", compiled)
  return kept


def test_it_is_saved_and_loaded_in_a_folder_of_the_owner_only(
  kept: Executables,
) -> None:
  assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700
  loaded = kept.load("sin")
  assert loaded is not None
  assert float(loaded(np.float32(1))) == pytest.approx(np.sin(1))
  assert kept.load("cos") is None


def test_another_program_or_version_does_not_fit(kept: Executables) -> None:
  assert Executables(kept.folder, fingerprint(["b"])).load("sin") is None


@pytest.mark.parametrize("at", [3, 60, -1])
def test_one_flipped_bit_anywhere_and_it_is_not_run(
  kept: Executables, at: int
) -> None:
  path = kept.folder / "sin.exe"
  damaged = bytearray(path.read_bytes())
  damaged[at] ^= 1
  path.write_bytes(bytes(damaged))
  assert kept.load("sin") is None
  path.write_bytes(path.read_bytes()[:-10])
  assert kept.load("sin") is None


def test_nothing_that_others_could_have_written_is_run(
  kept: Executables, tmp_path: Path
) -> None:
  path = kept.folder / "sin.exe"
  path.chmod(0o666)
  assert kept.load("sin") is None
  path.chmod(0o600)
  elsewhere = tmp_path / "elsewhere.exe"
  path.rename(elsewhere)
  path.symlink_to(elsewhere)
  assert kept.load("sin") is None
  kept.folder.chmod(0o755)
  with pytest.raises(ConfigError, match="has mode 0755"):
    Executables(kept.folder, kept.fits)
