"""`decoupled drain learner/N`: a planned swap, asked of the syncer."""

import re
from collections.abc import Sequence

from decoupled.errors import ConfigError
from decoupled.launch import address
from decoupled.launch.options import JobOptions
from decoupled.wire import credentials, tls
from decoupled.wire.client import AdminClient

_RESOLVE_S = 5.0
_LEARNER = re.compile(r"learner/(\d+)")


def main(options: JobOptions, words: Sequence[str]) -> int:
  """Returns once a standby has the learner's id.

  Raises:
    DecoupledError: it cannot be swapped, or was not; it trains on.
  """
  learner_id = target(words)
  where = options.syncer_address or f"@{options.workdir / 'syncer.address'}"
  token_file = options.token_file or options.workdir / "run.token"
  with AdminClient(
    address.resolve(where, _RESOLVE_S),
    credentials.read_token(token_file),
    limit_s=options.limit_s,
    tls=tls.client(options.tls_ca) if options.tls_ca else None,
  ) as syncer:
    name = syncer.swap(learner_id)
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
