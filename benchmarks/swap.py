"""A standby takes over for a dead learner, beside the restart of that learner.

    python benchmarks/swap.py                     (about 15 minutes)
    python benchmarks/swap.py --case learner      (two of its three jobs)
    python benchmarks/swap.py --case planned      (the third)

Two jobs of two learners as real processes, one XLA thread each, inner steps
padded with a sleep of 0.1 s that stands for accelerator time. In both, learner
1 is killed every 35 s: in one there are two standbys, and whoever was killed
becomes one; in the other it is started again, with a filled compile cache.
Prints a line for each case. `learner`, a whole learner:

  detect_s   from the fault until the syncer knows of it
  warm_s     from there to the first step of the standby that took over
  cold_s     from there to the first step of the learner that was started again
  speedup    cold_s / warm_s
  compiles_after_takeover  programs that a standby compiled or loaded since it
             was promoted; the most of all
  state_source  where its optimizer state came from, of all
  phases     medians of the parts of `warm_s`, one after the other
  undisturbed  whether the other learner was, as report.json means it (design
             section 7); null (no quiet stretch to compare with) is no pass

`planned` is a job in which learner 1 gets SIGTERM instead, with two standbys:

  gap_s      from the last step of the old one to the first of the standby
  limit_s    what is allowed: 1 s, or five median steps if that is longer
  handed_over  how many learners were relieved, rather than left by themselves
  request_s  from the signal to that first step; the old one trains meanwhile

All times are medians over the faults.
"""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import jobs

ROUND_S = 0.115  # about one padded step; turns seconds into round numbers
PAD_S = 0.1
SMOKE_PAD_S = 0.02
LEARNERS, STANDBYS, STRUCK = 2, 2, 1
FIRST_S, EVERY_S = 60.0, 35.0  # faults, in seconds of training
SMOKE_FIRST_S = 25.0
PARTS = ("decided", "connected", "state_received", "first_step")


def job(
  repeats: int,
  standbys: int,
  pad_s: float,
  first_s: float,
  action: str = "kill",
) -> jobs.Job:
  round_s = ROUND_S - PAD_S + pad_s
  at = [round((first_s + i * EVERY_S) / round_s) for i in range(repeats)]
  plan = ";".join(f"{action} learner/{STRUCK} @{r}r" for r in at)
  return jobs.run(
    f"--learners={LEARNERS}",
    f"--standbys={standbys}",
    f"--rounds={at[-1] + EVERY_S / round_s:.0f}",
    f"--chaos={plan}",
    f"Local.pad_s={pad_s}",
  )


def takeovers(done: jobs.Job, cold: bool) -> list[dict[str, Any]]:
  """The failure entries of the struck learner that ended as they should."""
  return [
    failure
    for failure in done.report["failures"]
    if failure["target"] == f"learner/{STRUCK}"
    and failure["kind"] == "kill"
    and failure["cold"] is cold
    and failure["first_step_s"] is not None
  ]


def after_detection(failures: Sequence[dict[str, Any]]) -> float:
  return jobs.median([f["first_step_s"] - f["detected_s"] for f in failures])


def parts(failures: Sequence[dict[str, Any]]) -> dict[str, float]:
  """Medians of the stretches between one phase and the next."""
  names = ("detected", *PARTS)
  stretches = {
    after: [
      f["phases"][f"{after}_s"] - f["phases"][f"{before}_s"] for f in failures
    ]
    for before, after in itertools.pairwise(names)
  }
  return {
    f"{name}_s": round(jobs.median(values), 3)
    for name, values in stretches.items()
  }


def undisturbed(failures: Sequence[dict[str, Any]]) -> bool | None:
  said = [s["undisturbed"] for f in failures for s in f["survivors"]]
  if False in said:
    return False
  return None if None in said or not said else True


def compare(
  warm: Sequence[dict[str, Any]], cold: Sequence[dict[str, Any]]
) -> dict[str, Any]:
  both = [*warm, *cold]
  warm_s, cold_s = after_detection(warm), after_detection(cold)
  return {
    "case": "learner",
    "detect_s": round(
      jobs.median([f["detected_s"] - f["at_s"] for f in both]), 3
    ),
    "warm_s": round(warm_s, 3),
    "cold_s": round(cold_s, 3),
    "speedup": round(cold_s / warm_s, 1),
    "compiles_after_takeover": max(f["compiles_after_takeover"] for f in warm),
    "state_source": "/".join(sorted({f["state_source"] for f in warm})),
    "repeats": [len(warm), len(cold)],
    "warm_s_each": [
      round(f["first_step_s"] - f["detected_s"], 3) for f in warm
    ],
    "cold_s_each": [
      round(f["first_step_s"] - f["detected_s"], 3) for f in cold
    ],
    "phases": parts(warm),
    "undisturbed": undisturbed(warm),
  }


def gaps(done: jobs.Job) -> list[float]:
  """Of the struck learner, at each fault: no step finished for how long."""
  ends = jobs.step_ends(done, STRUCK)
  joins = [
    e["t"]
    for e in done.of("join")
    if e["learner"] == STRUCK and e["incarnation"] > 1
  ]
  return [
    min(end for end in ends if end > t) - max(end for end in ends if end <= t)
    for t in joins
  ]


def planned(done: jobs.Job) -> dict[str, Any]:
  states = [e["state"] for e in done.of("handover")]
  learner = done.report["learners"][STRUCK]
  failures = [
    f
    for f in done.report["failures"]
    if f["kind"] == "term" and f["first_step_s"] is not None
  ]
  each = gaps(done)
  if not (each and failures):
    raise SystemExit(f"nobody took over; handovers: {states}")
  return {
    "case": "planned",
    "gap_s": round(jobs.median(each), 3),
    "limit_s": round(max(1.0, 5 * learner["median_step_s"]), 3),
    "gap_s_each": [round(gap, 3) for gap in each],
    "handed_over": states.count("done"),
    "given_up": states.count("given_up"),
    "request_s": round(
      jobs.median([f["first_step_s"] - f["at_s"] for f in failures]), 3
    ),
    "compiles_after_takeover": max(
      f["compiles_after_takeover"] for f in failures
    ),
    "state_source": "/".join(sorted({f["state_source"] for f in failures})),
    "phases": parts(failures),
    "undisturbed": undisturbed(failures),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--repeats", type=int, default=6, help="kills of a job")
  parser.add_argument("--smoke", action="store_true", help="one short kill")
  parser.add_argument("--case", choices=("learner", "planned"), default=None)
  given = parser.parse_args()
  repeats = 1 if given.smoke else given.repeats
  pad_s = SMOKE_PAD_S if given.smoke else PAD_S
  first_s = SMOKE_FIRST_S if given.smoke else FIRST_S
  if given.case != "planned":
    whole(repeats, pad_s, first_s)
  if given.case != "learner":
    done = job(repeats, STANDBYS, pad_s, first_s, "term")
    jobs.say({**planned(done), "padded_s": pad_s})


def whole(repeats: int, pad_s: float, first_s: float) -> None:
  # the first job fills the compile cache for both
  cold = takeovers(job(repeats, 0, pad_s, first_s), cold=True)
  warm = takeovers(job(repeats, STANDBYS, pad_s, first_s), cold=False)
  if not (warm and cold):
    raise SystemExit(
      f"of {repeats} kills a standby took over after {len(warm)}, and the "
      f"learner was started again after {len(cold)}: nothing to compare"
    )
  jobs.say({**compare(warm, cold), "padded_s": pad_s})


if __name__ == "__main__":
  main()
