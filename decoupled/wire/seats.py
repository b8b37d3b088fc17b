"""A host's stream to its seat: what it says, and the newest word to it.

It speaks from a thread of its own, several times within the limit of a
collective, so that silence means that the process is frozen or cut off. A lost
stream is opened again; whoever has the seat then is refused.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from decoupled.errors import DecoupledError, Refused
from decoupled.types import SeatWord, Sitting
from decoupled.wire import messages
from decoupled.wire.proto.decoupled.v1 import seats_pb2 as pb

_AGAIN_S = (0.1, 0.2, 0.5, 1.0)


class SeatStream:
  """The seat of one host; for any thread.

  Args:
    open_call: starts the call with the messages to send.
    sitting: the first thing said.
    beat_s: how often to say something.
    describe: turns the call's failure into an error.
  """

  def __init__(
    self,
    open_call: Callable[[Iterator[pb.Sitting]], Any],
    sitting: Sitting,
    beat_s: float,
    describe: Callable[[grpc.RpcError], DecoupledError],
  ):
    self._open_call = open_call
    self._describe = describe
    self._beat_s = beat_s
    self._changed = threading.Condition()
    self._sitting = sitting
    self._unsaid = True
    self._call: Any = None
    self._calls = 0
    self._closed = False
    self._word: SeatWord | None = None
    self._refusal: Refused | None = None
    threading.Thread(target=self._run, name="seat", daemon=True).start()

  @property
  def word(self) -> SeatWord | None:
    """The newest one, None before the first.

    Raises:
      Refused: the seat is somebody else's, or the learner begins anew.
    """
    with self._changed:
      if self._refusal is not None:
        raise self._refusal
      return self._word

  @property
  def sitting(self) -> Sitting:
    """What is said at present."""
    return self._sitting

  def say(self, sitting: Sitting) -> None:
    """Replaces what was said; goes out at once."""
    with self._changed:
      self._sitting = sitting
      self._unsaid = True
      self._changed.notify_all()

  def wait(
    self, done: Callable[[SeatWord], bool], limit_s: float
  ) -> SeatWord | None:
    """The newest word, as soon as it is as wanted; None after the limit.

    Raises:
      Refused: as `word`.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: (
          self._refusal is not None
          or (self._word is not None and done(self._word))
        ),
        limit_s,
      )
      if self._refusal is not None:
        raise self._refusal
      return self._word if self._word and done(self._word) else None

  def close(self) -> None:
    """Gives the seat up."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()
      call = self._call
    if call is not None:
      call.cancel()

  def _run(self) -> None:
    tries = 0
    while not self._closed:
      try:
        self._once()
        tries = 0
      except grpc.RpcError as failure:
        error = self._describe(failure)
        if isinstance(error, Refused) and not self._closed:
          with self._changed:
            self._refusal = error
            self._changed.notify_all()
          return
      except Refused as refusal:
        with self._changed:
          self._refusal = refusal
          self._changed.notify_all()
        return
      time.sleep(_AGAIN_S[min(tries, len(_AGAIN_S) - 1)])
      tries += 1

  def _once(self) -> None:
    """One stream, from opening to loss."""
    with self._changed:
      self._calls += 1
      self._call = self._open_call(self._outgoing(self._calls))
    try:
      for message in self._call:
        word = messages.seat_word_from(message)
        with self._changed:
          self._word = word
          self._changed.notify_all()
    finally:
      with self._changed:
        self._calls += 1  # ends what is outgoing
        self._changed.notify_all()

  def _outgoing(self, call: int) -> Iterator[pb.Sitting]:
    self._unsaid = True
    while True:
      with self._changed:
        self._changed.wait_for(
          lambda: self._unsaid or self._closed or self._calls != call,
          self._beat_s,
        )
        if self._closed or self._calls != call:
          return
        sitting, self._unsaid = self._sitting, False
      yield messages.sitting_to(sitting)
