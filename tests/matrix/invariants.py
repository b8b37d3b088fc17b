"""What is true of every job, whatever it has suffered."""

import collections
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np

from decoupled.checkpoint import syncer_store
from decoupled.faults import Fault
from decoupled.link import digests
from tests.matrix.boots import LEARNERS, Ended
from tests.matrix.points import LEARNER_END
from tests.run.processes import decoupled

AT_THE_VERY_END = Fault("syncer", "syncer.ended", "kill", 1)
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
  # the end of a job that is told to end begins with its syncer
  told = _TERMINATED if job.status == _TERMINATED else 0
  assert seen - suffered == collections.Counter(
    (role, told if role == "syncer" else 0) for role in ended
  )
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


def _of(last: dict[int, Any], learner: int) -> int | None:
  return last[learner]["incarnation"] if learner in last else None


def _recorded(folder: Path) -> list[dict[str, Any]]:
  """Headers of the recorded merges, in order."""
  headers = []
  for path in sorted(folder.glob("*-[0-9]*.npz")):
    with np.load(path, allow_pickle=False) as saved:
      headers.append(json.loads(str(saved["header"])))
  return [h for h in headers if "copies" in h]
