"""A plain Optax loop that joins a run; the lines marked `# +` are all it takes.

    decoupled syncer Exchange.H=16 Exchange.P=4 Exchange.tau=8 \
      --bind 127.0.0.1:7077 --workdir runs/plain --learners 2 --rounds 200 &
    python examples/plain_optax.py 127.0.0.1:7077 runs/plain/run.token &
    python examples/plain_optax.py 127.0.0.1:7077 runs/plain/run.token

Both learners see data of their own, and both end with the same parameters.
"""

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decoupled.link import connect  # +

BATCH, STEPS = 512, 100_000


def init(key):
  sizes = [8, 256, 256, 1]
  keys = jax.random.split(key, len(sizes) - 1)
  return {
    f"layer_{i}": {
      "w": jax.random.normal(keys[i], (sizes[i], sizes[i + 1])) * 0.3,
      "b": jnp.zeros(sizes[i + 1]),
    }
    for i in range(len(keys))
  }


def loss_fn(params, x, y):
  for i in range(len(params)):
    layer = params[f"layer_{i}"]
    x = x @ layer["w"] + layer["b"]
    x = jnp.tanh(x) if i + 1 < len(params) else x
  return jnp.mean((x[:, 0] - y) ** 2)


optimizer = optax.adam(3e-3)


@jax.jit
def train_step(params, opt_state, x, y):
  loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
  updates, opt_state = optimizer.update(grads, opt_state)
  return optax.apply_updates(params, updates), opt_state, loss


params = init(jax.random.key(0))
link = connect(sys.argv[1], params, token_file=sys.argv[2])  # +
params = link.begin(params)  # +
opt_state = optimizer.init(params)
rng = np.random.default_rng(link.welcome.learner_id)  # +
for step in range(1, STEPS + 1):
  x = rng.normal(size=(BATCH, 8)).astype(np.float32)
  y = np.sin(x.sum(axis=1))
  params, opt_state, loss = train_step(params, opt_state, x, y)
  params = link.boundary(params, step=step, tokens=step * BATCH)  # +
  if link.done:  # +
    break  # +
link.close()  # +

digest = hashlib.sha256()
for leaf in jax.tree.leaves(params):
  digest.update(np.asarray(leaf).tobytes())
print(f"{step} steps, loss {loss:.4f}, parameters {digest.hexdigest()[:16]}")
