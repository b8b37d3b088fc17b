"""A standby's executables for a program of several hosts.

A standby must not touch the real job before it is promoted, and its process can
have one backend only. So it starts as many processes as the learner has hosts,
on its own machine, with a coordination service of their own (it may run one: it
needs no backend). They see the devices that the real ranks see, compile, write
what the standby will load (see `executables`), and end.
"""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from decoupled.errors import Unreachable
from decoupled.learner import epochs

_POLL_S = 0.05
_SAID_BYTES = 2000


def run(
  hosts: int,
  command: Callable[[int, str], Sequence[str]],
  limit_s: float,
  environ: Mapping[str, str] = os.environ,
) -> None:
  """Runs the twins of all ranks to their end.

  Args:
    hosts: how many.
    command: the command line for a rank and the address of its service.
    limit_s: for all of it.
    environ: of each.

  Raises:
    Unreachable: one failed, or they were not done by the limit; none is left.
  """
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    bind = f"127.0.0.1:{probe.getsockname()[1]}"
  service = epochs.Service(bind, hosts)
  twins: list[subprocess.Popen[bytes]] = []
  try:
    for rank in range(hosts):
      twins.append(
        subprocess.Popen(
          list(command(rank, bind)),
          env=dict(environ),
          stdin=subprocess.DEVNULL,
          stderr=subprocess.PIPE,
        )
      )
    _wait(twins, time.monotonic() + limit_s, limit_s)
  finally:
    for twin in twins:
      with contextlib.suppress(OSError):
        twin.kill()
      twin.wait()
      if twin.stderr is not None:
        twin.stderr.close()
    epochs.close_in_background(service)


def _wait(
  twins: Sequence["subprocess.Popen[bytes]"], until: float, limit_s: float
) -> None:
  while True:
    status = [twin.poll() for twin in twins]
    for rank, ended in enumerate(status):
      if ended:
        stream = twins[rank].stderr
        said = stream.read() if stream is not None else b""
        text = " ".join(said[-_SAID_BYTES:].decode("utf-8", "replace").split())
        raise Unreachable(
          f"the twin of rank {rank} ended with status {ended}: {text}"
        )
    if all(ended == 0 for ended in status):
      return
    if time.monotonic() >= until:
      late = [str(rank) for rank, ended in enumerate(status) if ended is None]
      raise Unreachable(
        f"the twins of rank {', '.join(late)} have not compiled within "
        f"{limit_s:g} s"
      )
    time.sleep(_POLL_S)
