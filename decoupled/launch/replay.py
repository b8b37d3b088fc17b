"""`decoupled replay`: does the recording lead to what the run has saved?"""

from collections.abc import Sequence

from decoupled.errors import DecoupledError
from decoupled.launch.options import ReplayOptions
from decoupled.observe import report
from decoupled.observe.events import Event, EventReader, last_job
from decoupled.syncer import replay as replay_lib
from decoupled.syncer.replay import Replayed


def main(options: ReplayOptions) -> int:
  """Merges the recorded contributions again and says what came out.

  Returns:
    0 where every bit agrees, else 1.

  Raises:
    DecoupledError: there is no recording, or nothing to compare it with.
  """
  path = options.workdir / "events.jsonl"
  try:
    events = EventReader(path).rest()
  except OSError as error:
    raise DecoupledError(
      f"{path} cannot be read ({error.strerror}): was it the --workdir of a "
      "run?"
    ) from None
  done = replay_lib.replay(
    options.workdir / "tape",
    options.store or str(options.workdir / "checkpoints"),
    closed_rounds(events),
  )
  done.problems += _loss_differs(done, events)
  print("\n".join(lines(done)))
  return int(bool(done.problems))


def closed_rounds(events: Sequence[Event]) -> dict[int, list[int]]:
  """Per term its counted rounds, in the order of the log."""
  closed: dict[int, list[int]] = {}
  for event in events:
    if event["kind"] == "round" and event.get("counted"):
      closed.setdefault(int(event["term"]), []).append(int(event["round"]))
  return closed


def lines(done: Replayed) -> list[str]:
  """What is printed: a line a term, what is to be known, the verdict."""
  said = [term.line() for term in done.terms]
  said += [f"note: {note}" for note in done.notes]
  if done.problems:
    said += [f"differs: {problem}" for problem in done.problems[1:]]
    return [*said, f"verdict: DIFFERS: {done.problems[0]}"]
  lost = sum(term.lost for term in done.terms)
  return [
    *said,
    f"verdict: the same bits as {done.newest.path} (round "
    f"{done.newest.rounds}, term {done.newest.term}): global parameters and "
    f"outer state of {len(done.newest.versions)} fragments; {lost} rounds lost",
  ]


def _loss_differs(done: Replayed, events: Sequence[Event]) -> list[str]:
  """The rounds lost in the newest job, by the tape and by the report."""
  job = last_job(list(events))
  terms = set(closed_rounds(job))
  if not terms or not terms <= {term.term for term in done.terms}:
    return []  # not all of it was recorded
  ours = sum(term.lost for term in done.terms if term.term in terms)
  theirs = report.build(job)["rounds"]["lost"]
  if ours == theirs:
    return []
  return [f"{ours} rounds were lost by the tape, {theirs} by the report"]
