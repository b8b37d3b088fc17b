"""Does the exchange keep up? Participation, overlap and pace of the rounds.

    python benchmarks/exchange.py            (about a minute)

Four one-host learners as real processes, inner steps padded with a sleep of
0.15 s that varies by 5 % and stands for accelerator time, H = P = 24, tau = 2,
quorum 1 plus grace. Prints one JSON line:

  participation        mean over rounds of merged / live learners  (>= 0.95)
  open_to_adopt_steps  median over rounds and learners of the time from the
                       opening of a round to the report that shows its result
                       adopted, in that learner's median steps    (<= tau)
  rounds_per_step      rounds opened per median step: median step / mean time
                       between openings                          (>= 0.97)

Times of adoptions are the syncer's receipt times of those reports, so that the
way of the report counts as well. Learners, not the machine, set the pace: the
sleep leaves room for four processes on two cores.
"""

import argparse

import jobs


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=240)
  parser.add_argument("--pad_s", type=float, default=0.15)
  parser.add_argument("--smoke", action="store_true", help="half a minute")
  args = parser.parse_args()
  if args.smoke:
    args.rounds, args.pad_s = 40, 0.05
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
  opened = sorted(e["opened"] for e in job.of("round") if e["counted"])
  opened = opened[len(opened) // 10 :]  # paced only after two timed steps
  pace = (opened[-1] - opened[0]) / (len(opened) - 1)
  step_s = jobs.median(list(steps.values()))
  jobs.say(
    {
      "participation": job.report["rounds"]["participation"],
      "open_to_adopt_steps": round(jobs.median(waits), 3),
      "rounds_per_step": round(step_s / pace, 4),
      "median_step_s": step_s,
      "rounds": job.report["rounds"]["closed"],
      "adoptions": len(waits),
      "discarded": job.report["discarded"],
      "refused": job.report["rounds"]["refused"],
      "padded_s": args.pad_s,
    }
  )


if __name__ == "__main__":
  main()
