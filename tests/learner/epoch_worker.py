"""A rank that trains a toy in an epoch, and in the next one when that breaks.

    python -m tests.learner.epoch_worker RANK HOSTS DEVICES STEPS

Reads a line for each epoch to join: `ADDRESS` of its service, or `FILE TOKEN
EPOCH` to meet at the coordinator that publishes its address there. Says what
happens as JSON, a line each. Not a test; `test_epochs` starts it.
"""

import json
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decoupled.learner import epochs, rendezvous

LIMITS = epochs.EpochLimits(connect_s=60.0, collective_s=3)
PAUSE_S = 0.02


def say(what: str, **more: object) -> None:
  print(json.dumps({"what": what, **more}), flush=True)


class Toy:
  """State replicated over the hosts; each adds what its rank gives."""

  def __init__(self, rank: int):
    self.rank = rank
    mesh = Mesh(np.array(jax.devices()), ("hosts",))
    self._all = NamedSharding(mesh, PartitionSpec())
    self._rows = NamedSharding(mesh, PartitionSpec("hosts"))
    self._local = jax.local_device_count()
    self.step_fn = jax.jit(self._step, out_shardings=self._all)
    self.sum_fn = jax.jit(lambda x: x.sum(0), out_shardings=self._all)
    self.max_fn = jax.jit(lambda x: x.max(0), out_shardings=self._all)

  def rows(self, row: Any) -> jax.Array:
    local = np.repeat(np.asarray(row)[None], self._local, 0)
    return jax.make_array_from_process_local_data(self._rows, local)

  def place(self, value: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(
      value.shape, self._all, lambda index: value[index]
    )

  def _step(self, w: jax.Array, x: jax.Array) -> jax.Array:
    return w + 0.1 * jnp.sin(w) + jnp.mean(x, 0)

  def agree(self, step: int, w: np.ndarray, before: np.ndarray) -> Any:
    """(step, state) of the least step that a host with a state has."""
    high = 1_000_000
    least = high - int(
      np.asarray(self.max_fn(self.rows(np.int32(high - step if step else 0))))
    )
    if least == high:
      return 0, w
    mine = {step: w, step - 1: before}.get(least)
    holds = np.float32(mine is not None and step > 0)
    votes = self.sum_fn(self.rows(holds))
    total = self.sum_fn(self.rows(np.zeros_like(w) if not holds else mine))
    return least, np.asarray(total) / np.asarray(votes)


def join(words: list[str], rank: int, hosts: int) -> None:
  if len(words) == 1:
    epochs.connect(words[0], rank, hosts, LIMITS)
    return
  file, token, epoch = words
  holder = f"h:{os.getpid()}"
  rendezvous.meet(f"@{file}", token, 0, int(epoch), hosts, rank, holder, LIMITS)


def main() -> None:
  rank, hosts, devices, steps = map(int, sys.argv[1:5])
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", devices)
  epochs.prepare(LIMITS)
  w = before = np.zeros(4, np.float32)
  step = 0
  say("started")
  for line in sys.stdin:
    began = time.monotonic()
    try:
      join(line.split(), rank, hosts)
    except epochs.Lost as error:
      say("lost", step=step, error=str(error))
      continue
    connected = time.monotonic()
    state = None
    try:
      toy = Toy(rank)
      step, w = toy.agree(step, w, before)
      state = toy.place(w)
      first = True
      while step < steps:
        row = np.full(4, (rank + 1) * 0.01 * np.cos(step), np.float32)
        state = toy.step_fn(state, toy.rows(row))
        before, w = w, np.asarray(state)
        step += 1
        if first:
          epochs.settle()
          say(
            "formed",
            step=step,
            connect_s=connected - began,
            first_step_s=time.monotonic() - connected,
          )
          first = False
        if step % 10 == 0:
          say("step", step=step)
        time.sleep(PAUSE_S)
      say("done", step=step, w=w.tolist(), released=epochs.released(10.0))
      return
    except Exception as error:
      if not epochs.lost_peer(error):
        raise
      text = " ".join(f"{type(error).__name__}: {error}".split())
    noticed = time.monotonic()
    toy = state = None
    epochs.tear_down()
    say(
      "lost",
      step=step,
      error=text[:200],
      torn_s=time.monotonic() - noticed,
    )


if __name__ == "__main__":
  main()
