"""A rank that compiles and keeps a toy program, or loads and runs it.

    python -m tests.learner.executables_worker save|load RANK HOSTS ADDRESS DIR

Not a test; `test_executables` starts it.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decoupled.learner import epochs
from decoupled.learner.executables import Executables, fingerprint

_COMPILED = "/jax/core/compile/backend_compile_duration"
LIMITS = epochs.EpochLimits(connect_s=90.0, collective_s=30)


class State(NamedTuple):
  """A tree of the program's own, as that of an optimizer."""

  w: Any
  moment: dict[str, Any]


def main() -> None:
  what, rank, hosts, address, folder = sys.argv[1:6]
  compiles: list[str] = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: (
      compiles.append(event) if event == _COMPILED else None
    )
  )
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 2)
  epochs.prepare(LIMITS)
  epochs.connect(address, int(rank), int(hosts), LIMITS)
  mesh = Mesh(np.array(jax.devices()).reshape(int(hosts), 2), ("data", "fsdp"))
  rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
  cut = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
  kept = Executables(Path(folder), fingerprint(["toy"]))
  if what == "save":
    spec = jax.ShapeDtypeStruct((4, 8), np.float32, sharding=cut)
    state = State(spec, {"m": spec})
    batch = jax.ShapeDtypeStruct((2 * int(hosts), 4), np.float32, sharding=rows)
    step = jax.jit(
      _step, donate_argnums=0, out_shardings=(State(cut, {"m": cut}), None)
    )
    kept.save(f"step-{rank}", step.lower(state, batch).compile())
    return
  began = time.monotonic()
  other = (int(rank) + 1) % int(hosts)
  step = kept.load(f"step-{other}")
  assert step is not None
  loaded_s = time.monotonic() - began
  whole = np.arange(32, dtype=np.float32).reshape(4, 8)
  state = State(_place(whole, cut), {"m": _place(whole * 0, cut)})
  for number in range(3):
    batch = np.full((2 * int(hosts), 4), number + 1, np.float32)
    state, loss = step(state, _place(batch, rows))
  print(
    json.dumps(
      {
        "loss": float(np.asarray(loss)),
        "compiles": len(compiles),
        "load_s": loaded_s,
      }
    )
  )


def _step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
  def loss_of(w: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(batch @ w))

  loss, grad = jax.value_and_grad(loss_of)(state.w)
  moment = 0.9 * state.moment["m"] + grad
  return State(state.w - 0.1 * moment, {"m": moment}), loss


def _place(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
  return jax.make_array_from_callback(
    value.shape, sharding, lambda index: value[index]
  )


if __name__ == "__main__":
  main()
