"""The syncer's process: restore, serve, save.

Order at the end matters: the run has ended (every live learner holds the final
versions) before the final snapshot is cut, and the process exits only once
that is committed.
"""

import asyncio
import functools
import logging
import signal
import uuid
from collections.abc import Callable

from decoupled.algorithm import outer as outer_lib
from decoupled.checkpoint import syncer_store
from decoupled.clock import MonotonicClock
from decoupled.config import Config, contract_lines
from decoupled.errors import ConfigError, DecoupledError
from decoupled.launch.options import SyncerOptions
from decoupled.observe.events import EventLog, Tee
from decoupled.observe.metrics import Metrics, RoundMetrics
from decoupled.syncer.rounds import Plan, Rounds
from decoupled.syncer.service import Service, serve
from decoupled.types import Phase
from decoupled.wire import credentials
from decoupled.wire.address import Address, parse, publish_address

_LOG = logging.getLogger("decoupled.syncer")


def run(config: Config, options: SyncerOptions) -> int:
  """Serves a run to its end; returns the exit status.

  Raises:
    DecoupledError: with the line that the user reads.
  """
  clock = MonotonicClock()
  options.workdir.mkdir(parents=True, exist_ok=True)
  started_at = options.started_at
  if started_at is None:
    started_at = clock.now()
  store = options.store or str(options.workdir / "checkpoints")
  log = EventLog(options.workdir / "events.jsonl", started_at, clock)
  metrics = Metrics(options.workdir / "metrics" / "syncer")
  snapshot = _newest(store, options)
  if snapshot is not None and 0 < options.rounds <= snapshot.rounds:
    print(f"complete: {snapshot.rounds} rounds are in {store}")
    return 0
  seeds = _OnFirstTraining(
    # cut here and now, before a round can close; only written elsewhere
    lambda: functools.partial(_save, store, snapshot_of(rounds), log)
  )
  rounds = Rounds(
    Plan(
      run_id=snapshot.run_id if snapshot else uuid.uuid4().hex[:12],
      learners=options.learners,
      rounds=options.rounds,
      tokens=options.tokens,
      contract=(
        *contract_lines(config),
        ("run.seed", str(options.seed)),
      ),
    ),
    config.exchange,
    config.outer,
    config.limits,
    term=snapshot.term + 1 if snapshot else 1,
    events=Tee(log, RoundMetrics(metrics), seeds),
    started_at=started_at,
  )
  if snapshot is not None:
    seeds.done = True
    _continue(rounds, snapshot, config)
    log.emit(
      "checkpoint",
      what="restore",
      round=snapshot.rounds,
      path=store,
      ok=True,
      error="",
      role="syncer",
    )
  traffic = asyncio.run(
    serve(
      rounds,
      parse(options.bind),
      _token(options),
      started=lambda address, service: _started(options, address, service),
      clock=clock,
      events=log,
      allow_remote=options.allow_remote,
      transfer_s=config.limits.transfer_s,
      linger_s=config.limits.drain_s,
    )
  )
  log.emit(
    "wire",
    bytes_up=traffic.bytes_up,
    bytes_down=traffic.bytes_down,
    codec=config.exchange.codec,
  )
  if rounds.model is not None and rounds.has_history:
    _save(store, snapshot_of(rounds), log)
  metrics.close()
  log.close()
  return 0


class _OnFirstTraining:
  """An event sink that acts once, when version 0 is complete.

  Args:
    prepare: called at once; what it returns is run on another thread.
  """

  def __init__(self, prepare: Callable[[], Callable[[], None]]):
    self._prepare = prepare
    self.done = False

  def emit(self, kind: str, **fields: object) -> None:
    if kind == "phase" and fields["phase"] == "training" and not self.done:
      self.done = True
      loop = asyncio.get_running_loop()
      loop.run_in_executor(None, self._prepare())


def _started(
  options: SyncerOptions, address: Address, service: Service
) -> None:
  """Publishes the real address and lets SIGTERM end the run in order."""
  publish_address(options.workdir / "syncer.address", address)
  _LOG.info("syncer listens at %s", address)
  loop = asyncio.get_running_loop()
  for number in (signal.SIGTERM, signal.SIGINT):
    loop.add_signal_handler(number, service.drain, "stopped by a signal")


def _token(options: SyncerOptions) -> str:
  """The run token; the first syncer of a run makes it."""
  path = options.token_file or options.workdir / "run.token"
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    credentials.make_token(path)
    _LOG.warning("made the run token %s: learners need it (--token_file)", path)
  return credentials.read_token(path)


def _newest(
  store: str, options: SyncerOptions
) -> syncer_store.GlobalSnapshot | None:
  if options.resume == "never":
    return None
  restored = syncer_store.restore_newest(store)
  if restored is None:
    if options.resume == "required":
      raise ConfigError(
        f"--resume=required, but there is no snapshot in {store}"
      )
    return None
  for sentence in restored.skipped:
    _LOG.warning("%s", sentence)
  snapshot: syncer_store.GlobalSnapshot = restored.value
  return snapshot


def _continue(
  rounds: Rounds, snapshot: syncer_store.GlobalSnapshot, config: Config
) -> None:
  rounds.restore(
    snapshot.manifest,
    [
      (arrays, outer_lib.state_from_arrays(config.outer, saved))
      for arrays, saved in zip(snapshot.fragments, snapshot.outer, strict=True)
    ],
    snapshot.rounds,
    dict(snapshot.contract),
    {i: place.incarnation for i, place in snapshot.learners.items()},
    {i: place.position for i, place in snapshot.learners.items()},
    snapshot.fullest,
    {i: place.tokens for i, place in snapshot.learners.items()},
  )


def _save(
  store: str, state: syncer_store.GlobalSnapshot, log: EventLog
) -> None:
  """Commits a snapshot of the global model; failing is loud, not fatal."""
  path, error = "", ""
  try:
    path = syncer_store.save_global(store, state.rounds, state)
  except DecoupledError as failure:
    error = str(failure)
    _LOG.error("%s", error)
  log.emit(
    "checkpoint",
    what="save",
    round=state.rounds,
    path=path,
    ok=not error,
    error=error,
    role="syncer",
  )


def snapshot_of(rounds: Rounds) -> syncer_store.GlobalSnapshot:
  """Everything a later syncer needs to go on from here."""
  model = rounds.model
  assert model is not None
  fragments = [model.get(p) for p in range(len(model.fragments))]
  ids = set(rounds.membership.incarnations) | set(rounds.positions)
  return syncer_store.GlobalSnapshot(
    run_id=rounds.run_id,
    term=rounds.term,
    rounds=0 if rounds.phase is Phase.WAITING else rounds.rounds_closed,
    common_step=rounds.common_step,
    fullest=rounds.fullest,
    versions=model.versions,
    manifest=model.manifest,
    contract=tuple(sorted(rounds.contract.items())),
    fragments=tuple(f.arrays for f in fragments),
    outer=tuple(outer_lib.state_arrays(f.outer_state) for f in fragments),
    learners={
      i: syncer_store.LearnerPlace(
        incarnation=rounds.membership.incarnations.get(i, 0),
        tokens=rounds.tokens.get(i, 0),
        position=rounds.positions.get(i, (0, 0)),
      )
      for i in sorted(ids)
    },
  )
