"""Joining a run from any machine: what it agrees on comes from its syncer.

A learner may bring a configuration, a part of one, or none: contract values
that it does not set are the run's, those that it sets must be the run's. One
that sets all of them, as those of `decoupled run` do, has nothing to ask, and
compiles while the syncer still boots.
"""

import ast
import dataclasses
import os
import socket
from collections.abc import Sequence
from typing import Any

from decoupled.config import CONTRACT, Config, contract_lines, replaced
from decoupled.errors import ConfigError, Refused
from decoupled.launch import address
from decoupled.launch.options import LearnerOptions
from decoupled.types import Phase, RunContract
from decoupled.wire import client, credentials, tls

SEED, DIGEST = "run.seed", "Corpus.digest"
_ORIGIN = "the run's syncer"


def holder() -> str:
  """This process, as others name it."""
  return f"{socket.gethostname()}:{os.getpid()}"


def dial(config: Config, options: LearnerOptions) -> client.GrpcLearnerWire:
  """A wire to the syncer, once its address is known.

  Raises:
    ConfigError: a file of the token or of TLS is wrong.
    Unreachable: no syncer has published its address within the limit.
  """
  token = (
    credentials.read_token(options.token_file) if options.token_file else ""
  )
  limits = config.limits
  believed = tls.client(options.tls_ca) if options.tls_ca else None
  return client.GrpcLearnerWire(
    address.resolve(options.syncer_address, limits.connect_s),
    token,
    connect_s=limits.connect_s,
    transfer_s=limits.transfer_s,
    tls=believed,
    moved=lambda: address.published(options.syncer_address),
  )


def complete(config: Config, options: LearnerOptions) -> bool:
  """Whether this learner brings every value of the contract itself."""
  return options.seed is not None and not any(
    config.origins[name] == "default" for name, _ in contract_lines(config)
  )


def adopt(
  config: Config, options: LearnerOptions, run: RunContract
) -> tuple[Config, LearnerOptions]:
  """Fills in what the run has and this learner has not set.

  Raises:
    ConfigError: a value that this learner sets differs; both are named.
    Refused: the run is ending, or another release made its contract.
  """
  if run.phase in (Phase.DRAINING, Phase.ENDED):
    raise Refused("ended", f"run {run.run_id} is ending; nobody joins")
  theirs = dict(run.lines)
  ours = dict(contract_lines(config))
  set_here = {name for name in ours if config.origins[name] != "default"}
  for name in sorted(set_here & theirs.keys()):
    if ours[name] != theirs[name]:
      raise ConfigError(
        f"{name} = {ours[name]} here (from {config.origins[name]}), but run "
        f"{run.run_id} has {name} = {theirs[name]}: leave it out, and it is "
        "taken from the run"
      )
  unset = {
    name: _parsed(name, text)
    for name, text in theirs.items()
    if name.partition(".")[0] in CONTRACT
    and name not in set_here
    and name not in _ADDED
  }
  _known(unset, ours)
  seed = _seed(options, theirs, run.run_id)
  options = dataclasses.replace(options, seed=seed)
  return replaced(config, unset, _ORIGIN), options


def check_corpus(run: RunContract, digest: str) -> None:
  """Raises Refused where this machine's text is not the run's.

  The syncer does so, too, when it is told; but compiling comes before that.
  """
  known = dict(run.lines).get(DIGEST, digest)
  if known != digest:
    raise Refused(
      "contract",
      f"{DIGEST} = {digest} here, but run {run.run_id} has {known}: this "
      "machine's files are others; name the run's with Corpus.path",
    )


# Lines that a learner adds from what it has, not from its configuration.
_ADDED = frozenset({DIGEST, "Corpus.units"})


def _parsed(name: str, text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    raise Refused(
      "contract", f"the run's {name} = {text[:100]} is not readable"
    ) from None


def _known(values: dict[str, Any], ours: dict[str, str]) -> None:
  unknown = [name for name in values if name not in ours]
  if unknown:
    raise Refused(
      "contract",
      f"the run has {unknown[0]} = {values[unknown[0]]!r}, which this release "
      "does not know: install the same release on both sides",
    )


def _seed(options: LearnerOptions, theirs: dict[str, str], run_id: str) -> int:
  said = theirs.get(SEED, "")
  if options.seed is None:
    return int(said) if said.isdecimal() else 0
  if said and said != str(options.seed):
    raise ConfigError(
      f"--seed={options.seed} here, but run {run_id} has {SEED} = {said}: "
      "leave it out, and it is taken from the run"
    )
  return options.seed


def agreed(
  config: Config, seed: int, more: Sequence[tuple[str, str]] = ()
) -> tuple[tuple[str, str], ...]:
  """The contract lines that this learner shows when it joins."""
  return (*contract_lines(config), *more, (SEED, str(seed)))
