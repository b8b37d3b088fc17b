"""The learner's end of the control stream.

Three threads that the training loop never waits for: gRPC's own sender takes
messages from the outbox (a heartbeat whenever one is due), a reader keeps the
newest announcement, and a third hands it over, so that a slow listener sees
fewer announcements rather than old ones.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from decoupled.clock import Clock
from decoupled.errors import Refused
from decoupled.types import Announcement, Heartbeat, Report, Welcome
from decoupled.wire import messages
from decoupled.wire.proto.decoupled.v1 import membership_pb2 as pb

_JOIN_S = 2.0


class Outbox:
  """The newest report that has not gone out, and who may take it.

  Reports outlive a control stream: while there is none they are merged, so
  that the times of finished steps reach the syncer later.
  """

  def __init__(self) -> None:
    self._changed = threading.Condition()
    self._report: Report | None = None
    self._taker: object = None
    self._leaving: str | None = None

  def put(self, report: Report) -> None:
    """Replaces the report that waits; its step times are carried over."""
    with self._changed:
      waiting = self._report
      if waiting is not None:
        ends = waiting.step_ends_s + report.step_ends_s
        kept = ends[-messages.MAX_STEP_ENDS :]
        report = dataclasses.replace(report, step_ends_s=kept)
      self._report = report
      self._changed.notify_all()

  def leave(self, why: str) -> None:
    """What waits goes out, then the goodbye, then nothing more."""
    with self._changed:
      self._leaving = why
      self._changed.notify_all()

  def stop(self, taker: object) -> None:
    """Ends `messages` of this taker."""
    with self._changed:
      if self._taker is taker:
        self._taker = None
      self._changed.notify_all()

  def messages(
    self, taker: object, welcome: Welcome, host: int, clock: Clock
  ) -> Iterator[pb.LearnerMessage]:
    """What to send on one control stream, for as long as it lasts.

    Args:
      taker: names the stream, for `stop`; a newer one displaces it.
      welcome: of the incarnation; reports of an older one stay here.
      host: rank of this host in its learner.
      clock: of the times that are sent.
    """
    with self._changed:
      self._taker = taker
      self._leaving = None
      self._changed.notify_all()
    return self._outgoing(taker, welcome, host, clock)

  def _outgoing(
    self, taker: object, welcome: Welcome, host: int, clock: Clock
  ) -> Iterator[pb.LearnerMessage]:
    beat_at = clock.now()
    while True:
      due_s = beat_at - clock.now()
      if due_s <= 0:
        beat_at = clock.now() + welcome.heartbeat_s
        yield _beat(welcome, host, clock.now())
        continue
      with self._changed:
        self._changed.wait_for(
          lambda: (
            self._taker is not taker
            or self._leaving is not None
            or self._ready(welcome)
          ),
          due_s,
        )
        if self._taker is not taker:
          return
        report = self._take(welcome)
        leaving = self._leaving
      if report is not None:
        yield pb.LearnerMessage(report=messages.report_to(report))
      elif leaving is not None:
        yield pb.LearnerMessage(leave=pb.Leave(why=leaving[:1000]))
        return

  def _take(self, welcome: Welcome) -> Report | None:
    if not self._ready(welcome):
      return None
    report, self._report = self._report, None
    return report

  def _ready(self, welcome: Welcome) -> bool:
    report = self._report
    return report is not None and report.incarnation == welcome.incarnation


def _beat(welcome: Welcome, host: int, now_s: float) -> pb.LearnerMessage:
  beat = Heartbeat(welcome.learner_id, welcome.incarnation, now_s, host)
  return pb.LearnerMessage(heartbeat=messages.heartbeat_to(beat))


class ControlStream:
  """One control stream, from opening to loss.

  Args:
    open_call: starts the call with the messages to send.
    outbox: where reports come from.
    welcome: of the incarnation.
    host: rank of this host in its learner.
    clock: of the times that are sent.
    describe: turns the call's failure into a sentence.
    on_announcement: gets the newest announcement.
    on_lost: gets the cause when the stream ends unasked.
  """

  def __init__(
    self,
    open_call: Callable[[Iterator[pb.LearnerMessage]], Any],
    outbox: Outbox,
    welcome: Welcome,
    host: int,
    clock: Clock,
    describe: Callable[[grpc.RpcError], str],
    on_announcement: Callable[[Announcement], None],
    on_lost: Callable[[str], None],
  ):
    self._outbox = outbox
    self._describe = describe
    self._on_announcement = on_announcement
    self._on_lost = on_lost
    self._changed = threading.Condition()
    self._newest: Announcement | None = None
    self._over: str | None = None
    self._asked = False
    self._call = open_call(outbox.messages(self, welcome, host, clock))
    self._threads = [
      threading.Thread(target=target, name=name, daemon=True)
      for target, name in (
        (self._read, "control-reader"),
        (self._hand_over, "control-listener"),
      )
    ]
    for thread in self._threads:
      thread.start()

  def leave(self, why: str, limit_s: float) -> None:
    """Says goodbye and waits, up to a limit, until the syncer has heard."""
    self._asked = True
    self._outbox.leave(why)
    with self._changed:
      self._changed.wait_for(lambda: self._over is not None, limit_s)
    self.close()

  def close(self) -> None:
    """Ends the stream; `on_lost` is not called any more."""
    self._asked = True
    self._outbox.stop(self)
    self._call.cancel()
    for thread in self._threads:
      if thread is not threading.current_thread():
        thread.join(_JOIN_S)

  def _read(self) -> None:
    why = "it closed the control stream"
    try:
      for message in self._call:
        said = messages.announcement_from(message)
        with self._changed:
          self._newest = said
          self._changed.notify_all()
    except grpc.RpcError as error:
      why = self._describe(error)
    except Refused as error:
      why = str(error)
      self._call.cancel()
    self._outbox.stop(self)
    with self._changed:
      self._over = why
      self._changed.notify_all()

  def _hand_over(self) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(
          lambda: self._newest is not None or self._over is not None
        )
        said, self._newest = self._newest, None
        over = self._over
      if self._asked:
        return
      if said is not None:
        self._on_announcement(said)
      elif over is not None:
        self._on_lost(over)
        return
