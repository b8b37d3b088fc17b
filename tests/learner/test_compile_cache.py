"""A second process finds what the first one compiled."""

import json
import os
import stat
import subprocess
import sys

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from decoupled.learner import compile_cache
jax.config.update("jax_platforms", "cpu")
counter = compile_cache.enable(sys.argv[1])
spec = jax.ShapeDtypeStruct((3,), jnp.float32)
jax.jit(lambda x: jnp.sin(x) * 2).lower(spec).compile()
print(json.dumps(counter.counts()))
"""


def counts(directory, **environ: str) -> dict[str, int]:
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM, str(directory)],
    capture_output=True,
    text=True,
    timeout=120,
    env=os.environ | environ,
    check=True,
  )
  return json.loads(done.stdout)


def test_miss_then_hit_in_a_directory_of_the_owner_only(tmp_path):
  cache = tmp_path / "deep" / "cache"
  assert counts(cache) == {"hits": 0, "misses": 1}
  assert counts(cache) == {"hits": 1, "misses": 0}
  assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_the_directory_that_the_user_chose_for_jax_is_used(tmp_path):
  shared = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "shared")}
  assert counts(tmp_path / "one", **shared) == {"hits": 0, "misses": 1}
  assert counts(tmp_path / "other", **shared) == {"hits": 1, "misses": 0}
  assert not (tmp_path / "one").exists()
