"""A log as a job of three learners writes it, with one of them killed."""

import json
from pathlib import Path

import numpy as np


def write_log(workdir: Path, events) -> Path:
  path = workdir / "events.jsonl"
  path.write_text("".join(json.dumps(event) + "\n" for event in events))
  return path


def steps_events(
  learner, incarnation, start, stop, step_s=0.06, tokens=512, done=0, **fields
):
  """`steps` events, one a second, of steps that end every `step_s`."""
  ends = np.arange(start + step_s, stop + 1e-9, step_s).round(6).tolist()
  events, count = [], 0
  for second in range(int(start), int(stop) + 1):
    part = [e for e in ends if second < e <= second + 1]
    if not part:
      continue
    count += len(part)
    events.append(
      {
        "t": min(second + 1.0, part[-1] + 0.01),
        "kind": "steps",
        "learner": learner,
        "incarnation": incarnation,
        "step": count,
        "tokens": count * tokens,
        "schedule_step": done + count,
        "ends": part,
        "loss": 1.6 + 4 * float(np.exp(-(done + count) / 220)),
        "position": [(done + count) // 32, (done + count) % 32 * 8],
        **fields,
      }
    )
  return events


def round_event(number, opened, closed, participants, alive, **fields):
  return {
    "t": closed + 0.01,
    "kind": "round",
    "term": 1,
    "round": number,
    "fragment": (number - 1) % 24,
    "opened": opened,
    "quorum_at": closed - 0.005,
    "closed": closed,
    "merged": closed + 0.01,
    "participants": participants,
    "alive": alive,
    "grace_s": 0.02,
    "weights": {str(p): 1.0 for p in participants},
    "tokens": {str(p): 512 for p in participants},
    "steps": {str(p): 1 for p in participants},
    "share": 1 / 24,
    "counted": True,
    "why": "grace over",
    **fields,
  }


def membership(t, kind, learner, incarnation, **fields):
  extra = {
    "join": {"hosts": 1, "holder": "host:42", "previous": incarnation - 1},
    "leave": {"why": "closed", "detail": ""},
  }.get(kind, {})
  event = {"t": t, "kind": kind, "learner": learner, "incarnation": incarnation}
  return {**event, **extra, **fields}


def demo_events():
  """Killed at 15 s, back with a first step at 21.06 s, drained at 50 s."""
  events = [
    {
      "t": 0.0,
      "kind": "start",
      "run_id": "demo",
      "seed": 0,
      "wall_time": "2026-01-01T00:00:00+00:00",
      "learners": 3,
      "config": {"Exchange.H": "24"},
    },
    {"t": 0.4, "kind": "phase", "phase": "waiting", "why": "3 learners"},
    {"t": 5.0, "kind": "phase", "phase": "training", "why": "version 0"},
  ]
  for learner in range(3):
    events += [
      membership(4.0 + learner / 10, "join", learner, learner + 1),
      membership(5.1, "first_step", learner, learner + 1),
    ]
  events += steps_events(0, 1, 5.0, 50.0) + steps_events(2, 3, 5.0, 50.0)
  events += steps_events(1, 2, 5.0, 15.0)
  events += [
    {
      "t": 15.02,
      "kind": "fault",
      "action": "kill",
      "target": "learner/1",
      "at": "150r",
    },
    {
      "t": 15.04,
      "kind": "exit",
      "role": "learner/1",
      "code": None,
      "signal": "SIGKILL",
    },
    membership(15.05, "leave", 1, 2),
    {"t": 15.06, "kind": "restart", "role": "learner/1", "attempt": 2},
    {
      "t": 15.07,
      "kind": "discard",
      "learner": 1,
      "cause": "failure",
      "tokens": 700.0,
    },
    membership(20.0, "join", 1, 4),
    membership(21.1, "first_step", 1, 4),
  ]
  events += steps_events(1, 4, 21.0, 50.0, done=170)
  for number in range(1, 701):
    opened = 5.2 + (number - 1) * 0.064
    closed = opened + 0.06
    down = 15.0 < closed < 21.1
    alive = [0, 2] if down else [0, 1, 2]
    who = alive[:-1] if number % 40 == 0 else alive
    events.append(round_event(number, opened, closed, who, alive))
  events += [
    {"t": 50.1, "kind": "phase", "phase": "draining", "why": "700 rounds"},
    round_event(701, 50.2, 50.3, [0, 1, 2], [0, 1, 2], counted=False),
    {
      "t": 50.6,
      "kind": "wire",
      "bytes_up": 9_000_000,
      "bytes_down": 8_000_000,
      "codec": "float32",
    },
    {
      "t": 50.7,
      "kind": "checkpoint",
      "what": "save",
      "round": 701,
      "path": "checkpoints/global/1",
      "ok": True,
      "error": "",
    },
  ]
  events += [
    membership(51.0 + i / 10, "leave", i, n, why="drained")
    for i, n in enumerate((1, 4, 3))
  ]
  events += [
    {
      "t": 55.0,
      "kind": "eval",
      "initial_loss": 5.61,
      "eval_loss": 1.83,
      "eval_tokens": 65_536,
    },
    {"t": 55.5, "kind": "end", "status": "completed", "reason": ""},
  ]
  return sorted(events, key=lambda event: event["t"])
