"""What is true of every job, whatever it has suffered."""

import collections
import json
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np

from decoupled.checkpoint import syncer_store
from decoupled.faults import Fault
from decoupled.link import digests
from tests.matrix.boots import LEARNERS, LEASE_S, Ended
from tests.matrix.points import LEARNER_END
from tests.run.processes import decoupled

AT_THE_VERY_END = Fault("syncer", "syncer.ended", "kill", 1)
HELD = 3  # units in hand: two, or enough for 24 steps
_TERMINATED = 128 + signal.SIGTERM
_REPLAY_S = 300


def check(job: Ended) -> None:
  """All of them; the order is that of how much a failure tells."""
  everything_happened(job)
  exits_are_true(job)
  no_tracebacks(job)
  versions_rise(job)
  one_incarnation_at_a_time(job)
  nothing_stale_was_merged(job)
  survivors_went_on(job)
  joiners_got_what_there_was(job)
  units_are_accounted_for(job)
  everything_was_saved(job)
  parameters_are_equal(job)
  the_replay_agrees(job)


def everything_happened(job: Ended) -> None:
  numbers = [said["number"] for said in job.happened]
  assert sorted(numbers) == list(range(len(job.asked))), [
    str(f) for i, f in enumerate(job.asked) if i not in numbers
  ]


def exits_are_true(job: Ended) -> None:
  """Each process ended as it was made to, and the job says how it ended."""
  ends: dict[tuple[str, int], object] = {}  # by process, the last one counts
  for said in job.happened:
    how = {"kill": "SIGKILL", "term": _TERMINATED}.get(said["action"])
    if how is not None:
      ends[said["role"], said["pid"]] = how
  suffered = collections.Counter((role, how) for (role, _), how in ends.items())
  suffered.update((role, "SIGKILL") for role in job.struck)
  suffered.update(  # by a plan of the job's own
    (e["target"], "SIGKILL")
    for e in job.of("fault")
    if e["action"] == "kill" and "error" not in e
  )
  seen = collections.Counter(
    (e["role"], e["signal"] or e["code"])
    for e in job.of("exit")
    if e["role"] != "evaluate"
  )
  ended = {"syncer", *(f"learner/{i}" for i in range(LEARNERS))}
  for said in job.happened:
    # nobody is started again for the end alone, and one that had ended is no
    # victim of a SIGTERM
    if said["point"] in LEARNER_END and said["action"] in ("kill", "term"):
      role, how = said["role"], ends[said["role"], said["pid"]]
      if how == "SIGKILL" or seen[role, how]:
        ended.remove(role)
      else:
        suffered[role, how] -= 1
  assert seen - suffered == collections.Counter((role, 0) for role in ended)
  assert suffered - seen == collections.Counter()


def no_tracebacks(job: Ended) -> None:
  for log in sorted((job.workdir / "logs").glob("*.log")):
    assert "Traceback" not in log.read_text(errors="replace"), log
  assert "Traceback" not in job.said


def versions_rise(job: Ended) -> None:
  """Within a term no fragment goes back, and terms only rise."""
  newest: dict[int, tuple[int, int]] = {}
  term = 0
  for e in job.of("round"):
    version = (e["term"], e["round"])
    assert e["term"] >= term
    assert version > newest.get(e["fragment"], (0, 0))
    newest[e["fragment"]], term = version, e["term"]
  numbers = [(e["term"], e["round"]) for e in job.of("round")]
  assert len(numbers) == len(set(numbers))


def one_incarnation_at_a_time(job: Ended) -> None:
  """A learner id has one holder, and each has a higher number."""
  holds: dict[int, tuple[int, int]] = {}
  before: dict[int, tuple[int, int]] = {}
  for e in job.events:
    if e["kind"] not in ("join", "leave"):
      continue
    learner, incarnation = e["learner"], e["incarnation"]
    if e["kind"] == "leave":
      _, held = holds.pop(learner)
      assert held == incarnation
      continue
    now = (e["term"], incarnation)
    if learner in holds:  # the syncer that had let it in is dead
      assert holds[learner][0] < e["term"]
    assert now > before.get(learner, (0, 0))
    holds[learner] = before[learner] = now


def nothing_stale_was_merged(job: Ended) -> None:
  """Only the newest incarnation of a learner contributes, and one per round."""
  for e in job.of("round"):
    assert len(set(e["participants"])) == len(e["participants"])
    assert set(e["participants"]) <= set(e["alive"])
  newest: dict[tuple[int, int], int] = {}
  for header in _recorded(job.workdir / "tape"):
    term = header["version"][0]
    for said in header["copies"]:
      incarnation, of_term = said["copy"][:2]
      assert of_term == term
      assert incarnation >= newest.get((term, said["learner"]), 0)
      newest[term, said["learner"]] = incarnation


def survivors_went_on(job: Ended) -> None:
  """While a learner was gone the others closed rounds."""
  exits = [e for e in job.of("exit") if not e["planned"]]
  for gone in exits:
    if gone["role"] == "syncer":
      continue
    back = min(
      (
        e["t"]
        for e in job.of("first_step")
        if f"learner/{e['learner']}" == gone["role"] and e["t"] > gone["t"]
      ),
      default=None,
    )
    alone = back is not None and not any(
      gone["t"] - 1 < e["t"] < back and e is not gone for e in exits
    )
    if alone:
      assert any(gone["t"] < e["t"] < back for e in job.of("round")), gone


def joiners_got_what_there_was(job: Ended) -> None:
  """A donor's state where there was a donor left, else the own checkpoint."""
  began = min(e["t"] for e in job.of("phase"))
  for ready in job.of("ready"):
    join = _join_of(job, ready)
    if join["t"] < began or ready["learner"] not in _saved_before(job, join):
      continue
    assert ready["state_source"] in ("donor", "checkpoint"), ready
    given = [
      e
      for e in job.of("donation")
      if e["learner"] == ready["learner"] and join["t"] <= e["t"] <= ready["t"]
    ]
    if ready["state_source"] == "donor":
      # (the syncer may have died before it could say so)
      assert all(e["donor"] == ready["donor"] for e in given if e["ok"]), ready
    elif not _broken_off(job, join, ready):
      assert not any(e["ok"] for e in given), ready
      left = _could_give(job, join, ready) - {e["donor"] for e in given}
      assert not left, (ready, given)


def units_are_accounted_for(job: Ended) -> None:
  """One unit a death is repeated at most, and none is forgotten.

  Units are handed out from the lowest one on: up to the newest each is done, is
  somebody's at the end, or was begun by one that died and waits.
  """
  found = syncer_store.restore_newest(job.workdir / "checkpoints")
  assert found is not None
  units = found.value.units
  last = job.of("units")[-1]
  died = [e for e in job.of("exit") if e["role"].startswith("learner/")]
  deaths = sum(1 for e in died if e["signal"])
  assert last["repeated"] <= deaths + HELD * _absences(job), last
  done = set(range(units["low"])) | _places(units["done"])
  held = {place for claims in units["claims"].values() for place, _ in claims}
  left = {place for place, _, _ in units["left"]}
  assert not done & (held | left)
  assert not held & left
  known = done | held | left
  assert known >= set(range(max(known, default=0)))


def everything_was_saved(job: Ended) -> None:
  failed = [e for e in job.of("checkpoint") if not e["ok"]]
  assert failed == []


def parameters_are_equal(job: Ended) -> None:
  """Everybody who was there for the drain holds what was saved at its end."""
  found = syncer_store.restore_newest(job.workdir / "checkpoints")
  assert found is not None
  assert found.skipped == ()
  snapshot = found.value
  versions = [list(version) for version in snapshot.versions]
  drained = {
    e["learner"]: e["incarnation"]
    for e in job.of("leave")
    if e["why"] == "drained"
  }
  last = {e["learner"]: e for e in job.of("learner_done")}
  there = [last[i] for i, number in drained.items() if number == _of(last, i)]
  assert there
  expected = digests.of(snapshot.fragments)
  if job.asked[0] == AT_THE_VERY_END:  # what was merged last was not saved
    versions, expected = there[0]["versions"], there[0]["params_digest"]
  for e in there:
    assert e["versions"] == versions
    assert e["params_digest"] == expected, e["learner"]


def the_replay_agrees(job: Ended) -> None:
  done = decoupled("replay", f"--workdir={job.workdir}", timeout_s=_REPLAY_S)
  assert done.returncode == 0, done.stdout + done.stderr
  assert "verdict: the same bits as" in done.stdout


def ended_by_signal(job: Ended) -> None:
  """The runner was told to end, and says so."""
  assert job.status == _TERMINATED, job.said
  assert job.report["status"] == "interrupted"
  assert job.report["exit_reason"] == "stopped by SIGTERM"


def ended_by_itself(job: Ended, rounds: int) -> None:
  assert job.status == 0, job.said
  assert job.report["status"] == "completed"
  assert job.report["rounds"]["last"] == rounds


def _join_of(job: Ended, ready: dict[str, Any]) -> dict[str, Any]:
  """The first claim of the process that then had what it needs."""
  mine = [
    e
    for e in job.of("join")
    if e["learner"] == ready["learner"] and e["t"] <= ready["t"]
  ]
  return next(e for e in reversed(mine) if not e["previous"])


def _saved_before(job: Ended, join: dict[str, Any]) -> set[int]:
  """Learners that had saved themselves."""
  roles = [e["role"] for e in job.of("checkpoint") if e["t"] < join["t"]]
  return {int(r.removeprefix("learner/")) for r in roles if r != "syncer"}


def _broken_off(
  job: Ended, join: dict[str, Any], ready: dict[str, Any]
) -> bool:
  """Whether the joiner lost its connection, or its syncer, while it asked."""
  return any(
    join["t"] < e["t"] <= ready["t"]
    and (e["learner"] == ready["learner"] or e["term"] > join["term"])
    for e in job.of("join")
  )


def _could_give(
  job: Ended, join: dict[str, Any], ready: dict[str, Any]
) -> set[int]:
  """Who trained all the while that a joiner needed."""
  there = set()
  for learner in range(LEARNERS):
    own = [e for e in job.events if e.get("learner") == learner]
    went = [e["t"] for e in own if e["kind"] in ("leave", "join")]
    stepped = [e["t"] for e in own if e["kind"] == "first_step"]
    since = max([t for t in went if t < ready["t"]], default=math.inf)
    if since < min([t for t in stepped if t > since], default=0) < join["t"]:
      there.add(learner)
  return there - {ready["learner"]}


def _absences(job: Ended) -> int:
  """How often a learner was away beyond its lease, and others got its units."""
  return sum(
    1
    for e in job.of("leave")
    if e["why"] in ("lease", "closed") and _away_s(job, e) > LEASE_S
  )


def _away_s(job: Ended, leave: dict[str, Any]) -> float:
  if leave["why"] == "lease":
    return math.inf
  return min(
    e["t"] - leave["t"]
    for e in [*job.of("join"), job.events[-1]]
    if e["t"] >= leave["t"] and e.get("learner") in (None, leave["learner"])
  )


def _places(ranges: list[list[int]]) -> set[int]:
  return {p for first, last in ranges for p in range(first, last + 1)}


def _of(last: dict[int, Any], learner: int) -> int | None:
  return last[learner]["incarnation"] if learner in last else None


def _recorded(folder: Path) -> list[dict[str, Any]]:
  """Headers of the recorded merges, in order."""
  headers = []
  for path in sorted(folder.glob("*-[0-9]*.npz")):
    with np.load(path, allow_pickle=False) as saved:
      headers.append(json.loads(str(saved["header"])))
  return [h for h in headers if "copies" in h]
