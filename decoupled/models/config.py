"""The shape of the model; part of the run's contract."""

import dataclasses

from decoupled.errors import ConfigError

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Transformer:
  """A decoder-only language model.

  The default has 0.14 M parameters in 30 tensors, enough for 24 fragments,
  and computes in float32: bfloat16 is emulated on most CPUs, hence slower.

  Attributes:
    vocab: number of token ids (256: bytes).
    layers: number of blocks.
    width: size of the residual stream.
    heads: number of query heads; divides width into an even size.
    kv_heads: number of key and value heads; divides heads.
    mlp_width: hidden size of the gated MLP.
    rope_base: longest wavelength of the rotary positions over 2 pi.
    dropout: share of a block's output that is dropped while training.
    scan: stack the layers and scan over them (one compiled block).
    tie_embeddings: use the input embedding as the output head.
    compute_dtype: dtype of activations and matrix products.
    param_dtype: dtype of parameters and gradients.
  """

  vocab: int = 256
  layers: int = 3
  width: int = 64
  heads: int = 4
  kv_heads: int = 2
  mlp_width: int = 128
  rope_base: float = 10_000.0
  dropout: float = 0.0
  scan: bool = False
  tie_embeddings: bool = False
  compute_dtype: str = "float32"
  param_dtype: str = "float32"

  def __post_init__(self) -> None:
    for name in ("vocab", "layers", "width", "heads", "kv_heads", "mlp_width"):
      value = getattr(self, name)
      if value < 1:
        raise ConfigError(f"Transformer.{name} = {value} must be at least 1")
    self._divides("heads", "width")
    self._divides("kv_heads", "heads")
    if self.head_dim % 2:
      raise ConfigError(
        f"Transformer.width = {self.width} over Transformer.heads = "
        f"{self.heads} gives heads of size {self.head_dim}: rotary positions "
        "need an even size"
      )
    if not self.rope_base > 1:
      raise ConfigError(
        f"Transformer.rope_base = {self.rope_base} must be above 1"
      )
    if not 0 <= self.dropout < 1:
      raise ConfigError(
        f"Transformer.dropout = {self.dropout} must be in [0, 1)"
      )
    for name in ("compute_dtype", "param_dtype"):
      value = getattr(self, name)
      if value not in DTYPES:
        raise ConfigError(
          f"Transformer.{name} = {value!r} is not one of {', '.join(DTYPES)}"
        )

  @property
  def head_dim(self) -> int:
    """Size of one attention head."""
    return self.width // self.heads

  @property
  def parameters(self) -> int:
    """How many numbers the model has; projections have no biases."""
    attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
    block = attention + 3 * self.width * self.mlp_width + 2 * self.width
    tables = self.vocab * self.width * (1 if self.tie_embeddings else 2)
    return tables + self.layers * block + self.width

  def _divides(self, small: str, large: str) -> None:
    low, high = getattr(self, small), getattr(self, large)
    if high % low:
      raise ConfigError(
        f"Transformer.{large} = {high} is not a multiple of "
        f"Transformer.{small} = {low}"
      )
