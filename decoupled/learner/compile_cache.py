"""The persistent compile cache, and a count of what it saved."""

import os
import threading
from pathlib import Path
from typing import Any

import jax

_HIT = "/jax/compilation_cache/cache_hits"
_MISS = "/jax/compilation_cache/cache_misses"
_COMPILED = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
  """Counts compilations found in the cache, and those it lacked.

  `programs` counts both, and those that no cache was asked for: whatever was
  not in memory.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._hits = 0
    self._misses = 0
    self._programs = 0

  @property
  def programs(self) -> int:
    """Programs compiled or loaded since `enable`."""
    with self._lock:
      return self._programs

  def counts(self) -> dict[str, int]:
    """`{"hits", "misses"}` since `enable`."""
    with self._lock:
      return {"hits": self._hits, "misses": self._misses}

  def _listen(self, event: str, **_: Any) -> None:
    with self._lock:
      self._hits += event == _HIT
      self._misses += event == _MISS

  def _listen_durations(
    self, event: str, duration_secs: float, **_: Any
  ) -> None:
    del duration_secs
    with self._lock:
      self._programs += event == _COMPILED


def enable(directory: str | os.PathLike[str]) -> CompileCounter:
  """Caches every compilation of this process, however short, in a directory.

  The directory becomes readable by its owner only: what lies there is run.

  Args:
    directory: is created if it does not exist. A directory that the user chose
      for all of JAX (JAX_COMPILATION_CACHE_DIR) is used instead, as it is.

  Returns:
    A counter of this process's compilations from now on.
  """
  if not getattr(jax.config, "jax_compilation_cache_dir", None):
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    jax.config.update("jax_compilation_cache_dir", str(path))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  counter = CompileCounter()
  jax.monitoring.register_event_listener(counter._listen)
  jax.monitoring.register_event_duration_secs_listener(
    counter._listen_durations
  )
  return counter
