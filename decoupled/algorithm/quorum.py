"""When a round closes, and when its contributions may be merged.

A round goes through these states; all of them are read off a `Decision`:

  | state          | holds while                       | ends with            |
  |----------------|-----------------------------------|----------------------|
  | below quorum   | fewer than K fresh live reports   | the K-th report      |
  | grace          | quorum_at <= now < close_at       | time, or all there   |
  | closed         | now >= close_at                   | `may_merge`          |

Decisions are pure functions of arrays with any leading batch axes, so one
implementation serves the syncer (one round) and the simulator (very many).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from decoupled.algorithm.grace import Estimates, grace_s
from decoupled.algorithm.policy import Exchange


class Decision(NamedTuple):
  """When a round closes and why. Fields are arrays over the batch axes.

  Attributes:
    opened: [...] float64, seconds, when the round opened.
    quorum_at: [...] float64, when the K-th fresh report came; inf = not yet.
    grace_s: [...] float64, seconds of extra wait granted from `quorum_at`.
    close_at: [...] float64, when the round closes; inf below quorum.
    reported: [...] int64, live learners with a fresh report.
    alive: [...] int64, live learners.
    quorum: [...] int64, K.
    missing: [..., M] bool, live learners without a fresh report.
  """

  opened: NDArray[np.float64]
  quorum_at: NDArray[np.float64]
  grace_s: NDArray[np.float64]
  close_at: NDArray[np.float64]
  reported: NDArray[np.int64]
  alive: NDArray[np.int64]
  quorum: NDArray[np.int64]
  missing: NDArray[np.bool_]


def close_time(
  opened: ArrayLike,
  report_times: ArrayLike,
  alive: ArrayLike,
  estimates: Estimates,
  policy: Exchange,
) -> Decision:
  """Decides when a round closes.

  close_at = min(quorum_at + grace, the time when all live learners have
  reported), and inf while fewer than K live learners have reported. The quorum
  is K however few are alive: below it the round stays open.

  Args:
    opened: [...] seconds, when the round opened.
    report_times: [..., M] seconds, receipt of each learner's first fresh
      report; inf = none yet. Those of dead learners are ignored.
    alive: [..., M] bool.
    estimates: running estimates, [...] each.
    policy: K, gamma, tau and the bound of the grace window.
  """
  start = np.asarray(opened, np.float64)
  live = np.asarray(alive, bool)
  times = np.where(live, np.asarray(report_times, np.float64), np.inf)
  live = np.broadcast_to(live, times.shape)
  fresh = np.isfinite(times)
  learners = times.shape[-1]
  if policy.quorum <= learners:
    ranks = np.partition(times, policy.quorum - 1, axis=-1)
    quorum_at = ranks[..., policy.quorum - 1]
  else:
    quorum_at = np.full(times.shape[:-1], np.inf)
  wait = np.maximum(quorum_at - start, 0.0)
  extra = grace_s(
    policy, estimates.step_s, wait, estimates.sync_s, estimates.round_s
  )
  all_in = np.max(np.where(live, times, -np.inf), axis=-1, initial=-np.inf)
  # The outer maximum: nobody alive, or too few, must not close the round.
  close_at = np.maximum(quorum_at, np.minimum(quorum_at + extra, all_in))
  shape = close_at.shape
  return Decision(
    opened=np.broadcast_to(start, shape),
    quorum_at=np.broadcast_to(quorum_at, shape),
    grace_s=np.broadcast_to(extra, shape),
    close_at=close_at,
    reported=np.broadcast_to(np.count_nonzero(fresh, axis=-1), shape),
    alive=np.broadcast_to(np.count_nonzero(live, axis=-1), shape),
    quorum=np.broadcast_to(np.int64(policy.quorum), shape),
    missing=np.broadcast_to(live & ~fresh, (*shape, learners)),
  )


def explain(decision: Decision, learner_ids: Sequence[int] = ()) -> str:
  """Says in one sentence when and why a round closes, and who is missing.

  Args:
    decision: of one round (no batch axes); see `select`.
    learner_ids: the ids behind axis M; the indices themselves by default.
  """
  if decision.close_at.ndim:
    raise ValueError(
      f"explain takes one round, not a batch of {decision.close_at.shape}: "
      "select(decision, index) picks one"
    )
  reported, alive = int(decision.reported), int(decision.alive)
  quorum, grace = int(decision.quorum), float(decision.grace_s)
  who = _missing(decision, learner_ids)
  if math.isinf(float(decision.close_at)):
    if alive < quorum:
      return (
        f"open: {reported} of {quorum} reports needed, and only {alive} "
        f"learners are live{who}"
      )
    return (
      f"open: {reported} of {quorum} reports needed, {alive} learners are "
      f"live{who}"
    )
  wait = float(decision.quorum_at - decision.opened)
  total = float(decision.close_at - decision.opened)
  head = f"quorum of {quorum} after {wait:.3f} s"
  if reported == alive and decision.close_at < decision.quorum_at + grace:
    return f"{head}; closes at {total:.3f} s, all {alive} live learners there"
  return (
    f"{head}; closes at {total:.3f} s after {grace:.3f} s of grace with "
    f"{reported} of {alive} live learners there{who}"
  )


def select(decision: Decision, index: int | tuple[int, ...]) -> Decision:
  """Picks one round out of a batch of decisions."""
  return Decision(*(np.asarray(field[index]) for field in decision))


def may_merge(
  now: ArrayLike,
  opened: ArrayLike,
  decision: Decision,
  expected: ArrayLike,
  received: ArrayLike,
  budget_s: ArrayLike,
  quorum: ArrayLike,
) -> NDArray[np.bool_]:
  """Whether a round's contributions may be merged at `now`.

  A closed round with at least K contributions merges once every expected one
  is there. A transfer still under way has until the overlap budget ends, and
  is then left out unless K needs it.

  Args:
    now: [...] seconds.
    opened: [...] seconds, when the round opened.
    decision: what `close_time` says about the round.
    expected: [..., M] bool, live learners with a host copy of this round, the
      right base and at least one step.
    received: [..., M] bool, whose contribution has arrived and was accepted.
    budget_s: [...] seconds from the opening to the end of the overlap.
    quorum: [...] K.
  """
  time = np.asarray(now, np.float64)
  there = np.asarray(received, bool)
  complete = np.all(there | ~np.asarray(expected, bool), axis=-1)
  enough = np.count_nonzero(there, axis=-1) >= np.asarray(quorum)
  spent = time >= np.asarray(opened, np.float64) + np.asarray(budget_s)
  return np.asarray((time >= decision.close_at) & enough & (complete | spent))


def _missing(decision: Decision, learner_ids: Sequence[int]) -> str:
  absent = np.flatnonzero(decision.missing).tolist()
  if not absent:
    return ""
  names = [str(learner_ids[i] if learner_ids else i) for i in absent]
  return f"; no report from learner {', '.join(names)}"
