"""The swap of a host as a transaction; whatever happens, one owner a seat."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from decoupled.clock import ManualClock
from decoupled.errors import Refused
from decoupled.syncer.seats import Membership, SeatLimits, Seats, State

LIMITS = SeatLimits(prepare_s=10.0, commit_s=20.0, short_s=50.0, attempts=3)


def refused(reason: str) -> Any:
  return pytest.RaisesExc(Refused, check=lambda error: error.reason == reason)


def all_ready(seats: Seats, now: float) -> None:
  for rank, holder in enumerate(seats.proposed.holders):
    seats.ready(now, rank, holder, seats.epoch)


def all_stepped(seats: Seats, now: float) -> None:
  for rank, holder in enumerate(seats.proposed.holders):
    seats.stepped(now, rank, holder, seats.epoch)


def seated(hosts: int = 3) -> Seats:
  seats = Seats(hosts, LIMITS)
  for rank in range(hosts):
    seats.take(0.0, rank, f"h{rank}", fresh=True)
  all_ready(seats, 0.0)
  all_stepped(seats, 0.0)
  assert seats.state is State.SEATED
  return seats


def test_a_start_forms_once_every_seat_is_taken_ready_and_has_stepped() -> None:
  seats = Seats(2, LIMITS)
  assert seats.empty == (0, 1)
  seats.take(0.0, 1, "b", fresh=True)
  assert seats.state is State.SHORT
  assert "host 0" in seats.why
  seats.take(0.0, 0, "a", fresh=True)
  assert seats.state is State.PREPARING
  epoch = seats.epoch
  with refused("busy"):
    seats.stepped(0.0, 0, "a", epoch)
  assert not seats.ready(0.0, 0, "a", epoch)
  assert seats.ready(0.0, 1, "b", epoch)
  assert seats.state is State.COMMITTED
  assert not seats.stepped(1.0, 0, "a", epoch)
  assert seats.stepped(1.0, 1, "b", epoch)
  assert seats.state is State.SEATED
  assert seats.proposed == Membership(epoch, ("a", "b"))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_lost_host_is_replaced_and_is_a_zombie_from_then(rank: int) -> None:
  seats = seated()
  before = seats.epoch
  assert seats.lost(1.0, rank, f"h{rank}", before)
  assert seats.empty == (rank,)
  seats.take(1.0, rank, "standby", fresh=True)
  assert seats.proposed.fresh == {rank}
  with refused("claimed"):  # the original comes back: too late
    seats.take(1.0, rank, f"h{rank}", fresh=False)
  with refused("fenced"):
    seats.ready(1.0, rank, f"h{rank}", seats.epoch)
  with refused("fenced"):  # a survivor that has not heard yet
    seats.stepped(1.0, 1, "h1", before)
  all_ready(seats, 1.0)
  all_stepped(seats, 1.0)
  assert seats.owner(rank) == "standby"
  assert not seats.lost(2.0, rank, f"h{rank}", before)  # the late stream's end
  assert seats.state is State.SEATED


def test_the_original_that_comes_first_keeps_its_seat_and_its_state() -> None:
  seats = seated()
  seats.lost(1.0, 1, "h1", seats.epoch)
  seats.take(1.5, 1, "h1", fresh=False)
  with refused("claimed"):
    seats.take(1.5, 1, "standby", fresh=True)
  assert seats.proposed.fresh == frozenset()
  # that it had been lost is heard once more, from whoever is slow
  assert not seats.lost(1.6, 1, "h1", seats.epoch - 2)


def test_a_second_loss_in_the_middle_prepares_anew_under_a_higher_epoch() -> (
  None
):
  seats = seated()
  seats.lost(1.0, 1, "h1", seats.epoch)
  seats.take(1.0, 1, "s1", fresh=True)
  first = seats.epoch
  seats.ready(1.0, 0, "h0", first)
  assert seats.lost(2.0, 2, "h2", first)
  with refused("fenced"):
    seats.ready(2.0, 1, "s1", first)
  seats.take(2.0, 2, "s2", fresh=True)
  assert seats.epoch > first
  assert seats.proposed.fresh == {1, 2}
  all_ready(seats, 2.0)
  # and one more while it forms: the standby itself dies while promoted
  assert seats.lost(3.0, 1, "s1", seats.epoch)
  seats.take(3.0, 1, "s3", fresh=True)
  all_ready(seats, 3.0)
  all_stepped(seats, 3.0)
  assert seats.proposed.holders == ("h0", "s3", "s2")


def test_when_all_that_knew_the_state_are_gone_the_learner_recovers() -> None:
  seats = seated(2)
  seats.lost(1.0, 0, "h0", seats.epoch)
  seats.take(1.0, 0, "s0", fresh=True)
  seats.lost(1.0, 1, "h1", seats.epoch)
  assert seats.state is State.RECOVERING
  assert "donor or a snapshot" in seats.why
  with refused("claimed"):
    seats.take(2.0, 1, "s1", fresh=True)
  seats.recovered(2.0, {0: "s0"})
  assert seats.state is State.SHORT
  seats.take(2.0, 1, "s1", fresh=True)
  all_ready(seats, 2.0)
  all_stepped(seats, 2.0)
  assert seats.state is State.SEATED


def test_a_planned_swap_leaves_the_old_host_the_owner_until_the_commit() -> (
  None
):
  seats = seated()
  seats.swap(1.0, 1, "s")
  with refused("busy"):
    seats.swap(1.0, 2, "t")
  assert seats.owner(1) == "h1"
  for rank, holder in ((0, "h0"), (2, "h2"), (1, "s")):
    seats.ready(1.0, rank, holder, seats.epoch)
  assert seats.state is State.COMMITTED
  assert seats.owner(1) == "s"
  with refused("committed"):
    seats.abort(1.0, "changed our minds")


def test_a_planned_swap_is_called_off_to_the_old_membership() -> None:
  seats = seated()
  before = seats.epoch
  seats.swap(1.0, 1, "s")
  prepared = seats.epoch
  seats.ready(1.0, 0, "h0", prepared)
  seats.ready(1.0, 2, "h2", prepared)
  clock = ManualClock(seats.wake_at())
  seats.tick(clock.now())  # the standby was not ready in time
  assert seats.proposed.holders == ("h0", "h1", "h2")
  assert seats.proposed.fresh == frozenset()
  assert seats.epoch > prepared > before
  assert "host 1 was not ready within 10 s" in seats.why
  with refused("fenced"):
    seats.ready(clock.now(), 1, "s", prepared)
  all_ready(seats, clock.now())
  all_stepped(seats, clock.now())
  assert seats.owner(1) == "h1"


def test_an_old_host_that_dies_before_the_commit_cannot_be_returned_to() -> (
  None
):
  seats = seated()
  seats.swap(1.0, 1, "s")
  assert seats.lost(1.0, 1, "h1", seats.epoch)
  with refused("gone"):
    seats.abort(1.0, "late")
  all_ready(seats, 1.0)  # the swap goes on, unplanned now
  all_stepped(seats, 1.0)
  assert seats.owner(1) == "s"


def test_whoever_is_late_is_left_out_and_at_last_the_learner_recovers() -> None:
  seats = seated(2)
  seats.lost(0.0, 1, "h1", seats.epoch)
  now = 0.0
  for attempt in range(LIMITS.attempts):
    seats.take(now, 1, f"s{attempt}", fresh=True)
    seats.ready(now, 0, "h0", seats.epoch)
    now = seats.wake_at()
    seats.tick(now)
    assert seats.empty == (1,), seats.why
  seats.take(now, 1, "last", fresh=True)
  assert seats.state is State.RECOVERING
  assert "3 epochs have not formed" in seats.why


def test_a_seat_that_nobody_takes_ends_in_recovery() -> None:
  seats = seated(2)
  seats.lost(0.0, 1, "h1", seats.epoch)
  seats.tick(LIMITS.short_s - 0.1)
  assert seats.state is State.SHORT
  seats.tick(LIMITS.short_s)
  assert seats.state is State.RECOVERING


_EVENTS = st.lists(
  st.tuples(
    st.sampled_from(
      ["take", "lost", "swap", "ready", "step", "abort", "tick", "again"]
    ),
    st.integers(0, 2),
    st.integers(0, 5),
    st.floats(0.0, 15.0),
  ),
  max_size=60,
)


@hypothesis.given(_EVENTS)
def test_whatever_happens_a_seat_has_one_owner_and_epochs_only_rise(
  events: list[tuple[str, int, int, float]],
) -> None:
  """Any process may say anything in any order; hosts say what they know."""
  seats = seated()
  now, epoch, committed = 0.0, seats.epoch, set()
  for what, rank, who, passes in events:
    now += passes
    holder = f"h{who}" if who < 3 else f"s{who}"
    said = seats.epoch - (what == "again")
    try:
      if what == "take":
        seats.take(now, rank, holder, fresh=who >= 3)
      elif what == "lost":
        seats.lost(now, rank, holder, said)
      elif what == "swap":
        seats.swap(now, rank, holder)
      elif what == "abort":
        seats.abort(now, "a test")
      elif what == "tick":
        seats.tick(now)
      elif what == "step":
        seats.stepped(now, rank, holder, said)
      else:
        seats.ready(now, rank, holder, said)
    except Refused:
      pass
    assert seats.epoch >= epoch
    owners = [seats.owner(r) for r in range(3) if seats.owner(r)]
    assert len(set(owners)) == len(owners), (owners, seats.why)
    holders = [h for h in seats.proposed.holders if h]
    assert len(set(holders)) == len(holders)
    if seats.state in (State.COMMITTED, State.SEATED):
      # an epoch is decided once, for one set of holders
      assert not seats.empty
      committed.add((seats.epoch, seats.proposed.holders))
    if seats.state is State.RECOVERING:
      assert seats.why
      seats.recovered(now, {})
    assert seats.state is State.SEATED or seats.why
    epoch = seats.epoch
  assert len({number for number, _ in committed}) == len(committed)


def test_an_epoch_that_broke_under_all_is_formed_again_by_the_same() -> None:
  seats = seated(2)
  epoch = seats.epoch
  assert not seats.left(1.0, 0, "h0", epoch)
  assert seats.broken == {0}
  assert not seats.left(1.0, 1, "zombie", epoch)
  assert seats.left(1.0, 1, "h1", epoch)
  assert seats.state is State.PREPARING
  assert seats.epoch == epoch + 1
  assert seats.proposed.holders == ("h0", "h1")
  assert seats.broken == set()


def test_a_lost_host_counts_for_more_than_one_that_has_left() -> None:
  seats = seated(2)
  epoch = seats.epoch
  seats.left(1.0, 0, "h0", epoch)
  assert seats.lost(1.0, 1, "h1", epoch)
  assert seats.empty == (1,)
  assert not seats.left(1.0, 0, "h0", epoch)  # of an epoch that is over


def test_hosts_that_trained_on_without_a_syncer_sit_as_before() -> None:
  seats = Seats(2, LIMITS, epoch=7)
  seats.resume(0.0, 0, "a", 7)
  assert seats.state is State.SHORT
  with refused("claimed"):
    seats.resume(0.0, 0, "b", 7)
  with refused("fenced"):
    seats.resume(0.0, 1, "b", 6)
  seats.resume(0.0, 1, "b", 7)
  assert seats.state is State.SEATED
  assert seats.epoch == 7
  assert seats.lost(1.0, 1, "b", 7)
  assert seats.empty == (1,)


def test_one_that_died_meanwhile_makes_the_others_form_again() -> None:
  seats = Seats(2, LIMITS, epoch=7)
  seats.resume(0.0, 0, "a", 7)
  seats.take(0.0, 1, "new", fresh=True)
  assert seats.state is State.PREPARING
  assert seats.epoch == 8
  assert seats.proposed.fresh == {1}
