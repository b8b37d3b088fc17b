"""A TCP relay in a thread: counts what passes, and can cut it."""

import contextlib
import dataclasses
import select
import socket
import threading

from decoupled.wire.address import Address


@dataclasses.dataclass(eq=False)
class Pair:
  """One connection through the relay; `port` is the client's."""

  client: socket.socket
  server: socket.socket
  port: int
  bytes_seen: int = 0


class Relay:
  """Listens on loopback and passes everything on to `to`."""

  def __init__(self, to: Address):
    self._to = to
    self._listener = socket.create_server(("127.0.0.1", 0))
    self.address = Address("127.0.0.1", self._listener.getsockname()[1])
    self.pairs: list[Pair] = []
    self._open = True
    self._flowing = threading.Event()
    self._flowing.set()
    self._threads = [threading.Thread(target=self._accept)]
    self._threads[0].start()

  def __enter__(self) -> "Relay":
    return self

  def __exit__(self, *_: object) -> None:
    self._open = False
    self._flowing.set()
    with contextlib.suppress(OSError):
      self._listener.shutdown(socket.SHUT_RDWR)
    self._listener.close()
    self.cut()
    for thread in self._threads:
      thread.join(10)

  def cut(self) -> None:
    """Breaks every connection; new ones are welcome."""
    for pair in self.pairs:
      for end in (pair.client, pair.server):
        with contextlib.suppress(OSError):
          end.shutdown(socket.SHUT_RDWR)

  def freeze(self) -> None:
    """Swallows everything from now on, without closing anything."""
    self._flowing.clear()

  def _accept(self) -> None:
    while self._open:
      try:
        client, (_, port) = self._listener.accept()
      except OSError:
        return
      server = socket.create_connection((self._to.host, self._to.port))
      pair = Pair(client, server, port)
      self.pairs.append(pair)
      thread = threading.Thread(target=self._pass_on, args=(pair,))
      self._threads.append(thread)
      thread.start()

  def _pass_on(self, pair: Pair) -> None:
    other = {pair.client: pair.server, pair.server: pair.client}
    with pair.client, pair.server, contextlib.suppress(OSError):
      while True:
        ready, _, _ = select.select([pair.client, pair.server], [], [], 10)
        self._flowing.wait(60)
        for end in ready:
          data = end.recv(1 << 16)
          if not data:
            return
          pair.bytes_seen += len(data)
          other[end].sendall(data)
