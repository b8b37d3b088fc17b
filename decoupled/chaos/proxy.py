"""A TCP proxy between a learner and the syncer that can be cut and healed."""

import asyncio
import contextlib
import threading
from collections.abc import Callable

from decoupled.errors import Unreachable

_CHUNK = 1 << 16
_START_S = 10.0
# (host, port) of the syncer, None while it is not known yet.
Upstream = Callable[[], tuple[str, int] | None]


class Proxy:
  """Forwards 127.0.0.1:port to the syncer; `cut` drops and then refuses.

  It runs an event loop of its own in one daemon thread of the local runner.

  Args:
    upstream: asked at each connection, as a restarted syncer may have moved.
  """

  def __init__(self, upstream: Upstream):
    self._upstream = upstream
    self._cut = False
    self._writers: set[asyncio.StreamWriter] = set()
    self._loop = asyncio.new_event_loop()
    self._started = threading.Event()
    self._port = 0
    self._thread = threading.Thread(
      target=self._serve, name="partition-proxy", daemon=True
    )
    self._thread.start()
    if not self._started.wait(_START_S) or not self._port:
      raise Unreachable("the partition proxy found no free port on 127.0.0.1")

  @property
  def address(self) -> str:
    return f"127.0.0.1:{self._port}"

  def cut(self) -> None:
    """Breaks every connection and refuses new ones until `heal`."""
    self._cut = True
    self._loop.call_soon_threadsafe(self._abort_all)

  def heal(self) -> None:
    self._cut = False

  def close(self) -> None:
    self._cut = True
    with contextlib.suppress(RuntimeError):  # the loop is closed already
      self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(_START_S)

  def _serve(self) -> None:
    asyncio.set_event_loop(self._loop)
    try:
      server = self._loop.run_until_complete(
        asyncio.start_server(self._accept, "127.0.0.1", 0)
      )
      self._port = server.sockets[0].getsockname()[1]
      self._started.set()
      self._loop.run_forever()
      server.close()
      self._abort_all()
      tasks = asyncio.all_tasks(self._loop)
      for task in tasks:
        task.cancel()
      self._loop.run_until_complete(
        asyncio.gather(*tasks, return_exceptions=True)
      )
    finally:
      self._started.set()
      self._loop.close()

  async def _accept(
    self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    address = None if self._cut else self._upstream()
    if address is None:
      writer.transport.abort()
      return
    try:
      far_reader, far_writer = await asyncio.open_connection(*address)
    except OSError:
      writer.transport.abort()
      return
    self._writers |= {writer, far_writer}
    if self._cut:  # cut while connecting
      self._abort_all()
    try:
      await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
    finally:
      self._writers -= {writer, far_writer}
      for end in (writer, far_writer):
        end.transport.abort()

  def _abort_all(self) -> None:
    for writer in list(self._writers):
      writer.transport.abort()


async def _pump(
  reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
  """Copies one direction until either end is gone, then drops both."""
  with contextlib.suppress(OSError):
    while data := await reader.read(_CHUNK):
      writer.write(data)
      await writer.drain()
  writer.close()
