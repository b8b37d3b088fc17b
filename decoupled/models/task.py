"""What is trained: a loss over a pure pytree of parameters.

An NNX module is split once, here; everything outside sees nested dictionaries
of arrays and pure functions of them.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from decoupled.link import tree
from decoupled.models.config import Transformer
from decoupled.models.transformer import Decoder
from decoupled.types import Role, TensorSpec

Params: TypeAlias = Any  # nested dict of arrays
Metrics: TypeAlias = dict[str, jax.Array]

_EMBEDDINGS = ("embed", "head")  # first component of their names


class Task(Protocol):
  """Everything the inner step knows about what it trains."""

  def param_specs(self) -> Params:
    """The parameters as shapes and dtypes; nothing is computed."""
    ...

  def init(self, seed: Any) -> Params:
    """Initial parameters; the same seed gives the same ones everywhere."""
    ...

  def tensor_specs(self) -> tuple[TensorSpec, ...]:
    """The parameters as the wire knows them, in the order of the leaves."""
    ...

  def loss(
    self, params: Params, batch: Any, key: jax.Array | None
  ) -> tuple[jax.Array, Metrics]:
    """Mean loss over the batch's tokens, and `tokens` among the metrics."""
    ...


class Split(NamedTuple):
  """An NNX module taken apart: its graph, and its parameters' specs."""

  graph: Any
  specs: Params


@dataclasses.dataclass(frozen=True)
class LanguageModel:
  """Next-token prediction over batches int32 tokens_BxT+1.

  Attributes:
    config: the model's shape.
    remat: recompute blocks in the backward pass.
    activations: sharding of the leading axis of activations, on a mesh of
      several devices (see `learner.mesh.batch_sharding`); None = XLA's choice.
  """

  config: Transformer
  remat: bool = False
  activations: jax.sharding.NamedSharding | None = None

  def param_specs(self) -> Params:
    """Nested dict of `ShapeDtypeStruct`."""
    return _split(self.config).specs

  def init(self, seed: Any) -> Params:
    """Initial parameters from an integer seed (traceable)."""
    decoder = Decoder(self.config, rngs=nnx.Rngs(jax.random.key(seed)))
    return nnx.to_pure_dict(nnx.state(decoder, nnx.Param))

  def roles(self, params: Params) -> Any:
    """A tree of roles: input embedding and output head apart (RDA)."""
    return tree.unflatten(params, [_role(name) for name in tree.names(params)])

  def tensor_specs(self) -> tuple[TensorSpec, ...]:
    """Specs in the order of the parameters' leaves."""
    specs = self.param_specs()
    return tree.tensor_specs(specs, self.roles(specs), self._is_stacked)

  def logits(
    self, params: Params, tokens_BxT: jax.Array, key: jax.Array | None = None
  ) -> jax.Array:
    """float32 logits_BxTxV; without a key there is no dropout."""
    decoder = nnx.merge(_split(self.config).graph, params)
    logits_BxTxV: jax.Array = decoder(
      tokens_BxT, key, remat=self.remat, constrain=self._constrain
    )
    return logits_BxTxV

  def loss(
    self, params: Params, batch: jax.Array, key: jax.Array | None
  ) -> tuple[jax.Array, Metrics]:
    """Mean cross-entropy in nats per token.

    Args:
      params: the parameters.
      batch: int32 tokens_BxT+1; token t + 1 is the target of token t.
      key: dropout key, None for evaluation.

    Returns:
      float32 scalar, and `tokens`, the int32 number of targets.
    """
    inputs_BxT, targets_BxT = batch[:, :-1], batch[:, 1:]
    logits_BxTxV = self.logits(params, inputs_BxT, key)
    picked_BxT = jnp.take_along_axis(
      logits_BxTxV, targets_BxT[..., None], axis=-1
    )[..., 0]
    nats_BxT = jax.nn.logsumexp(logits_BxTxV, axis=-1) - picked_BxT
    return jnp.mean(nats_BxT), {"tokens": jnp.int32(targets_BxT.size)}

  def num_params(self) -> int:
    """Number of parameters."""
    return sum(math.prod(s.shape) for s in tree.flatten(self.param_specs()))

  def flops_per_token(self, context: int) -> float:
    """Model FLOPs of one trained token, forward and backward.

    6 per parameter of a matrix product, plus 12 x layers x width x context
    for attention (PaLM, appendix B: causality is not credited).
    """
    config = self.config
    lookup = 0 if config.tie_embeddings else config.vocab * config.width
    matrices = self.num_params() - lookup
    attention = 12 * config.layers * config.width * context
    return float(6 * matrices + attention)

  def _is_stacked(self, name: str) -> bool:
    return self.config.scan and name.startswith("layers/")

  def _constrain(self, x: jax.Array) -> jax.Array:
    if self.activations is None:
      return x
    pinned: jax.Array = jax.lax.with_sharding_constraint(x, self.activations)
    return pinned


@functools.cache
def _split(config: Transformer) -> Split:
  decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
  graph, params = nnx.split(decoder)
  return Split(graph, nnx.to_pure_dict(params))


def _role(name: str) -> Role:
  return Role.EMBEDDING if name.split("/")[0] in _EMBEDDINGS else Role.WEIGHT
