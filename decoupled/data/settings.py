"""Which text is trained on, and how much of it per step (the contract)."""

import dataclasses

from decoupled.errors import ConfigError

TOKENIZERS = ("bytes",)


@dataclasses.dataclass(frozen=True)
class Corpus:
  """The text and its cut into training and held-out files.

  Attributes:
    path: files, folders and globs, separated by commas or spaces; "" is the
      Python standard library's own source on this machine.
    patterns: names of the files to take from folders.
    heldout_share: share of the files kept for the final evaluation.
    validation_share: share of the files kept for sweeps; never trained on and
      never in the final evaluation.
    context: tokens a sequence predicts.
    tokenizer: bytes.
    max_bytes: upper bound of what is read; a larger corpus is thinned out
      file by file, the same way everywhere.
    unit_windows: sequences in a unit, the piece of the corpus that a learner
      claims.
    epochs: how often the run goes through the corpus; it then ends. 0: as
      often as it likes.
  """

  path: str = ""
  patterns: str = "*.py *.md *.rst *.txt"
  heldout_share: float = 0.05
  validation_share: float = 0.05
  context: int = 64
  tokenizer: str = "bytes"
  max_bytes: int = 16 << 20
  unit_windows: int = 256
  epochs: int = 0

  def __post_init__(self) -> None:
    for name in ("context", "max_bytes", "unit_windows"):
      value = getattr(self, name)
      if value < 1:
        raise ConfigError(f"Corpus.{name} = {value} must be at least 1")
    if self.epochs < 0:
      raise ConfigError(
        f"Corpus.epochs = {self.epochs} must be at least 0 (0 = no end)"
      )
    if not 0 < self.heldout_share < 1:
      raise ConfigError(
        f"Corpus.heldout_share = {self.heldout_share} must lie between 0 and 1"
      )
    if self.validation_share < 0:
      raise ConfigError(
        f"Corpus.validation_share = {self.validation_share} must be at least 0"
      )
    kept = self.heldout_share + self.validation_share
    if kept >= 1:
      raise ConfigError(
        f"Corpus.heldout_share = {self.heldout_share} + "
        f"Corpus.validation_share = {self.validation_share} leaves nothing to "
        "train on: keep their sum below 1"
      )
    if not self.patterns.split():
      raise ConfigError(
        f"Corpus.patterns = {self.patterns!r} matches no file: name some, "
        "such as '*.txt'"
      )
    if self.tokenizer not in TOKENIZERS:
      raise ConfigError(
        f"Corpus.tokenizer = {self.tokenizer!r} is not one of "
        + ", ".join(TOKENIZERS)
      )


@dataclasses.dataclass(frozen=True)
class Batch:
  """What a learner trains on in one inner step.

  Attributes:
    sequences: sequences over all hosts of the learner.
  """

  sequences: int = 8

  def __post_init__(self) -> None:
    if self.sequences < 1:
      raise ConfigError(
        f"Batch.sequences = {self.sequences} must be at least 1"
      )
