"""When a learner that is told to end, or is relieved, stops training."""

import signal
import threading

import pytest

from decoupled.errors import Refused
from decoupled.learner.notice import Notice


class End:
  """Stands for the process's `Termination`."""

  def __init__(self, number=signal.SIGTERM):
    self.requested = threading.Event()
    self.number, self.grace_s, self.late = number, 30.0, False
    self.on_request = lambda: None

  def half_over(self):
    return self.late

  def ask(self):
    self.requested.set()
    self.on_request()


class Link:
  relieved = False


def refuse(limit_s):
  raise Refused("no_standby", "there is no standby")


def test_with_a_standby_it_trains_until_it_is_relieved():
  end, link, limits = End(), Link(), []
  notice = Notice(
    end, lambda: link.relieved, lambda s: limits.append(s) or "standby/0"
  )
  assert not notice.stops()
  end.requested.set()
  assert not notice.stops()  # the answer has not come yet
  end.on_request()
  assert limits == [2.0]
  assert not notice.stops()
  link.relieved = True
  assert notice.stops()


def test_its_grace_time_is_not_used_up_by_a_standby_that_is_slow():
  end = End()
  notice = Notice(end, lambda: False, lambda s: "standby/0")
  end.ask()
  assert not notice.stops()
  end.late = True
  assert notice.stops()


@pytest.mark.parametrize(
  ("number", "ask"),
  [
    (signal.SIGTERM, refuse),
    (signal.SIGINT, lambda s: pytest.fail("a person wants it to end")),
  ],
)
def test_without_a_standby_it_stops_at_its_next_boundary(number, ask):
  end = End(number)
  notice = Notice(end, lambda: False, ask)
  end.ask()
  assert notice.stops()


def test_a_learner_that_is_drained_stops_without_a_signal():
  link = Link()
  notice = Notice(End(), lambda: link.relieved, refuse)
  link.relieved = True
  assert notice.stops()
