"""Does a failure disturb the others?

    python benchmarks/survivor_gap.py                (about 14 minutes)
    python benchmarks/survivor_gap.py --faults=kill  (about 4 minutes)

Three learners as real processes, one XLA thread each, inner steps padded with
a sleep of 0.1 s that stands for accelerator time. Per fault one JSON line:

  kill   SIGKILL of learner 1, which the runner starts again
  pause  SIGSTOP of learner 1 for 20 s
  slow   learner 2 three times slower for good (a job for each repeat)

A repeat counts with its worst survivor, the one with the longest gap; numbers
are medians over the repeats:

  gap_s, median_step_s, quiet_gap_s  as in report.json (design section 7)
  gap_steps          gap in median steps
  undisturbed        whether that is at most 3
  undisturbed_survivors  of all repeats, how many the report itself calls so
                     (null, no quiet stretch to compare with, is not)
  rounds_to_recover  rounds after the fault until four in a row again take at
                     most 1.25 x four median rounds before it        (<= 2)
  merged_share_over_processed_share   slow only: learner 2's share of the merged
                     tokens / its share of the processed ones      (>= 0.8)

Faults strike at round numbers: each has a quiet stretch before it that is as
long as the window in which the survivors are watched.
"""

import argparse
import itertools
from typing import Any, NamedTuple

import jobs

from decoupled.observe import gaps

ROUND_S = 0.115  # about one padded step; turns seconds into round numbers
PAD_S = 0.1
LEARNERS = 3
SETTLED_S = 5.0  # after a slow-down, until shares are counted


class Times(NamedTuple):
  """When faults strike, in seconds of training."""

  first_s: float
  every_s: float


# A window: until 10 s after the target's first step; a boot takes about 10 s.
TIMES = {"kill": Times(30, 35), "pause": Times(42, 42)}


class Repeat(NamedTuple):
  """One fault of a finished job."""

  job: jobs.Job
  at_s: float
  survivors: list[dict[str, Any]]

  @property
  def worst(self) -> dict[str, Any]:
    return max(self.survivors, key=lambda s: s["gap_s"])


def job(rounds: float, chaos: str) -> jobs.Job:
  return jobs.run(
    f"--learners={LEARNERS}",
    f"--rounds={rounds:.0f}",
    f"Local.pad_s={PAD_S}",
    f"--chaos={chaos}",
  )


def struck(fault: str, repeats: int) -> list[Repeat]:
  """One job in which learner 1 is struck again and again."""
  first_s, every_s = TIMES[fault]
  option = " for 20s" if fault == "pause" else ""
  at = [round((first_s + i * every_s) / ROUND_S) for i in range(repeats)]
  plan = ";".join(f"{fault} learner/1 @{r}r{option}" for r in at)
  done = job(at[-1] + every_s / ROUND_S, plan)
  found = [
    Repeat(done, f["at_s"], f["survivors"])
    for f in done.report["failures"]
    if f["kind"] == fault
  ]
  if len(found) != repeats:
    raise SystemExit(f"{len(found)} of {repeats} faults are in the report")
  return found


def slowed(before: int, after: int) -> Repeat:
  """One job in which learner 2 becomes three times slower for good."""
  done = job(before + after, f"slow learner/2 @{before}r by 3")
  [at_s] = [e["t"] for e in done.of("fault") if e["action"] == "slow"]
  return Repeat(done, at_s, [judged(done, i, at_s) for i in (0, 1)])


def judged(done: jobs.Job, learner: int, at_s: float) -> dict[str, Any]:
  """The verdict on a survivor, as the report judges those of failures."""
  ends = jobs.step_ends(done, learner)
  window = gaps.Span(at_s, at_s + gaps.SETTLE_S)
  run = gaps.Span(ends[0], ends[-1])
  return gaps.judge(ends, window, [window], run)._asdict()


def rounds_to_recover(done: jobs.Job, at_s: float) -> int:
  """See the module docstring; counts rounds that were merged after `at_s`."""
  merged = sorted(e["merged"] for e in done.of("round") if e["counted"])
  before = [t for t in merged if t <= at_s]
  quiet = jobs.median([b - a for a, b in itertools.pairwise(before)][-100:])
  after = [before[-1], *(t for t in merged if t > at_s)]
  took = [b - a for a, b in itertools.pairwise(after)]
  for i in range(len(took)):
    some = took[i : i + 4]
    if sum(some) <= 1.25 * quiet * len(some):
      return i
  return len(took)


def share_ratio(done: jobs.Job, since_s: float) -> float:
  """Learner 2's share of merged tokens / its share of processed ones."""
  rounds = [e for e in done.of("round") if e["counted"]]
  merged = dict.fromkeys(range(LEARNERS), 0.0)
  for e in rounds:
    if e["opened"] > since_s:
      for learner, tokens in e["tokens"].items():
        merged[int(learner)] += tokens * e["share"]
  last = max(e["merged"] for e in rounds)
  processed = {
    i: sum(since_s < end <= last for end in jobs.step_ends(done, i))
    for i in range(LEARNERS)
  }
  return (merged[2] / sum(merged.values())) / (
    processed[2] / sum(processed.values())
  )


def line(fault: str, repeats: list[Repeat]) -> dict[str, Any]:
  """What is printed of one fault."""
  worst = [r.worst for r in repeats]
  quiet = [w["quiet_gap_s"] for w in worst]
  recovered = [rounds_to_recover(r.job, r.at_s) for r in repeats]
  gap_steps = jobs.median([w["gap_s"] / w["median_step_s"] for w in worst])
  verdicts = [s["undisturbed"] is True for r in repeats for s in r.survivors]
  return {
    "fault": fault,
    "gap_s": jobs.median([w["gap_s"] for w in worst]),
    "median_step_s": jobs.median([w["median_step_s"] for w in worst]),
    "quiet_gap_s": None if None in quiet else jobs.median(quiet),
    "undisturbed": gap_steps <= 3,
    "undisturbed_survivors": f"{sum(verdicts)} of {len(verdicts)}",
    "gap_steps": round(gap_steps, 2),
    "rounds_to_recover": jobs.median(recovered),
    "repeats": len(repeats),
    "gaps_s": [w["gap_s"] for w in worst],
    "quiet_gaps_s": quiet,
    "recovered": recovered,
    "padded_s": PAD_S,
  }


def slow(repeats: int, before: int, after: int) -> dict[str, Any]:
  found = [slowed(before, after) for _ in range(repeats)]
  shares = [share_ratio(r.job, r.at_s + SETTLED_S) for r in found]
  return {
    **line("slow", found),
    "merged_share_over_processed_share": round(jobs.median(shares), 3),
    "shares": [round(share, 3) for share in shares],
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--faults", default="kill,pause,slow")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--smoke", action="store_true", help="half a minute")
  args = parser.parse_args()
  if args.smoke:
    jobs.say(slow(1, 60, 90))
    return
  for fault in args.faults.split(","):
    if fault == "slow":
      jobs.say(slow(args.repeats, 130, 290))
    else:
      jobs.say(line(fault, struck(fault, args.repeats)))


if __name__ == "__main__":
  main()
