"""`decoupled drain learner/N`: a planned swap, asked of the syncer."""

import re
from collections.abc import Sequence

from decoupled.errors import ConfigError
from decoupled.launch import remote
from decoupled.launch.options import JobOptions

_LEARNER = re.compile(r"learner/(\d+)")


def main(options: JobOptions, words: Sequence[str]) -> int:
  """Returns once a standby has the learner's id.

  Raises:
    DecoupledError: it cannot be swapped, or was not; it trains on.
  """
  learner_id = target(words)
  with remote.dial(options) as syncer:
    name = syncer.swap(learner_id, options.limit_s)
  print(f"learner/{learner_id} is {name} from now on; the old one has left")
  return 0


def target(words: Sequence[str]) -> int:
  """The learner's number; raises ConfigError for anything else."""
  said = " ".join(words)
  matched = _LEARNER.fullmatch(said)
  if matched is None:
    raise ConfigError(
      f"{said!r} cannot be drained: name one learner, as learner/0 (this "
      "version swaps whole learners)"
    )
  return int(matched.group(1))
