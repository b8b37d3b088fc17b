"""What does a snapshot cost: the steps meanwhile, and memory for good?

    python benchmarks/checkpoint.py                  (about 5 minutes)

One learner in this process trains unpadded steps (one XLA thread, one device)
in the learner's own loop, exchanging a fragment in every step with a live
syncer (a process of its own). Both save themselves again and again, as they do
in a run, at intervals that drift against each other. What a save of this small
model costs is almost all Orbax's own work: some 0.1 s of processor time and
0.4 s until it is on the disk, however long the steps are. The ratio therefore
says something at the length that steps of training have only; 64 sequences, as
in `inner_overhead.py`, make it 0.17 s on the 2 cores of the README. (With
`--sequences 28` it is 37 ms, and a snapshot every 0.8 s, which nobody takes.)
A step is *in flight* if a
snapshot was under way in any part of it: from the cut until it is committed, of
the learner by its own clock, of the syncer by its log. In flight and quiet
steps thus alternate within one run. One JSON line:

  ratio          median step in flight / median quiet step         (<= 1.10)
  learner_ratio  the same with a snapshot of the learner in flight
  syncer_ratio   the same with one of the syncer in flight, none of the learner
  step_s         median quiet step
  in_flight      share of the steps
  save_s         median length of a snapshot, of learner and syncer
  snapshots      of learner and syncer that were timed
  learner_mb_per_snapshot, syncer_mb_per_snapshot
                 slope of resident memory, by least squares over the last two
                 thirds of the snapshots
  learner_flat, syncer_flat
                 the median of the last third is at most 1 % and 2 MB above that
                 of the middle third: what rises for good shows there, what is
                 touched for the first time has been
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jobs
import live

# isort: split
import jax
import numpy as np

from decoupled import config as configs
from decoupled.checkpoint.settings import Checkpoint
from decoupled.clock import MonotonicClock
from decoupled.learner import loop
from decoupled.learner.copies import Copies, compile_copy
from decoupled.learner.snapshots import Place, Snapshots
from decoupled.observe.events import read

BINDINGS = ("Exchange.H=24", "Exchange.P=24", "Exchange.quorum=1")
SETTLE_STEPS = 60


class Window(NamedTuple):
  """A snapshot under way, on this machine's monotonic clock."""

  start: float
  stop: float


class Saving:
  """The learner's own snapshots, watched.

  Attributes:
    windows: when one was under way.
    memory: after each, resident megabytes of (learner, syncer).
    ends: when steps ended.
  """

  def __init__(
    self, learner: live.Learner, store: Path, syncer: int, every: int
  ):
    self.windows: list[Window] = []
    self.memory: list[tuple[float, float]] = []
    self.ends: list[float] = []
    self._began = 0.0
    self._syncer = syncer
    # as `compile_copy` needs it: shapes on their devices
    specs = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      learner.done.state.opt_state,
    )
    self._copy = compile_copy(specs)
    self.snapshots = Snapshots(
      Place(str(store), 0, learner.link.welcome.run_id),
      Checkpoint(every_rounds=every + 1, least_s=0.0),
      1.0,
      Copies(self._begin),
      self,
      MonotonicClock(),
    )

  def _begin(self, tree: Any) -> Any:
    self._began = time.monotonic()
    return self._copy(tree)

  def emit(self, kind: str, **fields: object) -> None:
    """Told of each save of the learner."""
    if not fields["ok"]:
      raise SystemExit(str(fields["error"]))
    self.windows.append(Window(self._began, time.monotonic()))
    self.memory.append((resident_mb("self"), resident_mb(str(self._syncer))))

  def after_step(self, now: loop.Trained) -> None:
    self.ends.append(time.monotonic())
    self.snapshots.after_step(now)


def resident_mb(process: str) -> float:
  pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
  return pages * 4096 / 1e6


def of_syncer(folder: Path, started_at: float) -> list[Window]:
  """The syncer's snapshots: from the round that was cut to the commit."""
  closed: dict[int, float] = {}
  windows = []
  for event in read(folder / "events.jsonl"):
    if event["kind"] == "round":
      closed[event["round"]] = event["t"]
    elif event["kind"] == "checkpoint" and event["round"] in closed:
      start = closed[event["round"]]
      windows.append(Window(started_at + start, started_at + event["t"]))
  return windows


def during(ends: Sequence[float], windows: Sequence[Window]) -> np.ndarray:
  """Per step whether any of the windows overlaps it."""
  starts, stops = np.array(ends[:-1]), np.array(ends[1:])
  found = np.zeros(len(starts), bool)
  for window in windows:
    found |= (starts < window.stop) & (stops > window.start)
  return found


def slope(values: Sequence[float]) -> float:
  """Per snapshot, over the last two thirds."""
  late = values[len(values) // 3 :]
  return float(np.polyfit(np.arange(len(late)), late, 1)[0])


def flat(values: Sequence[float]) -> bool:
  third = len(values) // 3
  middle = jobs.median(values[third : 2 * third])
  last = jobs.median(values[2 * third :])
  return last <= 1.01 * middle + 2.0


def measured(saving: Saving, syncers: list[Window]) -> dict[str, Any]:
  ends = saving.ends[SETTLE_STEPS:]
  steps = np.diff(ends)
  own, theirs = during(ends, saving.windows), during(ends, syncers)
  quiet = float(np.median(steps[~own & ~theirs]))

  def ratio(which: np.ndarray) -> float | None:
    if not which.any():
      return None
    return round(float(np.median(steps[which])) / quiet, 4)

  learner_mb, syncer_mb = map(list, zip(*saving.memory, strict=True))
  lengths = [
    round(jobs.median([w.stop - w.start for w in windows]), 3)
    for windows in (saving.windows, syncers)
  ]
  return {
    "ratio": ratio(own | theirs),
    "learner_ratio": ratio(own),
    "syncer_ratio": ratio(theirs & ~own),
    "step_s": round(quiet, 5),
    "in_flight": round(float(np.mean(own | theirs)), 3),
    "save_s": lengths,
    "snapshots": [len(saving.windows), len(syncers)],
    "learner_mb_per_snapshot": round(slope(learner_mb), 3),
    "syncer_mb_per_snapshot": round(slope(syncer_mb), 3),
    "learner_flat": flat(learner_mb),
    "syncer_flat": flat(syncer_mb),
    "learner_mb": [round(mb) for mb in learner_mb[:: len(learner_mb) // 5]],
    "syncer_mb": [round(mb) for mb in syncer_mb[:: len(syncer_mb) // 5]],
    "padded_s": 0.0,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--snapshots", type=int, default=50)
  parser.add_argument(
    "--every", type=int, default=20, help="steps between two snapshots"
  )
  parser.add_argument("--sequences", type=int, default=64)
  parser.add_argument("--smoke", action="store_true", help="seconds, no result")
  args = parser.parse_args()
  if args.smoke:
    args.snapshots, args.sequences, args.every = 6, 4, 60
  bindings = [
    *BINDINGS,
    f"Batch.sequences={args.sequences}",
    f"Checkpoint.every_rounds={args.every}",
    "Checkpoint.least_s=0",
  ]
  program = live.compiled(configs.resolve([], bindings))
  started_at = time.monotonic()
  with tempfile.TemporaryDirectory(prefix="decoupled-bench-") as name:
    folder = Path(name)
    more = (f"--started_at={started_at!r}",)
    with (
      live.syncer(folder, bindings, more=more) as syncer,
      live.learner(program, folder) as learner,
    ):
      saving = Saving(learner, folder / "checkpoints", syncer, args.every)
      count = SETTLE_STEPS + args.snapshots * (args.every + 1)
      learner.train(count, after_step=saving.after_step)
      saving.snapshots.finish()
    jobs.say(measured(saving, of_syncer(folder, started_at)))


if __name__ == "__main__":
  main()
