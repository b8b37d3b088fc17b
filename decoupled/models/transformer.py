"""A decoder-only transformer in Flax NNX.

Pre-norm blocks of grouped-query attention with rotary positions and a gated
MLP, RMSNorm, no biases. Shapes are suffixes of names:

  B: sequences   T: tokens      V: vocabulary   D: width (residual stream)
  F: MLP width   N: query heads K: key and value heads   H: size of a head
  L: layers      S: tokens (of the keys)   G: query heads per key head
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from decoupled.models.config import Transformer as Config

Constrain: TypeAlias = Callable[[jax.Array], jax.Array]

_EMBED_INIT = nnx.initializers.normal(0.02)
_KERNEL_INIT = nnx.initializers.lecun_normal()


def rotate(x_BxTxNxH: jax.Array, base: float) -> jax.Array:
  """Rotary position embedding (Su et al. 2021), halves paired as in LLaMA.

  The pair (x[i], x[i + H/2]) at position t turns by t * base^(-2i/H), so that
  a product of a rotated query and key depends on their distance only.

  Args:
    x_BxTxNxH: queries or keys, any float dtype; computed in float32.
    base: longest wavelength over 2 pi.

  Returns:
    Same shape and dtype.
  """
  half = x_BxTxNxH.shape[-1] // 2
  time_T = jnp.arange(x_BxTxNxH.shape[1], dtype=jnp.float32)
  rate = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle_Tx1xH = (time_T[:, None] * rate)[:, None, :]
  cos, sin = jnp.cos(angle_Tx1xH), jnp.sin(angle_Tx1xH)
  left, right = jnp.split(x_BxTxNxH.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate(
    [left * cos - right * sin, right * cos + left * sin], axis=-1
  )
  return turned.astype(x_BxTxNxH.dtype)


def attend(
  query_BxTxNxH: jax.Array, key_BxSxKxH: jax.Array, value_BxSxKxH: jax.Array
) -> jax.Array:
  """Causal grouped-query attention; softmax in float32.

  Query head n attends with key and value head n // G, G = N / K.

  Args:
    query_BxTxNxH: queries.
    key_BxSxKxH: keys, S = T; K divides N.
    value_BxSxKxH: values.

  Returns:
    mixed_BxTxNxH in the dtype of the values.
  """
  b, t, n, h = query_BxTxNxH.shape
  k = key_BxSxKxH.shape[2]
  query_BxTxKxGxH = query_BxTxNxH.reshape(b, t, k, n // k, h)
  scores_BxKxGxTxS = jnp.einsum(
    "btkgh,bskh->bkgts", query_BxTxKxGxH, key_BxSxKxH
  ).astype(jnp.float32)
  past_TxS = jnp.tril(jnp.ones((t, t), bool))
  scores_BxKxGxTxS = jnp.where(past_TxS, scores_BxKxGxTxS * h**-0.5, -jnp.inf)
  share_BxKxGxTxS = jax.nn.softmax(scores_BxKxGxTxS).astype(value_BxSxKxH.dtype)
  mixed_BxTxKxGxH = jnp.einsum(
    "bkgts,bskh->btkgh", share_BxKxGxTxS, value_BxSxKxH
  )
  return mixed_BxTxKxGxH.reshape(b, t, n, h)


class Attention(nnx.Module):
  """Causal self-attention; N/K query heads share one key and value head."""

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    heads, kv_heads = config.heads, config.kv_heads
    self.rope_base = config.rope_base
    self.query = _linear(config, config.width, (heads, config.head_dim), rngs)
    self.key = _linear(config, config.width, (kv_heads, config.head_dim), rngs)
    self.value = _linear(
      config, config.width, (kv_heads, config.head_dim), rngs
    )
    self.out = _linear(config, (heads, config.head_dim), config.width, rngs)

  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    mixed_BxTxNxH = attend(
      rotate(self.query(x_BxTxD), self.rope_base),
      rotate(self.key(x_BxTxD), self.rope_base),
      self.value(x_BxTxD),
    )
    out_BxTxD: jax.Array = self.out(mixed_BxTxNxH)
    return out_BxTxD


class GatedMlp(nnx.Module):
  """SwiGLU: down(silu(gate(x)) * up(x))."""

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    self.gate = _linear(config, config.width, config.mlp_width, rngs)
    self.up = _linear(config, config.width, config.mlp_width, rngs)
    self.down = _linear(config, config.mlp_width, config.width, rngs)

  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    hidden_BxTxF = jax.nn.silu(self.gate(x_BxTxD)) * self.up(x_BxTxD)
    out_BxTxD: jax.Array = self.down(hidden_BxTxF)
    return out_BxTxD


class Block(nnx.Module):
  """One layer: attention, then MLP, each normed before and added after."""

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    self.attention_norm = _norm(config, rngs)
    self.attention = Attention(config, rngs=rngs)
    self.mlp_norm = _norm(config, rngs)
    self.mlp = GatedMlp(config, rngs=rngs)
    self.dropout = config.dropout

  def __call__(self, x_BxTxD: jax.Array, key: jax.Array | None) -> jax.Array:
    keys = (None, None) if key is None else jax.random.split(key)
    mixed = self.attention(self.attention_norm(x_BxTxD))
    x_BxTxD = x_BxTxD + _drop(mixed, self.dropout, keys[0])
    hidden = self.mlp(self.mlp_norm(x_BxTxD))
    return x_BxTxD + _drop(hidden, self.dropout, keys[1])


class Decoder(nnx.Module):
  """The whole model. With `config.scan`, `layers` is one stacked block.

  Layer l draws its parameters from the same key whether scanned or not, so
  that both forms are the same function with the same initial values.
  """

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    self.scan = config.scan
    self.num_layers = config.layers
    self.embed = nnx.Embed(
      config.vocab,
      config.width,
      dtype=jnp.dtype(config.compute_dtype),
      param_dtype=jnp.dtype(config.param_dtype),
      embedding_init=_EMBED_INIT,
      rngs=rngs,
    )
    keys_L = jax.random.split(rngs.params(), config.layers)
    self.layers: Any = (
      _stacked(config, keys_L)
      if config.scan
      else nnx.Dict(
        {
          _layer_name(i, config.layers): Block(config, rngs=nnx.Rngs(keys_L[i]))
          for i in range(config.layers)
        }
      )
    )
    self.norm = _norm(config, rngs)
    self.head = (
      None
      if config.tie_embeddings
      else _linear(config, config.width, config.vocab, rngs, _EMBED_INIT)
    )

  def __call__(
    self,
    tokens_BxT: jax.Array,
    key: jax.Array | None = None,
    *,
    remat: bool = False,
    constrain: Constrain = lambda x: x,
  ) -> jax.Array:
    """Next-token logits.

    Args:
      tokens_BxT: int32 token ids.
      key: dropout key; None switches dropout off.
      remat: recompute each block in the backward pass.
      constrain: pins the sharding of the residual stream.

    Returns:
      float32 logits_BxTxV.
    """
    x_BxTxD = constrain(self.embed(tokens_BxT))
    keys_L = None if key is None else jax.random.split(key, self.num_layers)
    run = self._scanned if self.scan else self._unrolled
    x_BxTxD = self.norm(run(x_BxTxD, keys_L, remat, constrain))
    logits_BxTxV = (
      self.embed.attend(x_BxTxD) if self.head is None else self.head(x_BxTxD)
    )
    return constrain(logits_BxTxV.astype(jnp.float32))

  def _unrolled(
    self,
    x_BxTxD: jax.Array,
    keys_L: jax.Array | None,
    remat: bool,
    constrain: Constrain,
  ) -> jax.Array:
    for i, layer in enumerate(self.layers.values()):
      graph, params = nnx.split(layer)
      apply = _apply(graph, remat, constrain)
      x_BxTxD = apply(params, x_BxTxD, None if keys_L is None else keys_L[i])
    return x_BxTxD

  def _scanned(
    self,
    x_BxTxD: jax.Array,
    keys_L: jax.Array | None,
    remat: bool,
    constrain: Constrain,
  ) -> jax.Array:
    graph, params_L = nnx.split(self.layers)
    apply = _apply(graph, remat, constrain)

    def body(x: jax.Array, layer: tuple[Any, Any]) -> tuple[jax.Array, None]:
      params, key = layer
      return apply(params, x, key), None

    x_BxTxD, _ = jax.lax.scan(body, x_BxTxD, (params_L, keys_L))
    return x_BxTxD


def _apply(graph: Any, remat: bool, constrain: Constrain) -> Callable[..., Any]:
  """One block as a pure function of its parameters."""

  def apply(params: Any, x_BxTxD: jax.Array, key: Any) -> jax.Array:
    return constrain(nnx.merge(graph, params)(x_BxTxD, key))

  return jax.checkpoint(apply) if remat else apply


def _stacked(config: Config, keys_L: jax.Array) -> Block:
  """One block whose parameters carry a leading layer axis."""
  graph, _ = nnx.split(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))
  params_L = jax.vmap(
    lambda key: nnx.state(Block(config, rngs=nnx.Rngs(key)), nnx.Param)
  )(keys_L)
  block: Block = nnx.merge(graph, params_L)
  return block


def _layer_name(index: int, count: int) -> str:
  """Zero-padded, so that names sort as the layers do."""
  return str(index).zfill(len(str(count - 1)))


def _linear(
  config: Config,
  size_in: Any,
  size_out: Any,
  rngs: nnx.Rngs,
  init: Any = _KERNEL_INIT,
) -> Any:
  axis = tuple(range(-len(size_in), 0)) if isinstance(size_in, tuple) else -1
  return nnx.LinearGeneral(
    size_in,
    size_out,
    axis=axis,
    use_bias=False,
    dtype=jnp.dtype(config.compute_dtype),
    param_dtype=jnp.dtype(config.param_dtype),
    kernel_init=init,
    rngs=rngs,
  )


def _norm(config: Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
  return nnx.RMSNorm(
    config.width,
    dtype=jnp.dtype(config.compute_dtype),
    param_dtype=jnp.dtype(config.param_dtype),
    rngs=rngs,
  )


def _drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  """Inverted dropout; the identity without a rate or without a key."""
  if key is None or not rate:
    return x
  keep = jax.random.bernoulli(key, 1 - rate, x.shape)
  return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
