"""A standby's stream to the pool: what it says, and the newest word to it."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from decoupled.errors import DecoupledError, Refused, Unreachable
from decoupled.types import PoolWord, Standing
from decoupled.wire import messages
from decoupled.wire.proto.decoupled.v1 import pool_pb2 as pb

_FIRST_BEAT_S = 1.0  # until the syncer has said how often


class PoolStream:
  """One stream, from opening to loss; made for one thread that waits on it.

  Args:
    open_call: starts the call with the messages to send.
    standing: the first thing said.
    describe: turns the call's failure into an error.
  """

  def __init__(
    self,
    open_call: Callable[[Iterator[pb.Standing]], Any],
    standing: Standing,
    describe: Callable[[grpc.RpcError], DecoupledError],
  ):
    self._describe = describe
    self._changed = threading.Condition()
    self._standing = standing
    self._unsaid = True
    self._closed = False
    self._beat_s = _FIRST_BEAT_S
    self._word: PoolWord | None = None
    self._error: DecoupledError | None = None
    self._call = open_call(self._outgoing())
    threading.Thread(target=self._read, name="pool-reader", daemon=True).start()

  def say(self, standing: Standing) -> None:
    """Replaces what was said; goes out at once."""
    with self._changed:
      self._standing, self._unsaid = standing, True
      self._changed.notify_all()

  def wait(self, known: PoolWord | None, limit_s: float) -> PoolWord | None:
    """The newest word, as soon as it is another than `known`.

    Returns:
      `known` if nothing new came within the limit.

    Raises:
      DecoupledError: the stream is over; Refused where the syncer says why.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self._error is not None or self._word != known, limit_s
      )
      if self._error is not None:
        raise self._error
      return self._word

  def close(self) -> None:
    """Ends the stream: the standby is no longer in the pool."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    self._call.cancel()

  def _outgoing(self) -> Iterator[pb.Standing]:
    while True:
      with self._changed:
        self._changed.wait_for(
          lambda: self._unsaid or self._closed or self._error is not None,
          self._beat_s,
        )
        if self._closed or self._error is not None:
          return
        standing, self._unsaid = self._standing, False
      yield messages.standing_to(standing)

  def _read(self) -> None:
    error: DecoupledError = Unreachable("the syncer closed the pool's stream")
    try:
      for message in self._call:
        word = messages.pool_word_from(message)
        with self._changed:
          self._word = word
          self._beat_s = word.heartbeat_s
          self._changed.notify_all()
    except grpc.RpcError as failure:
      error = self._describe(failure)
    except Refused as refusal:
      error = refusal
      self._call.cancel()
    with self._changed:
      self._error = error
      self._changed.notify_all()
