"""SIGTERM ends a process in order and in time, whatever its main thread does.

Signals are real and go to this process; only its exit is not.
"""

import signal
import threading

import pytest

from decoupled.launch import termination
from decoupled.launch.termination import LATE, Termination

LIMIT_S = 20.0
FOREVER_S = 1000.0


class Process:
  """A `Termination` that notes how it would end this process."""

  def __init__(self, grace_s=FOREVER_S):
    self.events = []
    self.said = []
    self.status = None
    self.gone = threading.Event()
    self.end = Termination("learner/3", grace_s, exit_now=self._exit)
    self.end.events = self
    self.end.goodbye = self.said.append

  def _exit(self, status):
    self.status = status
    self.gone.set()

  def emit(self, kind, **fields):
    assert kind == "stopped"
    self.events.append(fields)


@pytest.fixture
def start():
  """Makes processes; the signals of this one are put back."""
  before = [signal.getsignal(number) for number in termination.SIGNALS]
  made = []

  def make(*arguments):
    made.append(Process(*arguments))
    return made[-1]

  yield make
  for process in made:
    process.end.close()
    assert not process.end._thread.is_alive()
  assert [signal.getsignal(n) for n in termination.SIGNALS] == before


@pytest.mark.parametrize("number", termination.SIGNALS)
def test_with_nothing_to_lose_it_ends_at_once(start, number):
  process = start()
  signal.raise_signal(number)
  # the main thread is in a wait that knows nothing of signals
  assert process.gone.wait(LIMIT_S)
  assert process.status == 128 + number
  [event] = process.events
  assert event["outcome"] == "nothing_to_save"
  assert (event["role"], event["signal"]) == ("learner/3", number.name)
  assert process.said == [f"stopped by {number.name}: nothing_to_save"]


def test_with_something_to_lose_the_main_thread_ends_it(start):
  process, begun = start(), threading.Event()
  process.end.on_request = begun.set
  process.end.something_to_lose()
  assert not process.end.requested.is_set()
  signal.raise_signal(signal.SIGTERM)
  assert begun.wait(LIMIT_S)
  assert process.end.requested.is_set()
  assert process.end.status == 143
  assert 0 < process.end.left_s < FOREVER_S
  assert not process.end.half_over()
  process.end.ended("saved")
  assert [event["outcome"] for event in process.events] == ["saved"]
  assert not process.gone.is_set()


def test_a_main_thread_that_takes_too_long_is_not_waited_for(start):
  process = start(0.5)
  process.end.something_to_lose()
  signal.raise_signal(signal.SIGTERM)
  assert process.end.requested.wait(LIMIT_S)
  signal.raise_signal(signal.SIGTERM)  # said again: that is no hurry
  assert process.gone.wait(LIMIT_S)
  assert process.status == LATE
  assert [event["outcome"] for event in process.events] == ["grace_over"]
  assert process.said == ["stopped by SIGTERM: grace_over"]
  assert process.end.half_over()


def test_a_goodbye_that_hangs_is_not_waited_for(start):
  process, never = start(0.2), threading.Event()
  process.end.goodbye = lambda why: never.wait(LIMIT_S)
  process.end.something_to_lose()
  signal.raise_signal(signal.SIGTERM)
  assert process.gone.wait(LIMIT_S)
  assert process.status == LATE
  never.set()


def test_a_second_interrupt_means_at_once(start):
  process, begun = start(), threading.Event()
  process.end.on_request = begun.set
  process.end.something_to_lose()
  signal.raise_signal(signal.SIGINT)
  assert begun.wait(LIMIT_S)
  signal.raise_signal(signal.SIGINT)
  assert process.gone.wait(LIMIT_S)
  assert process.status == LATE
  assert [event["outcome"] for event in process.events] == ["asked_twice"]


def test_nothing_begins_in_a_process_that_is_being_ended(start):
  process, hold = start(), threading.Event()
  process.end.goodbye = lambda why: hold.wait(LIMIT_S)
  signal.raise_signal(signal.SIGTERM)
  # once seen: said before that, there is something to lose after all
  assert process.end.requested.wait(LIMIT_S)
  threading.Timer(0.2, hold.set).start()
  process.end.something_to_lose()  # returns only once it has ended
  assert process.gone.wait(LIMIT_S)
  assert process.status == 143


def test_statuses_say_who_was_told():
  assert all(termination.told(s) for s in (130, 143, LATE))
  assert not any(termination.told(s) for s in (0, 1, 2, 137, -15))
  assert termination.signal_of(130) is signal.SIGINT
  assert termination.signal_of(LATE) is signal.SIGTERM
