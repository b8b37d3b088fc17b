"""report.json from hand-made logs, with numbers worked by hand."""

import json

import pytest
from observe_logs import membership, round_event, steps_events, write_log

from decoupled.errors import DecoupledError
from decoupled.observe import report


def _start(learners=2):
  return {
    "t": 0.0,
    "kind": "start",
    "run_id": "r",
    "seed": 7,
    "wall_time": "",
    "learners": learners,
    "config": {},
  }


def _fault(t, action, target, **options):
  event = {"t": t, "kind": "fault", "action": action, "target": target}
  return {**event, "at": f"{t}s", **options}


def _exit(t, role, code=None, signal=None):
  return {"t": t, "kind": "exit", "role": role, "code": code, "signal": signal}


def _steps(learner, incarnation, ends, per_step=10, first=0, **fields):
  """One `steps` event with the ends given; counters start at `first`."""
  count = first + len(ends)
  return {
    "t": ends[-1] + 0.01,
    "kind": "steps",
    "learner": learner,
    "incarnation": incarnation,
    "step": count,
    "tokens": count * per_step,
    "schedule_step": count,
    "ends": ends,
    "loss": 2.0,
    "position": [0, count],
    **fields,
  }


def _range(start, stop, step=1.0):
  count = round((stop - start) / step)
  return [start + step * (i + 1) for i in range(count)]


def test_goodput_by_hand():
  """Two learners, 1 s a step, 10 tokens a step; rounds from 10 s to 30 s.

  Possible: 2 × 10 × 20 = 400. Processed in it: learner 0 does the steps that
  end in (10, 30]: 20 × 10 = 200. Learner 1 stops at 20 and starts again at
  25: steps ending at 11 … 20 and 26 … 30: 15 × 10 = 150. Discarded: 30 to
  failure, 50 to overlap, which is not subtracted. (350 − 30) / 400 = 0.8.
  """
  events = [
    _start(),
    membership(0.5, "join", 0, 1),
    membership(0.5, "join", 1, 2),
    _steps(0, 1, _range(5, 40)),
    _steps(1, 2, _range(5, 20)),
    membership(20.2, "leave", 1, 2),
    membership(24.5, "join", 1, 3),
    _steps(1, 3, _range(25, 40)),
    {
      "t": 20.2,
      "kind": "discard",
      "learner": 1,
      "cause": "failure",
      "tokens": 30,
    },
    {
      "t": 21.0,
      "kind": "discard",
      "learner": 0,
      "cause": "overlap",
      "tokens": 50,
    },
    round_event(1, 10.0, 11.0, [0, 1], [0, 1]),
    round_event(2, 29.0, 30.0, [0, 1], [0, 1]),
    round_event(3, 30.0, 39.0, [0, 1], [0, 1], counted=False),
  ]
  made = report.build(events)
  assert made["goodput"] == 0.8
  assert made["discarded"] == {"failure": 30, "overlap": 50}
  assert made["tokens_total"] == 350 + 150 + 150


def test_goodput_counts_a_learner_that_never_came():
  events = [
    _start(learners=2),
    membership(0.5, "join", 0, 1),
    _steps(0, 1, _range(0, 40)),
    round_event(1, 10.0, 30.0, [0], [0]),
  ]
  assert report.build(events)["goodput"] == 0.5


def test_goodput_of_a_learner_slowed_for_good_is_against_its_quiet_step():
  """1 s a step until 20 s, then 2 s: 10..20 gives 10 steps, 20..30 five."""
  events = [
    _start(learners=1),
    membership(0.5, "join", 0, 1),
    _steps(0, 1, _range(0, 20)),
    _fault(20.0, "slow", "learner/0", by=2),
    _steps(0, 1, _range(20, 40, 2.0), first=20),
    round_event(1, 10.0, 30.0, [0], [0]),
  ]
  made = report.build(events)
  assert made["goodput"] == 0.75
  assert made["failures"] == []


def test_participation_is_the_mean_of_the_rounds_shares():
  events = [
    _start(),
    round_event(1, 1, 2, [0, 1], [0, 1]),
    round_event(2, 2, 3, [0], [0, 1]),
    round_event(3, 3, 4, [0, 1, 2], [0, 1]),  # 2 died while it closed
    round_event(4, 4, 5, [0], []),  # nobody had finished a step
    round_event(5, 5, 6, [], [0, 1], counted=False, grace_s=9),
  ]
  rounds = report.build(events)["rounds"]
  assert rounds["closed"] == 4
  assert rounds["mean_participants"] == pytest.approx((2 + 1 + 3 + 1) / 4)
  assert rounds["participation"] == pytest.approx((1 + 0.5 + 1) / 3, abs=1e-4)
  assert rounds["grace_used_s_mean"] == 0.02


def test_rounds_lost_to_a_restart_of_the_syncer():
  """Term 1 closed round 5, the snapshot was of round 3: 4 and 5 are lost."""
  events = [_start()]
  events += [round_event(n, n, n + 0.9, [0], [0]) for n in range(1, 6)]
  events += [
    round_event(n, n + 9, n + 9.9, [0], [0], term=2) for n in range(4, 8)
  ]
  built = report.build(events)
  assert built["rounds"]["lost"] == 2
  # and what went into them was processed in vain
  wasted = sum(e["share"] * sum(e["tokens"].values()) for e in events[4:6])
  assert built["discarded"] == {"rollback": round(wasted)}
  assert wasted > 0


def _restore(t, round, term, cut_by):
  return {
    "t": t, "kind": "checkpoint", "what": "restore", "round": round,
    "path": "p", "ok": True, "error": "", "term": term, "cut_by": cut_by,
  }  # fmt: skip


def test_a_snapshot_holds_what_had_been_merged_whatever_its_number():
  """Round 4 was merged before round 3: the snapshot of three rounds has it."""
  events = [_start()]
  merged = (1, 2, 4, 3, 5)
  events += [round_event(n, i, i + 0.9, [0], [0]) for i, n in enumerate(merged)]
  events.append(_restore(7.0, 3, 2, 1))
  events += [
    round_event(n, n + 9, n + 9.9, [0], [0], term=2) for n in range(4, 8)
  ]
  # 3 and 5 are lost; 4 was done twice and is not
  lost = events[4:6]
  built = report.build(events)
  assert built["rounds"]["lost"] == 2
  wasted = sum(e["share"] * sum(e["tokens"].values()) for e in lost)
  assert built["discarded"] == {"rollback": round(wasted)}


def test_a_term_that_saved_nothing_of_its_own_is_lost_as_a_whole():
  events = [_start(), _restore(0.1, 100, 4, 3)]
  events += [
    round_event(n, n - 100, n - 99.1, [0], [0], term=4) for n in range(101, 111)
  ]
  events.append(_restore(12.0, 105, 5, 4))
  events += [
    round_event(n, n - 90, n - 89.1, [0], [0], term=5) for n in range(106, 109)
  ]
  events.append(_restore(30.0, 105, 6, 4))
  assert report.build(events)["rounds"]["lost"] == 5 + 3


def test_a_fenced_syncer_that_closes_one_more_round_has_lost_it():
  events = [_start()]
  events += [round_event(n, n, n + 0.9, [0], [0]) for n in range(1, 6)]
  events += [
    round_event(n, n + 9, n + 9.9, [0], [0], term=2) for n in range(4, 8)
  ]
  events.append(round_event(6, 15.0, 15.2, [0], [0]))
  assert report.build(events)["rounds"]["lost"] == 3


def test_steps_that_were_told_to_two_syncers_count_once():
  ends = [0.1 * n for n in range(1, 31)]
  events = [
    _start(),
    membership(0.0, "join", 0, 1),
    _steps(0, 1, ends[:20]),
    membership(6.0, "join", 0, 2),
    # the last three again, by a clock that is known less well
    _steps(0, 2, [end + 0.03 for end in ends[17:]]),
  ]
  line = report.Timeline(events)
  assert len(line.learners[0].ends) == 30
  assert report.build(events)["learners"][0]["max_gap_s"] < 0.14


def test_refusals_by_reason():
  events = [
    _start(),
    *(
      {
        "t": 1,
        "kind": "refused",
        "learner": 0,
        "round": 1,
        "fragment": 0,
        "reason": reason,
        "tokens": 1,
      }
      for reason in ("stale", "checksum", "stale")
    ),
  ]
  assert report.build(events)["rounds"]["refused"] == {
    "stale": 2,
    "checksum": 1,
  }


def test_a_killed_learner_and_its_survivors(demo):
  (failure,) = report.build(demo)["failures"]
  assert failure["kind"] == "kill"
  assert failure["target"] == "learner/1"
  assert failure["at_s"] == 15.02
  assert failure["detected_s"] == 15.05
  assert failure["state_s"] == failure["ready_s"] == 20.0
  assert failure["first_step_s"] == 21.06
  assert failure["downtime_s"] == pytest.approx(6.04)
  assert failure["cold"] is True
  assert failure["compiles_after_takeover"] is None
  assert [s["id"] for s in failure["survivors"]] == [0, 2]
  assert all(s["undisturbed"] for s in failure["survivors"])
  # window 15.02 … 31.06; quiet: 5.06 … 15.02 is too short, after is not
  assert failure["survivors"][0]["quiet_gap_s"] == pytest.approx(0.06)


def test_incarnations_of_one_id_are_joined(demo):
  row = report.build(demo)["learners"][1]
  assert row["id"] == 1
  assert row["incarnation"] == 4
  assert row["inner_steps"] == 166 + 483
  assert row["tokens"] == (166 + 483) * 512
  assert row["median_step_s"] == pytest.approx(0.06)
  assert row["max_gap_s"] == pytest.approx(21.06 - 14.96)


def _one_failure(*extra, until=60.0, survivor=None):
  events = [
    _start(),
    membership(0.1, "join", 0, 1),
    membership(0.1, "join", 1, 2),
    *(survivor or steps_events(0, 1, 0.0, until, step_s=0.25)),
    *extra,
  ]
  return report.build(events)


def test_a_survivor_that_stalls_is_disturbed():
  survivor = [
    _steps(0, 1, [*_range(0, 30, 0.25), *_range(32, 60, 0.25)], first=0)
  ]
  made = _one_failure(
    _steps(1, 2, _range(0, 30)),
    _fault(30.0, "kill", "learner/1", norestart=True),
    membership(30.1, "leave", 1, 2),
    survivor=survivor,
  )
  (failure,) = made["failures"]
  assert failure["downtime_s"] is None
  assert failure["cold"] is None
  (row,) = failure["survivors"]
  assert row["gap_s"] == pytest.approx(2.25)
  assert row["quiet_gap_s"] == pytest.approx(0.25)
  assert row["undisturbed"] is False


def test_the_idle_time_after_the_drain_disturbs_nobody():
  made = _one_failure(
    _steps(1, 2, _range(0, 18)),
    _fault(18.0, "kill", "learner/1"),
    {"t": 20.0, "kind": "phase", "phase": "draining", "why": ""},
    {"t": 90.0, "kind": "end", "status": "completed", "reason": ""},
    until=20.0,
  )
  assert made["failures"][0]["survivors"][0]["undisturbed"] is True


def test_a_survivor_is_judged_until_it_is_struck_itself():
  made = _one_failure(
    _steps(1, 2, _range(0, 60)),
    _fault(30.0, "partition", "learner/1", **{"for": 1}),
    _fault(35.0, "kill", "learner/0"),
    membership(35.1, "leave", 0, 1),
    until=35.0,
  )
  first = made["failures"][0]
  assert first["downtime_s"] is None  # it never stopped
  assert first["detected_s"] is None
  assert first["survivors"][0]["gap_s"] == pytest.approx(0.25)
  assert made["failures"][1]["survivors"][0]["id"] == 1


def test_a_short_pause_is_over_with_the_next_step():
  made = _one_failure(
    _steps(1, 2, [*_range(0, 30), 32.5, *_range(33, 60)]),
    _fault(30.0, "pause", "learner/1", **{"for": 2}),
    {"t": 60.1, "kind": "phase", "phase": "draining", "why": ""},
    membership(60.5, "leave", 1, 2, why="drained"),
  )
  (failure,) = made["failures"]
  assert failure["detected_s"] is None
  assert failure["downtime_s"] == pytest.approx(2.5)
  assert failure["cold"] is False


def test_a_long_pause_ends_with_a_new_incarnation():
  made = _one_failure(
    _steps(1, 2, _range(0, 20)),
    _fault(20.0, "pause", "learner/1", **{"for": 10}),
    membership(25.0, "leave", 1, 2, why="lease"),
    membership(30.2, "join", 1, 3),
    _steps(1, 3, _range(30, 40)),
  )
  (failure,) = made["failures"]
  assert failure["detected_s"] == 25.0
  assert failure["state_s"] == 30.2
  assert failure["downtime_s"] == 11.0
  assert failure["cold"] is False


def test_an_exit_belongs_to_its_fault_or_is_a_failure_of_its_own():
  made = _one_failure(
    _steps(1, 2, _range(0, 20)),
    _fault(20.0, "kill", "learner/1"),
    _exit(20.1, "learner/1", signal="SIGKILL"),
    membership(20.1, "leave", 1, 2),
    {"t": 20.1, "kind": "restart", "role": "learner/1", "attempt": 2},
    membership(22.0, "join", 1, 3),
    _steps(1, 3, _range(22, 40)),
    membership(40.1, "leave", 1, 3),
    _exit(40.3, "learner/1", code=1),  # noticed after the connection broke
    {"t": 40.3, "kind": "restart", "role": "learner/1", "attempt": 3},
    membership(42.0, "join", 1, 4),
    _steps(1, 4, _range(42, 60)),
    {"t": 61.0, "kind": "end", "status": "completed", "reason": ""},
    _exit(62.0, "learner/0", signal="SIGTERM"),
  )
  kill, crash = made["failures"]
  assert (kill["kind"], kill["downtime_s"]) == ("kill", 3.0)
  assert (crash["kind"], crash["target"]) == ("exit", "learner/1")
  assert crash["at_s"] == crash["detected_s"] == 40.1
  assert crash["downtime_s"] == pytest.approx(2.9)
  assert crash["cold"] is True


@pytest.mark.parametrize("struck", ["learner/1", "learner/1/host/0"])
def test_exits_of_hosts_belong_to_what_struck_their_learner(struck):
  made = _one_failure(
    _steps(1, 2, _range(0, 20)),
    _fault(20.0, "kill", struck),
    _exit(20.1, "learner/1/host/0", signal="SIGKILL"),
    {**_exit(20.2, "learner/1/host/1", signal="SIGKILL"), "planned": True},
    membership(20.1, "leave", 1, 2),
    *(
      {
        "t": 20.3,
        "kind": "restart",
        "role": f"learner/1/host/{h}",
        "attempt": 2,
      }
      for h in range(2)
    ),
    membership(22.0, "join", 1, 3),
    _steps(1, 3, _range(22, 40)),
  )
  (failure,) = made["failures"]
  assert (failure["kind"], failure["target"]) == ("kill", struck)
  assert failure["downtime_s"] == 3.0
  assert failure["cold"] is True


def test_a_fault_that_could_not_be_injected_is_none():
  made = _one_failure(_fault(20.0, "kill", "learner/1", error="is down"))
  assert made["failures"] == []


def test_the_syncer_is_back_with_a_round_of_a_higher_term():
  made = _one_failure(
    *(round_event(n, n, n + 0.5, [0], [0]) for n in range(1, 20)),
    _fault(20.0, "kill", "syncer"),
    {
      "t": 20.1,
      "kind": "exit",
      "role": "syncer",
      "signal": "SIGKILL",
      "code": None,
      "planned": False,
    },
    {"t": 20.2, "kind": "restart", "role": "syncer", "attempt": 2},
    {
      "t": 24.0,
      "kind": "checkpoint",
      "what": "restore",
      "ok": True,
      "path": "x",
      "round": 19,
      "error": "",
    },
    {"t": 25.0, "kind": "phase", "phase": "training", "why": ""},
    round_event(20, 26.0, 26.5, [0], [0], term=2),
    {"t": 40.0, "kind": "phase", "phase": "draining", "why": ""},
  )
  (failure,) = made["failures"]
  assert (failure["detected_s"], failure["state_s"]) == (20.1, 24.0)
  assert (failure["ready_s"], failure["cold"]) == (25.0, True)
  assert failure["state_source"] == "checkpoint"
  assert failure["downtime_s"] == pytest.approx(6.51)
  assert [s["id"] for s in failure["survivors"]] == [0]


def _units(t, claimed, completed, repeated=0, unclaimed=0):
  return {
    "t": t, "kind": "units", "claimed": claimed, "completed": completed,
    "repeated": repeated, "unclaimed": unclaimed, "low": completed,
  }  # fmt: skip


def test_data_units_are_those_of_this_job():
  """It goes on from 20 units; a new syncer knows less until it is told."""
  events = [
    _start(),
    _units(0.5, 22, 20, repeated=1, unclaimed=2),
    _units(5.0, 26, 23, repeated=2, unclaimed=2),
    _units(6.0, 24, 21, repeated=1, unclaimed=2),
    _units(7.0, 27, 25, repeated=1, unclaimed=5),
  ]
  assert report.build(events)["data"] == {
    "units_claimed": 7,
    "units_completed": 5,
    "units_repeated": 1,
    "units_unclaimed": 3,
  }
  assert set(report.build([_start()])["data"].values()) == {0}


def test_wire_totals_add_up_over_restarts_of_the_syncer():
  events = [_start()]
  events += [
    {
      "t": t,
      "kind": "wire",
      "bytes_up": up,
      "bytes_down": 2 * up,
      "codec": "bfloat16",
    }
    for t, up in ((1, 10), (2, 30), (3, 5), (4, 9))
  ]
  assert report.build(events)["wire"] == {
    "bytes_up": 39,
    "bytes_down": 78,
    "codec": "bfloat16",
  }


def test_checkpoints_and_compiles():
  def saved(what, ok, path):
    return {
      "t": 1,
      "kind": "checkpoint",
      "what": what,
      "round": 1,
      "path": path,
      "ok": ok,
      "error": "",
    }

  done = {
    "t": 9,
    "kind": "learner_done",
    "learner": 1,
    "incarnation": 2,
    "steps": 5,
    "tokens": 50,
    "median_step_s": 1,
    "p99_step_s": 1,
    "compiles": {"hits": 3, "misses": 1},
  }
  made = report.build(
    [
      _start(),
      saved("restore", True, "a"),
      saved("save", True, "b"),
      saved("save", False, "c"),
      done,
    ]
  )
  assert made["checkpoints"] == {
    "saved": 1,
    "restored_from": "a",
    "failed_saves": 1,
  }
  assert made["compiles"] == {"learner/1": {"hits": 3, "misses": 1}}
  assert made["learners"][0]["inner_steps"] == 5


def test_every_field_of_the_design_is_there(demo):
  made = report.build(demo)
  expected = {
    None: "schema_version status exit_reason seed wall_s initial_loss "
    "eval_loss eval_tokens tokens_total goodput discarded learners rounds "
    "failures wire data compiles checkpoints",
    "rounds": "closed mean_participants participation grace_used_s_mean lost "
    "refused",
    "learners": "id hosts incarnation inner_steps tokens median_step_s "
    "p99_step_s max_gap_s final_loss",
    "failures": "kind target at_s detected_s state_s ready_s first_step_s "
    "downtime_s cold compiles_after_takeover state_source phases survivors",
    "wire": "bytes_up bytes_down codec",
    "data": "units_claimed units_completed units_repeated units_unclaimed",
    "checkpoints": "saved restored_from failed_saves",
  }
  for key, names in expected.items():
    part = made if key is None else made[key]
    part = part[0] if isinstance(part, list) else part
    assert set(names.split()) <= set(part), key
  assert set(made["failures"][0]["survivors"][0]) == {
    "id",
    "gap_s",
    "median_step_s",
    "quiet_gap_s",
    "undisturbed",
  }
  assert made["status"] == "completed"
  assert made["wall_s"] == 55.5


@pytest.mark.parametrize("keep", [0, 1, 2, 5, 40, 120])
def test_a_log_cut_off_anywhere_gives_a_report(tmp_path, demo, keep):
  path = write_log(tmp_path, demo[:keep])
  with path.open("ab") as file:
    file.write(b'{"t": 3.0, "kind": "ste')
  made = report.write(tmp_path)
  assert made["status"] == "interrupted"
  assert made["log_lines_skipped"] == 1
  assert json.loads((tmp_path / "report.json").read_text()) == made


def test_events_with_fields_missing_are_survived():
  kinds = "start phase join ready first_step leave round refused steps discard "
  kinds += "units fault exit restart learner_done wire checkpoint eval end"
  events = [{"t": 1.0, "kind": kind} for kind in kinds.split()]
  events += [{**event, "learner": 1, "incarnation": 2} for event in events]
  assert report.build(events)["schema_version"] == 1


def test_only_the_last_job_counts(tmp_path, demo):
  again = [
    {**_start(), "run_id": "again"},
    round_event(701, 1, 2, [0], [0]),
    {"t": 3.0, "kind": "end", "status": "failed", "reason": "disk"},
  ]
  write_log(tmp_path, demo + again)
  made = report.write(tmp_path)
  assert (made["status"], made["exit_reason"]) == ("failed", "disk")
  assert made["rounds"]["closed"] == 1
  given = report.write(tmp_path, "interrupted", "SIGTERM")
  assert (given["status"], given["exit_reason"]) == ("interrupted", "SIGTERM")


def test_what_befell_the_jobs_before_is_told_as_well(tmp_path, demo):
  restored = {"kind": "checkpoint", "what": "restore", "ok": True, "path": "p"}
  other = {**_start(), "resumed": False}
  killed = [e for e in demo if e["kind"] != "end"]
  last = report.build(demo)["rounds"]["closed"]
  again = [
    {**_start(), "resumed": True},
    {**restored, "t": 0.1, "round": last - 3, "term": 2, "cut_by": 1},
    round_event(last - 2, 1, 2, [0], [0], term=2),
    {"t": 3.0, "kind": "end", "status": "failed", "reason": "disk"},
  ]
  unrelated = report.build(demo)["failures"]
  write_log(tmp_path, [*demo, other, *killed[1:], *again])
  made = report.write(tmp_path)
  assert made["failures"] == []
  assert made["rounds"]["lost"] == 0
  (before,) = made["earlier_jobs"]  # the first one was of another run
  assert (before["status"], before["exit_reason"]) == ("interrupted", "")
  assert before["failures"] == unrelated
  assert before["rounds"]["lost"] == 3
  assert report.build(demo)["earlier_jobs"] == []


def test_no_log_is_one_line(tmp_path):
  with pytest.raises(DecoupledError, match=r"no events\.jsonl"):
    report.write(tmp_path)


def _takeover(*more):
  return _one_failure(
    _steps(1, 2, _range(0, 30)),
    _fault(30.0, "kill", "learner/1"),
    membership(30.1, "leave", 1, 2),
    _steps(1, 3, _range(31, 60)),
    {
      "t": 30.12,
      "kind": "decided",
      "learner": 1,
      "lost": 2,
      "standby": "standby/0",
      "why": "",
    },
    {
      "t": 30.2,
      "kind": "promoted",
      "learner": 1,
      "incarnation": 3,
      "standby": "standby/0",
      "holder": "h:9",
    },
    membership(30.2, "join", 1, 3),
    {
      "t": 30.6,
      "kind": "ready",
      "learner": 1,
      "incarnation": 3,
      "state_source": "donor",
      "compiles": {"hits": 28, "misses": 2},
      "phases": {"compiled": 9.0, "warm": 12.0, "joined": 30.2},
    },
    *more,
  )


def _said_after(compiles):
  return {
    "t": 30.9,
    "kind": "takeover",
    "learner": 1,
    "incarnation": 3,
    "standby": "standby/0",
    "compiles": compiles,
    "phases": {"first_step": 30.9},
  }


def test_a_takeover_is_warm_and_its_phases_follow_each_other():
  made = _takeover(_said_after(0))
  failure = made["failures"][0]
  assert failure["cold"] is False
  assert failure["compiles_after_takeover"] == 0
  assert failure["state_source"] == "donor"
  phases = failure["phases"]
  assert phases.pop("torn_down_s") is None
  assert phases["decided_s"] == pytest.approx(30.12)
  assert phases["connected_s"] == pytest.approx(30.2)
  # it had been loaded long before
  assert phases["executable_loaded_s"] == pytest.approx(30.12)
  assert phases["state_received_s"] == pytest.approx(30.6)
  assert phases["first_step_s"] == failure["first_step_s"]
  # what was compiled later counts as well
  later = _takeover(_said_after(0), {**_said_after(3), "t": 59.0})
  assert later["failures"][0]["compiles_after_takeover"] == 3


def test_a_restart_counts_all_that_it_compiled_or_loaded():
  assert _takeover()["failures"][0]["compiles_after_takeover"] == 30
