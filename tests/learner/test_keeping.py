"""Copies of a host's shards, beside a loop that donates its state."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from decoupled.errors import Unreachable
from decoupled.learner import buddies
from decoupled.learner.copies import compile_copy
from decoupled.learner.keeping import Keeper

_LIMIT_S = 60.0


def test_copies_are_of_their_step_and_a_slow_buddy_delays_no_step() -> None:
  spec = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}
  step_fn = jax.jit(
    lambda tree: jax.tree.map(lambda w: w + 1, tree), donate_argnums=0
  )
  memory, buddy = buddies.Memory(), buddies.Memory()
  reached, go_on = threading.Event(), threading.Event()

  sent: list[int] = []

  def send(copy: buddies.HostCopy) -> None:
    sent.append(copy.step)
    reached.set()
    assert go_on.wait(_LIMIT_S)
    if copy.step == 6:
      raise Unreachable("the buddy is gone")
    buddy.keep(copy)

  keeper = Keeper(memory, 0, 1, 2, compile_copy(spec), send)
  tree = {"w": jnp.zeros(4)}
  begun = []
  for step in range(1, 5):
    tree = step_fn(tree)
    if keeper.after_step(step, tree, {"tokens": 10 * step}):
      begun.append(step)
      assert reached.wait(_LIMIT_S)
  assert begun == [2]  # step 4 came while the buddy was slow
  go_on.set()
  until = time.monotonic() + _LIMIT_S
  while not keeper.after_step(6, tree, {"tokens": 60}):
    assert time.monotonic() < until  # the first one has yet to end
    time.sleep(0.01)
  while 6 not in sent:
    assert time.monotonic() < until
    time.sleep(0.01)
  keeper.close(_LIMIT_S)
  first = buddy.get(0, 2)
  assert first is not None
  assert first.counters == {"tokens": 20}
  np.testing.assert_array_equal(first.shards[0].data, np.full(4, 2, np.float32))
  assert buddy.held() == {0: (2,)}
  assert memory.held() == {0: (2, 6)}  # its own is there whatever the buddy is
