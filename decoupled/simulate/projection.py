"""Closed forms for one synchronous job that swaps broken machines.

They redo the projection of TrainMover (arXiv:2412.12636) to 64K GPUs and the
size of its standby pool. Constants that the paper does not print were solved
from the savings that it does print; `trainmover_64k.py` and `standby_pool.py`
keep them apart from the published ones.

Times are seconds unless a name says otherwise; a week has 168 hours.
"""

import math

from decoupled.errors import ConfigError

WEEK_H = 168.0
GPUS_PER_NODE = 8
# Failures per 1,000 node-days of a research cluster; the interruption rates of
# the paper are all this one, rounded to minutes.
NODE_FAILURES = 6.5
# Planned to unplanned interruptions, as in the training of Llama 3.
PLANNED_TO_UNPLANNED = 1 / 8.9


def mttf_s(
  gpus: int, failures_per_1000_node_days: float = NODE_FAILURES
) -> float:
  """Mean time between interruptions of a job, 1 / (rate x nodes)."""
  _above("gpus", gpus)
  _above("failures_per_1000_node_days", failures_per_1000_node_days)
  nodes = gpus / GPUS_PER_NODE
  return 86_400.0 / (failures_per_1000_node_days / 1000 * nodes)


def mean_stall_s(
  expected_s: float,
  unexpected_s: float,
  infra_s: float = 0.0,
  detect_s: float = 0.0,
  rollback_s: float = 0.0,
) -> float:
  """Mean time a job stands still per interruption.

  Args:
    expected_s: of a planned swap.
    unexpected_s: of one after a failure.
    infra_s: rescheduling, added to both.
    detect_s: until a failure is noticed; a planned swap is known beforehand.
    rollback_s: lost work after a failure, half a checkpoint interval.
  """
  failure_s = unexpected_s + detect_s + rollback_s
  planned = PLANNED_TO_UNPLANNED
  return (planned * expected_s + failure_s) / (planned + 1) + infra_s


def linear_ettr(stall_s: float, between_s: float) -> float:
  """Effective share of the time as 1 - D / MTTF: the published formula.

  It takes D out of the time in which a job runs, and is below 0 where D
  exceeds MTTF; `ettr` is right at any ratio.
  """
  _above("between_s", between_s)
  return 1 - stall_s / between_s


def ettr(stall_s: float, between_s: float) -> float:
  """Effective share of the time, MTTF / (MTTF + D)."""
  _above("between_s", between_s)
  return between_s / (between_s + stall_s)


def wasted_gpu_h(
  gpus: int,
  stall_s: float,
  between_s: float,
  standby_nodes: int = 0,
  linear: bool = True,
) -> float:
  """GPU-hours a week in which the job stands still or a standby waits.

  Args:
    gpus: of the job.
    stall_s: D, mean time it stands still per interruption.
    between_s: MTTF, mean time between interruptions.
    standby_nodes: machines kept warm, counted as waste in full.
    linear: count 168 h / MTTF interruptions a week, as published; else the
      clock of failures stands still while the job does.
  """
  lost = 1 - (linear_ettr if linear else ettr)(stall_s, between_s)
  return WEEK_H * (gpus * lost + standby_nodes * GPUS_PER_NODE)


def standby_gain(
  gpus: int, standbys: int, between_s: float, saved_s: float, back_s: float
) -> float:
  """GPUs that a pool of standbys is worth, less those it ties up.

  Net = N x T_saved / MTTF x (1 - p^(k+1)) - 8k, p = 1 - exp(-tau / MTTF): the
  authors' heat map to 0.05 %. For k = 0 the formula would credit a pool that
  is not there; without a machine nothing is saved, so that is 0 here.

  Args:
    gpus: N, of the job.
    standbys: k, machines in the pool.
    between_s: MTTF.
    saved_s: T_saved, what a standby takes off an interruption.
    back_s: tau, until a used standby is replaced.
  """
  _above("between_s", between_s)
  empty = -math.expm1(-back_s / between_s)
  worth = gpus * saved_s / between_s * (1 - empty ** (standbys + 1))
  return worth - GPUS_PER_NODE * standbys if standbys else 0.0


def best_standbys(
  gpus: int,
  between_s: float,
  saved_s: float,
  back_s: float,
  most: int = 64,
) -> int:
  """The size of the pool that gains most, from 0 to `most`."""
  return max(
    range(most + 1),
    key=lambda k: standby_gain(gpus, k, between_s, saved_s, back_s),
  )


def erlang_b(load: float, servers: int) -> float:
  """Share of requests that find all servers busy (Erlang's loss formula).

  Exact for any distribution of the time a server is busy: here a standby
  until a machine takes its place in the pool again.

  Args:
    load: requests that arrive in the mean time a server is busy.
    servers: how many there are.
  """
  _above("load", load)
  blocked = 1.0
  for server in range(1, servers + 1):
    blocked = load * blocked / (server + load * blocked)
  return blocked


def best_pool(
  per_s: float, back_s: float, saved_chip_s: float, host_chips: int
) -> tuple[int, float]:
  """The pool of standbys beyond which one more costs more than it saves.

  Unlike `standby_gain`, any number of machines may be away at once, so that
  it holds where repairs take longer than the time between failures.

  Args:
    per_s: failures a second that a standby could take over.
    back_s: until a used standby is replaced.
    saved_chip_s: chip-seconds that a standby saves per failure.
    host_chips: chips of a standby, all of them waste while it waits.

  Returns:
    Standbys, and the share of failures that finds one.
  """
  load, standbys, empty = per_s * back_s, 0, 1.0
  while True:
    next_empty = load * empty / (standbys + 1 + load * empty)  # erlang_b
    if per_s * saved_chip_s * (empty - next_empty) <= host_chips:
      return standbys, 1 - empty
    standbys, empty = standbys + 1, next_empty


def _above(name: str, value: float) -> None:
  if not (math.isfinite(value) and value > 0):
    raise ConfigError(f"{name} = {value:g} must be above 0 and finite")
