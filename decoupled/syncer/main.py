"""The syncer's process: claim the run, restore, serve, save.

The term is on disk before anything is read or served, so that no other syncer
uses it, however soon this one dies. At the end the order matters, too: the run
has ended (every live learner holds the final versions) before the final
snapshot is cut, and the process exits only once that is committed. One that is
told to end before that hands the run over: it stops merging, so that nobody
holds more than its last snapshot has, and a successor goes on from there.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Coroutine
from typing import Any

import grpc

from decoupled import faults
from decoupled.checkpoint import syncer_store
from decoupled.checkpoint.commit import Restored
from decoupled.clock import MonotonicClock
from decoupled.config import Config, contract_lines
from decoupled.errors import ConfigError
from decoupled.launch import affinity
from decoupled.launch.options import SyncerOptions
from decoupled.launch.termination import Termination
from decoupled.observe.events import EventLog, Tee
from decoupled.observe.metrics import Metrics, RoundMetrics
from decoupled.syncer import lease as lease_lib
from decoupled.syncer.control import Traffic
from decoupled.syncer.lease import Lease
from decoupled.syncer.recording import recording
from decoupled.syncer.rounds import Plan, Rounds
from decoupled.syncer.service import Service, serve
from decoupled.syncer.snapshots import Snapshots, go_on
from decoupled.wire import credentials, tls
from decoupled.wire.address import (
  Address,
  parse,
  publish_address,
  reachable,
)

_LOG = logging.getLogger("decoupled.syncer")
# Of the grace time; half as much goes into telling learners, the rest saves.
_DRAIN_SHARE = 0.4
# Of the time in which a learner's claim must be answered: a host's claim waits
# for the others, and is told who is missing before it gives up by itself.
_HOSTS_SHARE = 0.75


def run(config: Config, options: SyncerOptions) -> int:
  """Serves a run to its end; returns the exit status.

  Raises:
    DecoupledError: with the line that the user reads.
  """
  faults.arm("syncer")
  shown = _tls(options)
  end = Termination("syncer", config.limits.grace_s)
  try:
    lease = lease_lib.claim(options.workdir / "lease", config.limits.lease_s)
    end.goodbye = lambda why: lease.release()
    try:
      return _run(config, options, lease, shown, end)
    finally:
      lease.release()
  finally:
    end.close()


def _run(
  config: Config,
  options: SyncerOptions,
  lease: Lease,
  shown: grpc.ServerCredentials | None,
  end: Termination,
) -> int:
  clock = MonotonicClock()
  started_at = options.started_at
  if started_at is None:
    started_at = clock.now()
  store = options.store or str(options.workdir / "checkpoints")
  log = EventLog(options.workdir / "events.jsonl", started_at, clock)
  end.events = log
  metrics = Metrics(options.workdir / "metrics" / "syncer")
  restored = _newest(store, options)
  snapshot = restored.value if restored else None
  complete = snapshot is not None and 0 < options.rounds <= snapshot.rounds
  if snapshot is not None:
    if complete and (lease.before is None or lease.before.released):
      print(f"complete: {snapshot.rounds} rounds are in {store}")
      return 0
    lease.rise_above(snapshot.term)
  sinks = Tee(log, RoundMetrics(metrics))
  tape = None
  if options.tape:
    tape = recording(options.workdir / "tape", config.checkpoint.tape_mib)
    sinks.add(tape)
  rounds = Rounds(
    Plan(
      run_id=_run_id(snapshot, lease, options),
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
    term=lease.term,
    events=sinks,
    started_at=started_at,
    tape=tape,
  )
  lease.serve(rounds.run_id)
  if restored is not None:
    go_on(rounds, restored.value, config.outer)
    if complete:  # it died in the drain: learners wait for the end of the run
      for learner in restored.value.learners:
        rounds.expect(clock.now(), learner, config.limits.restart_s)
    log.emit(
      "checkpoint",
      what="restore",
      round=restored.value.rounds,
      path=restored.path,
      ok=True,
      error="",
      role="syncer",
      skipped=restored.skipped,
      term=rounds.term,
      cut_by=restored.value.term,
    )
    faults.reached("syncer.restored")
  if tape is not None:
    tape.watch(rounds, restored)

  def may_commit() -> None:
    if tape is not None:
      tape.flush()
    lease.check()

  snapshots = Snapshots(
    rounds, store, config.checkpoint, log, clock, may_commit=may_commit
  )
  sinks.add(snapshots)
  syncer_store.warm_up()
  traffic = asyncio.run(
    _while_leased(
      serve(
        rounds,
        parse(options.bind),
        _token(options),
        started=lambda address, service: _started(
          options, address, service, end
        ),
        clock=clock,
        events=log,
        transfer_s=config.limits.transfer_s,
        hosts_s=_HOSTS_SHARE * config.limits.connect_s,
        linger_s=config.limits.drain_s,
        limits=config.limits,
        tls=shown,
        guard=lease.guard,
      ),
      lease,
      config.limits.heartbeat_s,
    )
  )
  log.emit(
    "wire",
    bytes_up=traffic.bytes_up,
    bytes_down=traffic.bytes_down,
    codec=config.exchange.codec,
  )
  if rounds.ended:
    faults.reached("syncer.ended")
  else:
    faults.reached("syncer.handing_over")
  outcome = "nothing_to_save"
  if tape is not None:
    tape.close()
  if rounds.model is not None and rounds.has_history:
    saved = snapshots.save(end.left_s)
    outcome = "saved" if saved else "not_saved"
  if rounds.ended and outcome == "saved":
    outcome = "ended"
  end.ended(outcome)
  metrics.close()
  log.close()
  return 0 if rounds.ended else end.status


async def _while_leased(
  serving: Coroutine[Any, Any, Traffic], lease: Lease, every_s: float
) -> Traffic:
  """Serves for as long as nobody else has taken the run over.

  Raises:
    Fenced: somebody has.
  """
  service = asyncio.create_task(serving)
  keeper = asyncio.create_task(_keep(lease, every_s))
  try:
    await asyncio.wait([service, keeper], return_when="FIRST_COMPLETED")
    if not service.done():
      keeper.result()  # raises
    return await service
  finally:
    for task in (service, keeper):
      task.cancel()
    await asyncio.gather(service, keeper, return_exceptions=True)


async def _keep(lease: Lease, every_s: float) -> None:
  """Renews the lease until that is refused; a failing disk is no refusal."""
  while True:
    try:
      await asyncio.to_thread(lease.renew)
    except OSError as error:
      _LOG.error("the lease could not be renewed: %s; trying again", error)
    await asyncio.sleep(every_s)


def _run_id(
  snapshot: syncer_store.GlobalSnapshot | None,
  lease: Lease,
  options: SyncerOptions,
) -> str:
  """Of the snapshot; without one, of the syncer that had nothing saved.

  Its learners may still be there, and hold what has been trained.
  """
  if snapshot is not None:
    return snapshot.run_id
  before = lease.before
  if before is None or options.resume == "never":
    return uuid.uuid4().hex[:12]
  if before.run_id and not before.released:
    _LOG.warning(
      "%s died under term %d before it had saved anything: run %s goes on "
      "from what its learners hold, and begins anew if none of them is left",
      *(before.holder, before.term, before.run_id),
    )
  return before.run_id or uuid.uuid4().hex[:12]


def _started(
  options: SyncerOptions, address: Address, service: Service, end: Termination
) -> None:
  """Publishes the real address and lets SIGTERM hand the run over."""
  loop = asyncio.get_running_loop()

  def hand_over() -> None:
    limit_s = _DRAIN_SHARE * end.grace_s
    with contextlib.suppress(RuntimeError):  # closed: the run has ended already
      loop.call_soon_threadsafe(lambda: service.hand_over(limit_s))

  end.on_request = hand_over
  end.something_to_lose()
  publish_address(options.workdir / "syncer.address", reachable(address))
  affinity.release()
  _LOG.info("syncer listens at %s", address)


def _token(options: SyncerOptions) -> str:
  """The run token; the first syncer of a run makes it."""
  path = options.token_file or options.workdir / "run.token"
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    credentials.make_token(path)
    _LOG.warning("made the run token %s: learners need it (--token_file)", path)
  return credentials.read_token(path)


def _tls(options: SyncerOptions) -> grpc.ServerCredentials | None:
  if options.tls_cert is None or options.tls_key is None:
    return None
  return tls.server(options.tls_cert, options.tls_key)


def _newest(store: str, options: SyncerOptions) -> Restored | None:
  """The newest good snapshot, if it is to be continued."""
  if options.resume == "never":
    return None
  restored = syncer_store.restore_newest(store)
  if restored is None and options.resume == "required":
    raise ConfigError(f"--resume=required, but there is no snapshot in {store}")
  return restored
