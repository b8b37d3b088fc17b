"""`decoupled status`: how a job stands, from its log alone."""

import os
from pathlib import Path

from decoupled.errors import DecoupledError
from decoupled.observe.events import EventReader
from decoupled.observe.live import Live, LiveLearner, number


def status_lines(workdir: str | os.PathLike[str]) -> list[str]:
  """A line about the job, then one for each learner.

  Raises:
    DecoupledError: there is no log in `workdir`.
  """
  path = Path(workdir) / "events.jsonl"
  live, reader = Live(), EventReader(path)
  try:
    live.take(reader.rest())
  except OSError as error:
    raise DecoupledError(
      f"no status of {workdir}: {path} cannot be read "
      f"({error.strerror}); was it the --workdir of a run?"
    ) from None
  lines = [
    f"{_phase(live)} at {live.now_s:.1f} s: round {live.round}, term "
    f"{live.term}, {len(live.alive)} learners live, participation "
    f"{number(live.participation, '.2f')}, loss {number(live.loss, '.3f')}, "
    f"{number(live.tokens_per_second, ',.0f')} tokens/s"
  ]
  lines += [
    f"  learner/{id}: {_learner(one, live.now_s)}"
    for id, one in sorted(live.learners.items())
  ]
  lines += [
    f"  {name}: {one.state}"
    + (f" ({one.why})" if one.why else "")
    + f" since {max(0.0, live.now_s - one.since_s):.1f} s"
    + (f", fingerprint {one.fingerprint}" if one.fingerprint else "")
    for name, one in sorted(live.standbys.items())
  ]
  lines += [
    f"  learner/{id} is vacant: {why}"
    for id, why in sorted(live.vacant.items())
  ]
  if reader.skipped:
    lines.append(f"  {reader.skipped} lines of {path} could not be read")
  return lines


def _phase(live: Live) -> str:
  if live.ended is not None:
    reason = live.ended.get("reason")
    return str(live.ended.get("status")) + (f" ({reason})" if reason else "")
  return live.phase + (f" ({live.why})" if live.why else "")


def _learner(one: LiveLearner, now_s: float) -> str:
  unit = "–" if one.position is None else "unit {} + {}".format(*one.position)
  return (
    f"{'live' if one.alive else 'down'}, incarnation {one.incarnation}, "
    f"step {one.step}, loss {number(one.loss, '.3f')}, data at {unit}, "
    f"last seen {max(0.0, now_s - one.seen_s):.1f} s ago"
  )
