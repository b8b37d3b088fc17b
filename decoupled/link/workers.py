"""Background work of a link: one thread a task, or all of it inline.

A worker holds keys of work to do, each at most once, so its queue is bounded
by the number of fragments. `Inline` runs the same work when told to; the
in-memory network uses it to stay deterministic.
"""

import collections
import threading
from collections.abc import Callable, Hashable
from typing import Protocol

from decoupled import background

Handler = Callable[[Hashable], None]


class Worker(Protocol):
  """Runs `handler(key)` for every key put; a key waiting twice runs once."""

  def put(self, key: Hashable, delay_s: float = 0.0) -> None: ...

  def clear(self) -> None: ...

  def close(self, limit_s: float) -> None: ...


class Threaded:
  """A daemon thread; a handler's exception goes to `on_error`."""

  def __init__(
    self,
    name: str,
    handler: Handler,
    on_error: Callable[[BaseException], None],
  ):
    self._handler = handler
    self._on_error = on_error
    self._keys: collections.OrderedDict[Hashable, None] = (
      collections.OrderedDict()
    )
    self._ready = threading.Condition()
    self._closed = False
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()

  def put(self, key: Hashable, delay_s: float = 0.0) -> None:
    if delay_s > 0:
      timer = threading.Timer(delay_s, self.put, (key,))
      timer.daemon = True
      timer.start()
      return
    with self._ready:
      self._keys[key] = None
      self._ready.notify()

  def clear(self) -> None:
    with self._ready:
      self._keys.clear()

  def close(self, limit_s: float) -> None:
    with self._ready:
      self._closed = True
      self._ready.notify()
    self._thread.join(limit_s)

  def _run(self) -> None:
    background.give_way()
    while True:
      with self._ready:
        while not self._keys and not self._closed:
          self._ready.wait()
        if self._closed:
          return
        key, _ = self._keys.popitem(last=False)
      try:
        self._handler(key)
      except Exception as error:
        self._on_error(error)


class Inline:
  """Work that waits until `run` is called."""

  def __init__(self, handler: Handler):
    self._handler = handler
    self._keys: collections.OrderedDict[Hashable, None] = (
      collections.OrderedDict()
    )

  def put(self, key: Hashable, delay_s: float = 0.0) -> None:
    del delay_s  # due the next time somebody calls `run`
    self._keys[key] = None

  def clear(self) -> None:
    self._keys.clear()

  def close(self, limit_s: float) -> None:
    del limit_s
    self._keys.clear()

  def run(self) -> bool:
    """Does what waits now; returns whether there was anything."""
    waiting = list(self._keys)
    self._keys.clear()
    for key in waiting:
      self._handler(key)
    return bool(waiting)
