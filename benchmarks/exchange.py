"""Does the exchange keep up? Participation, overlap and pace of the rounds.

    python benchmarks/exchange.py            (about a minute)

Four one-host learners as real processes, inner steps padded with a sleep of
0.15 s that varies by 5 % and stands for accelerator time, H = P = 24, tau = 2,
quorum 1 plus grace. Prints one JSON line:

  participation        mean over rounds of merged / live learners  (>= 0.95)
  open_to_adopt_steps  median over rounds and learners of the time from the
                       opening of a round to the report that shows its result
                       adopted, in that learner's median steps    (<= tau)
  rounds_per_step      median step / median time between openings (>= 0.97)
"""

import argparse
import itertools

import jobs


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=240)
  parser.add_argument("--pad_s", type=float, default=0.15)
  args = parser.parse_args()
  job = jobs.run(
    "--learners=4",
    f"--rounds={args.rounds}",
    "--devices_per_host=1",
    f"Local.pad_s={args.pad_s}",
    "Local.jitter=0.05",
    "Exchange.H=24",
    "Exchange.P=24",
    "Exchange.tau=2",
    "Exchange.quorum=1",
  )
  steps = {x["id"]: x["median_step_s"] for x in job.report["learners"]}
  waits = [
    wait / steps[event["learner"]]
    for event in job.of("steps")
    for wait in event.get("adopted_after_s", ())
  ]
  opened = [e["opened"] for e in job.of("round") if e["counted"]]
  pace = jobs.median([b - a for a, b in itertools.pairwise(opened)])
  step_s = jobs.median(list(steps.values()))
  jobs.say(
    {
      "participation": job.report["rounds"]["participation"],
      "open_to_adopt_steps": round(jobs.median(waits), 3),
      "rounds_per_step": round(step_s / pace, 4),
      "median_step_s": step_s,
      "rounds": len(opened),
      "adoptions": len(waits),
      "discarded": job.report["discarded"],
      "refused": job.report["rounds"]["refused"],
      "padded_s": args.pad_s,
    }
  )


if __name__ == "__main__":
  main()
