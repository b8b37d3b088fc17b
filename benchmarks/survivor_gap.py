"""Does a failure disturb the others?

    python benchmarks/survivor_gap.py                (about 8 minutes)
    python benchmarks/survivor_gap.py --faults kill

Three learners as real processes, inner steps padded with a sleep of 0.1 s
that stands for accelerator time. Per fault one JSON line, medians over the
repeats:

  kill   SIGKILL of learner 1, which the runner starts again
  pause  SIGSTOP of learner 1 for 20 s
  slow   learner 2 three times slower for good (a job for each repeat)

  gap_s, median_step_s, quiet_gap_s  of the survivor with the longest gap
  undisturbed        every survivor of every repeat (design section 7)
  gap_steps          median gap in median steps                     (<= 3)
  rounds_to_recover  rounds after the fault until three in a row again take at
                     most 1.5 x the median time of a round before it  (<= 2)
  share_ratio        slow only: learner 2's share of the merged tokens / its
                     share of the processed ones                  (>= 0.8)
"""

import argparse
import itertools
from typing import Any

import jobs

REPEATS = 5
PAD = "Local.pad_s=0.1"


def fault_job(fault: str, first_s: float, every_s: float, repeats: int) -> Any:
  """One job with `repeats` faults of learner 1 at regular times."""
  option = " for 20s" if fault == "pause" else ""
  times = [first_s + i * every_s for i in range(repeats)]
  plan = ";".join(f"{fault} learner/1 @{t:g}s{option}" for t in times)
  rounds = int((times[-1] + every_s) / 0.12)
  return jobs.run("--learners=3", f"--rounds={rounds}", PAD, f"--chaos={plan}")


def rounds_to_recover(job: jobs.Job, at_s: float) -> int:
  """See the module docstring; counts rounds that closed after `at_s`."""
  closed = [e["merged"] for e in job.of("round") if e["counted"]]
  before = [t for t in closed if t <= at_s]
  quiet = jobs.median([b - a for a, b in itertools.pairwise(before)][-100:])
  after = [before[-1], *(t for t in closed if t > at_s)]
  took = [b - a for a, b in itertools.pairwise(after)]
  for i in range(len(took)):
    if all(t <= 1.5 * quiet for t in took[i : i + 3]):
      return i
  return len(took)


def share_ratio(job: jobs.Job, since_s: float) -> float:
  """Learner 2's share of merged tokens / share of processed ones."""
  merged: dict[str, float] = {}
  for e in job.of("round"):
    if e["opened"] > since_s and e["counted"]:
      for learner, tokens in e["tokens"].items():
        merged[learner] = merged.get(learner, 0) + tokens * e["share"]
  last = max(e["merged"] for e in job.of("round") if e["counted"])
  processed = {
    i: sum(since_s < end <= last for end in jobs.step_ends(job, i))
    for i in range(3)
  }
  return (merged["2"] / sum(merged.values())) / (
    processed[2] / sum(processed.values())
  )


def line(fault: str, found: list[tuple[jobs.Job, dict[str, Any]]]) -> Any:
  """Medians over repeats; a repeat counts with its worst survivor."""
  worst = [max(f["survivors"], key=lambda s: s["gap_s"]) for _, f in found]
  return {
    "fault": fault,
    "gap_s": jobs.median([s["gap_s"] for s in worst]),
    "median_step_s": jobs.median([s["median_step_s"] for s in worst]),
    "quiet_gap_s": jobs.median([s["quiet_gap_s"] or 0.0 for s in worst]),
    "undisturbed": all(
      s["undisturbed"] is True for _, f in found for s in f["survivors"]
    ),
    "gap_steps": round(
      jobs.median([s["gap_s"] / s["median_step_s"] for s in worst]), 2
    ),
    "gaps_s": [s["gap_s"] for s in worst],
    "rounds_to_recover": jobs.median(
      [rounds_to_recover(job, f["at_s"]) for job, f in found]
    ),
    "repeats": len(found),
    "padded_s": 0.1,
  }


def slow(repeats: int) -> None:
  found, shares = [], []
  for _ in range(repeats):
    job = jobs.run(
      "--learners=3", "--rounds=420", PAD, "--chaos=slow learner/2 @130r by 3"
    )
    [event] = [e for e in job.of("fault") if e["action"] == "slow"]
    failure = {"at_s": event["at"], "survivors": survivors(job, event["at"])}
    found.append((job, failure))
    shares.append(share_ratio(job, event["at"] + 5.0))
  jobs.say({**line("slow", found), "share_ratio": jobs.median(shares)})


def survivors(job: jobs.Job, at_s: float) -> list[dict[str, Any]]:
  """The verdict on learners 0 and 1, as the report judges failures."""
  from decoupled.observe import gaps

  verdicts = []
  for learner in (0, 1):
    ends = jobs.step_ends(job, learner)
    window = gaps.Span(at_s, at_s + 10.0)
    run = gaps.Span(ends[0], ends[-1])
    verdict = gaps.judge(ends, window, [window], run)
    verdicts.append({"id": learner, **verdict._asdict()})
  return verdicts


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--faults", default="kill,pause,slow")
  parser.add_argument("--repeats", type=int, default=REPEATS)
  args = parser.parse_args()
  for fault in args.faults.split(","):
    if fault == "slow":
      slow(args.repeats)
      continue
    # a quiet stretch as long as a window comes first
    first_s, every_s = (35, 22) if fault == "kill" else (50, 36)
    job = fault_job(fault, first_s, every_s, args.repeats)
    failures = [f for f in job.report["failures"] if f["kind"] == fault]
    jobs.say(line(fault, [(job, f) for f in failures]))


if __name__ == "__main__":
  main()
