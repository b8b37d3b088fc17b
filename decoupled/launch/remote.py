"""`status` and `stop` of a job elsewhere: its syncer is asked."""

import time

from decoupled.errors import DecoupledError, Unreachable
from decoupled.launch import address
from decoupled.launch.options import JobOptions
from decoupled.types import Phase
from decoupled.wire import credentials, tls
from decoupled.wire.client import AdminClient
from decoupled.wire.status import JobStatus

_POLL_S = 0.5
_RESOLVE_S = 5.0


def show_status(options: JobOptions) -> int:
  """Prints what the syncer says.

  Raises:
    DecoupledError: it refuses, or cannot be reached.
  """
  with dial(options) as syncer:
    print("\n".join(status_lines(syncer.status())))
  return 0


def stop(options: JobOptions) -> int:
  """Asks the syncer to end the run in order, and waits until it has.

  Raises:
    DecoupledError: as `show_status`; or it has not ended in time.
  """
  with dial(options) as syncer:
    phase = syncer.drain("stopped by `decoupled stop`")
    print(f"asked the syncer at {options.syncer_address} to end the run")
    deadline = time.monotonic() + options.limit_s
    while phase is not Phase.ENDED:
      if time.monotonic() >= deadline:
        raise DecoupledError(
          f"the syncer at {options.syncer_address} has not ended the run "
          f"within {options.limit_s:g} s; it is {phase}"
        )
      time.sleep(_POLL_S)
      try:
        phase = syncer.status().phase
      except Unreachable:
        break  # it has gone
  print("the run has ended")
  return 0


def status_lines(status: JobStatus) -> list[str]:
  """A few lines for people."""
  lines = [
    f"run {status.run_id or '(nobody has joined yet)'}: {status.phase}",
    f"{status.bytes_up} bytes up, {status.bytes_down} bytes down",
  ]
  return (
    lines
    + [
      f"  learner {each.learner_id} ({each.holder}, incarnation "
      f"{each.incarnation}): {each.stage}, step {each.step}, {each.tokens} "
      f"tokens, heard {each.silent_s:.1f} s ago"
      for each in status.learners
    ]
    + [
      f"  {each.name} ({each.holder}): "
      + (f"not ready: {each.missing}" if each.missing else "ready")
      + f" since {each.since_s:.1f} s, fingerprint {each.fingerprint}"
      for each in status.standbys
    ]
    + [f"  {line}" for line in status.vacant]
  )


def dial(options: JobOptions) -> AdminClient:
  """The syncer that is named, or that the workdir's job has published.

  Raises:
    DecoupledError: no address, or no token.
  """
  where = options.syncer_address or f"@{options.workdir / 'syncer.address'}"
  token_file = options.token_file or options.workdir / "run.token"
  return AdminClient(
    address.resolve(where, _RESOLVE_S),
    credentials.read_token(token_file),
    tls=tls.client(options.tls_ca) if options.tls_ca else None,
  )
