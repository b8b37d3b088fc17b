"""From a learner's restart to its first contribution, and who notices.

    python benchmarks/recovery.py           (about 8 minutes)

Three learners as real processes, one XLA thread each, inner steps padded with
a sleep of 0.1 s that stands for accelerator time. First, for each source of
optimizer state, a line of medians over the restarts of learner 1:

  source    donor: it is asked to go (SIGTERM) and started again; checkpoint: it
            is killed in a job whose learners give nothing (Local.donates)
  boot_s    from the start of the process to its first own line: imports
  compile_s the corpus, the step and the copy, from the compile cache
  join_s    the claim of its id, and the warm-up of the exchange
  state_s   parameters from the syncer, and beside that its optimizer state
  first_step_s, contribution_s  to its first step, to the end of the first
            round that took something of it
  total_s   all of that

Then, for each of leave, join, donation and snapshot, whether the others were
`undisturbed` as report.json means it (design section 7): `gap_s` and
`median_step_s` of the worst of them, from the event until 10 s after it (after
the first step of who joined). Snapshots have a job of their own, in which only
they happen. null (no quiet stretch to compare with) is no pass.
"""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jobs

from decoupled.observe import gaps
from decoupled.observe.gaps import Span

ROUND_S = 0.115  # about one padded step; turns seconds into round numbers
PAD_S = 0.1
SMOKE_PAD_S = 0.02
LEARNERS = 3
STRUCK = 1
FIRST_S, EVERY_S = 30.0, 35.0  # faults, in seconds of training
SAVES_EVERY_S = 100.0
SAVE_S = 5.0  # a save is logged when it is over; it began within that time
PHASES = ("boot", "compile", "join", "state", "first_step", "contribution")


class Restart(NamedTuple):
  """One restart of a learner; times in seconds from the job's start.

  Attributes:
    left: when it was no member any more.
    joined: when it was granted its id again.
    first_step: when the syncer heard of its first step.
    donated: when a donor's state had been passed on, None without one.
    phases: seconds of each of PHASES.
    source: of its optimizer state.
  """

  left: float
  joined: float
  first_step: float
  donated: float | None
  phases: dict[str, float]
  source: str


def job(rounds: float, chaos: str, *more: str) -> jobs.Job:
  return jobs.run(
    f"--learners={LEARNERS}",
    f"--rounds={rounds:.0f}",
    f"Local.pad_s={PAD_S}",
    *((f"--chaos={chaos}",) if chaos else ()),
    *more,
  )


def struck(action: str, repeats: int, *more: str) -> jobs.Job:
  """One job in which learner 1 goes, and comes back, again and again."""
  at = [round((FIRST_S + i * EVERY_S) / ROUND_S) for i in range(repeats)]
  plan = ";".join(f"{action} learner/{STRUCK} @{r}r" for r in at)
  return job(at[-1] + EVERY_S / ROUND_S, plan, *more)


def first(events: Sequence[dict[str, Any]], since: float) -> dict[str, Any]:
  """The first of some events at or after a time."""
  return next(e for e in events if e["t"] >= since)


def restarts(done: jobs.Job) -> list[Restart]:
  """Every restart of learner 1, in order."""
  own = {
    kind: [e for e in done.of(kind) if e.get("learner") == STRUCK]
    for kind in ("leave", "join", "ready", "first_step", "donation")
  }
  return [
    _restart(done, own, event["t"])
    for event in done.of("restart")
    if event["role"] == f"learner/{STRUCK}"
  ]


def _restart(
  done: jobs.Job, own: dict[str, list[dict[str, Any]]], started: float
) -> Restart:
  ready = first(own["ready"], started)
  joined = first(own["join"], started)["t"]
  stepped = first(own["first_step"], started)["t"]
  merged = next(
    e["merged"]
    for e in sorted(done.of("round"), key=lambda e: e["merged"])
    if e["merged"] >= stepped and STRUCK in e["participants"]
  )
  marks = [
    started,
    *(ready["phases"][name] for name in ("booted", "compiled", "joined")),
    ready["phases"]["ready"],
    stepped,
    merged,
  ]
  given = [e["t"] for e in own["donation"] if e["ok"] and e["t"] >= started]
  took = [b - a for a, b in itertools.pairwise(marks)]
  return Restart(
    # the runner may see a death before the syncer does
    left=max(e["t"] for e in own["leave"] if e["t"] <= joined),
    joined=joined,
    first_step=stepped,
    donated=given[0] if ready["state_source"] == "donor" else None,
    phases=dict(zip(PHASES, took, strict=True)),
    source=ready["state_source"],
  )


def timed(
  source: str, found: list[Restart], padded_s: float = PAD_S
) -> dict[str, Any]:
  """The line of a source of optimizer state."""
  others = {r.source for r in found} - {source}
  if others or not found:
    raise SystemExit(f"restarts from {others or 'nowhere'}, not from {source}")
  totals = [sum(r.phases.values()) for r in found]
  return {
    "source": source,
    **{
      f"{name}_s": round(jobs.median([r.phases[name] for r in found]), 3)
      for name in PHASES
    },
    "total_s": round(jobs.median(totals), 3),
    "totals_s": [round(total, 3) for total in totals],
    "repeats": len(found),
    "padded_s": padded_s,
  }


def judged(
  event: str,
  done: jobs.Job,
  windows: list[tuple[Span, int | None]],
  busy: list[Span],
) -> dict[str, Any]:
  """The line of an event: windows, and who brought each of them about."""
  verdicts = []
  for window, cause in windows:
    for learner in range(LEARNERS):
      ends = jobs.step_ends(done, learner)
      if learner == cause or not ends:
        continue
      run = Span(ends[0], ends[-1])
      verdicts.append(gaps.judge(ends, window, busy, run))
  worst = max(verdicts, key=lambda v: v.gap_s or 0.0)
  said = [v.undisturbed for v in verdicts]
  unknown = None in said and False not in said
  return {
    "event": event,
    "undisturbed": None if unknown else all(said),
    "gap_s": worst.gap_s,
    "median_step_s": worst.median_step_s,
    "quiet_gap_s": worst.quiet_gap_s,
    "repeats": len(windows),
    "padded_s": PAD_S,
  }


def membership_lines(
  done: jobs.Job, found: list[Restart]
) -> list[dict[str, Any]]:
  """Leave, join and donation: parts of each restart."""
  settle = gaps.SETTLE_S
  busy = [Span(r.left, r.first_step + settle) for r in found]
  windows = {
    "leave": [Span(r.left, r.left + settle) for r in found],
    "join": [Span(r.joined, r.first_step + settle) for r in found],
    "donation": [
      Span(r.joined, r.donated + settle) for r in found if r.donated is not None
    ],
  }
  return [
    judged(event, done, [(window, STRUCK) for window in spans], busy)
    for event, spans in windows.items()
  ]


def snapshot_line(done: jobs.Job) -> dict[str, Any]:
  """Saves of learners and syncer, once all learners train."""
  began = max(jobs.step_ends(done, i)[0] for i in range(LEARNERS))
  over = min(jobs.step_ends(done, i)[-1] for i in range(LEARNERS))
  windows = []
  for event in done.of("checkpoint"):
    window = Span(event["t"] - SAVE_S, event["t"] + gaps.SETTLE_S)
    saved = event["what"] == "save" and event["ok"]
    if saved and began < window.start and window.stop < over:
      role = event["role"].partition("/")[2]
      windows.append((window, int(role) if role else None))
  if not windows:
    raise SystemExit("nothing was saved while all learners trained")
  return judged("snapshot", done, windows, [window for window, _ in windows])


def smoke() -> dict[str, Any]:
  """A short job with one restart from a donor."""
  done = jobs.run(
    "--learners=2",
    "--rounds=60",
    f"--chaos=kill learner/{STRUCK} @25r",
    f"Local.pad_s={SMOKE_PAD_S}",
    "Transformer.layers=3",
    "Corpus.max_bytes=2000000",
  )
  return timed("donor", restarts(done), SMOKE_PAD_S)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--repeats", type=int, default=3)
  parser.add_argument("--smoke", action="store_true", help="half a minute")
  args = parser.parse_args()
  if args.smoke:
    jobs.say(smoke())
    return
  done = struck("term", args.repeats)
  found = restarts(done)
  jobs.say(timed("donor", found))
  saving = ("Checkpoint.every_rounds=0", "Checkpoint.every_s=10")
  alone = struck("kill", args.repeats, "Local.donates=False", *saving)
  jobs.say(timed("checkpoint", restarts(alone)))
  for line in membership_lines(done, found):
    jobs.say(line)
  # a young run saves more often; here there has to be a quiet stretch between
  seldom = (f"Checkpoint.every_s={SAVES_EVERY_S:g}", "Checkpoint.first_s=0")
  quiet = job(
    1.3 * SAVES_EVERY_S / ROUND_S, "", "Checkpoint.every_rounds=0", *seldom
  )
  jobs.say(snapshot_line(quiet))


if __name__ == "__main__":
  main()
