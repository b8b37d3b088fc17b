"""`decoupled evaluate --follow`: held-out loss of each snapshot as it comes.

A process of its own that looks into the store: the run knows nothing of it and
waits for nothing. One snapshot is in memory at a time; where evaluating takes
longer than the run keeps one, those that are gone are passed over.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from decoupled import evaluate
from decoupled.checkpoint import syncer_store
from decoupled.checkpoint.commit import Damaged
from decoupled.checkpoint.syncer_store import Listed
from decoupled.clock import Clock, MonotonicClock
from decoupled.config import Config
from decoupled.errors import DecoupledError
from decoupled.launch.options import EvaluateOptions
from decoupled.observe.events import EventReader
from decoupled.observe.metrics import Metrics
from decoupled.types import EventSink

_LOG = logging.getLogger("decoupled.evaluate")
_LOOK_S = 2.0
_SAY_S = 60.0
# A syncer that ended its run saves once more; one that dies before it has is
# followed by another, which trains.
_FINAL_S = 60.0


def main(config: Config, options: EvaluateOptions) -> int:
  """Follows a run until it has ended, or a signal says stop.

  Returns:
    0; a curve that was stopped is as good up to there.

  Raises:
    DecoupledError: the store cannot be read, or holds another model.
  """
  stopping = threading.Event()
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: stopping.set())
  return follow(config, options, stopping)


def follow(
  config: Config,
  options: EvaluateOptions,
  stopping: threading.Event,
  clock: Clock | None = None,
) -> int:
  """See `main`; `stopping` ends it, also amid an evaluation."""
  clock = clock or MonotonicClock()
  log = evaluate.event_log(options)
  metrics = Metrics(options.workdir / "metrics" / "eval")
  store = options.store or str(options.workdir / "checkpoints")
  curve = Curve(store, evaluate.Evaluator(config), log, metrics)
  end = End(options.workdir, clock)
  said = clock.now()
  try:
    while not stopping.is_set():
      over = end.reached()  # before the look: what comes later is the last
      if curve.look(stopping.is_set):
        said = clock.now()
      elif over:
        break
      elif clock.now() - said >= _SAY_S:
        said = clock.now()
        _LOG.warning("no new snapshot under %s for %g s", store, _SAY_S)
      else:
        stopping.wait(_LOOK_S)
  finally:
    metrics.close()
    log.close()
  why = "stopped by a signal" if stopping.is_set() else "the run has ended"
  print(f"{why}: {curve.count} snapshots evaluated", flush=True)
  return 0


class Curve:
  """The snapshots of a store, evaluated once each, the oldest first.

  Args:
    store: folder or URL of the run's checkpoints.
    evaluator: of the run's configuration.
    events: told of each loss.
    metrics: likewise; the step is the round.

  Attributes:
    count: how many were evaluated.
  """

  def __init__(
    self,
    store: str,
    evaluator: evaluate.Evaluator,
    events: EventSink,
    metrics: Metrics,
  ):
    self.count = 0
    self._store = store
    self._evaluator = evaluator
    self._events = events
    self._metrics = metrics
    self._seen: set[str] = set()
    self._doubtful: dict[str, str] = {}  # path -> why it could not be read

  def look(self, stopping: Callable[[], bool]) -> bool:
    """Evaluates what is new; returns whether there was anything new.

    Raises:
      DecoupledError: the store cannot be read, or holds another model.
    """
    try:
      found = syncer_store.listed(self._store)
    except OSError as error:
      raise DecoupledError(
        f"the store {self._store} cannot be read: {error}"
      ) from None
    self._judge({os.fspath(saved.path) for saved in found})
    new = [s for s in reversed(found) if os.fspath(s.path) not in self._seen]
    for saved in new:
      if stopping():
        break
      self._evaluate(saved, stopping)
    return bool(new)

  def _evaluate(self, saved: Listed, stopping: Callable[[], bool]) -> None:
    path = os.fspath(saved.path)
    self._seen.add(path)
    try:
      snapshot = syncer_store.read(path)
    except Damaged as error:
      self._doubtful[path] = str(error)
      return
    try:
      found = self._evaluator.loss(snapshot, stopping)
    except evaluate.Stopped:
      return
    self.count += 1
    self._events.emit(
      "heldout",
      loss=found.loss,
      tokens=found.tokens,
      round=saved.rounds,
      term=saved.term,
      path=path,
    )
    self._metrics.scalar("heldout_loss", found.loss, saved.rounds)
    print(
      f"round {saved.rounds} (term {saved.term}): held-out loss "
      f"{found.loss:.4f} ({found.tokens:,} tokens)",
      flush=True,
    )

  def _judge(self, there: set[str]) -> None:
    """Says of what could not be read whether it was dropped, or is damaged."""
    for path, why in self._doubtful.items():
      if path in there:
        print(f"passed over: {why}", flush=True)
      else:
        print(f"passed over: {path} was dropped meanwhile", flush=True)
    self._doubtful.clear()


class End:
  """Whether the newest job of a workdir is over, from its log.

  Args:
    workdir: of the run.
    clock: for intervals only.
  """

  def __init__(self, workdir: Path, clock: Clock):
    self._reader = EventReader(workdir / "events.jsonl")
    self._report = workdir / "report.json"
    self._clock = clock
    self._ended_at: float | None = None
    self._over = False

  def reached(self) -> bool:
    """Whether nothing more will be saved."""
    if not self._reader.path.exists():
      return self._report.exists()
    for event in self._reader.new():
      kind = event["kind"]
      if kind in ("start", "phase"):
        ended = event.get("phase") == "ended"
        self._ended_at = self._clock.now() if ended else None
        self._over = False
      elif kind == "end":
        self._over = True
      elif kind == "checkpoint" and self._ended_at is not None:
        self._over |= event.get("role") == "syncer"
    late = (
      self._ended_at is not None
      and self._clock.now() - self._ended_at >= _FINAL_S
    )
    return self._over or late
