"""A learner from the claim of its id to its goodbye: join, train, save.

The run's parameters are there before the first step, so that a start or a
restart never trains in vain. Whoever has a prepared program can do this: a
learner at once, a standby when it is told to.
"""

import dataclasses
import logging
import random
import statistics
import time
from collections.abc import Callable

import jax

from decoupled import faults
from decoupled.chaos.slow import Slowdown
from decoupled.clock import MonotonicClock
from decoupled.config import Config
from decoupled.data.claimed import FIRST_S, ClaimedBatches, Claims
from decoupled.data.shared import Shared, SharedBatches
from decoupled.launch import affinity
from decoupled.launch.options import LearnerOptions
from decoupled.launch.termination import Termination
from decoupled.learner import compile_cache, loop
from decoupled.learner import step as steps
from decoupled.learner.agreeing import StepLanes
from decoupled.learner.copies import Copies
from decoupled.learner.donor import Donor
from decoupled.learner.notice import Notice
from decoupled.learner.origin import Found, FreshSearch, Origin, Search
from decoupled.learner.pace import Pace
from decoupled.learner.phases import Phases
from decoupled.learner.program import Program
from decoupled.learner.snapshots import Place, Snapshots
from decoupled.link.agreement import Agreement, ByStep
from decoupled.link.boundary import Resumed
from decoupled.link.claims import DataClaims, NoClaims
from decoupled.link.link import Link, Patience
from decoupled.observe.events import EventLog
from decoupled.observe.metrics import Metrics, flop_utilisation
from decoupled.types import HANDED_OVER, Claim, Welcome
from decoupled.wire import client

_LOG = logging.getLogger("decoupled.learner")
_METRICS_EVERY_S = 1.0
_WRITE_S = 5.0  # what is left of the metrics


@dataclasses.dataclass(eq=False)
class Part:
  """A program with a state, a connection and a link; it has no id yet.

  Attributes:
    program: what runs.
    wire: to the syncer.
    state: to begin with; the run's is put in its place.
    claims: units of the corpus; of a learner of several hosts rank 0 has
      them all.
    link: has not joined.
    notice: when a learner of one host stops before the end.
    end: of this process.
  """

  program: Program
  wire: client.GrpcLearnerWire
  state: steps.TrainState
  claims: Claims
  link: Link
  end: Termination
  shared: Shared | None = None
  lanes: loop.Lanes = dataclasses.field(default_factory=loop.NoLanes)
  notice: Notice | None = None

  @property
  def speaks(self) -> bool:
    """Whether this host speaks for its learner in logs and in the ledger."""
    return self.program.options.process_id == 0


@dataclasses.dataclass(frozen=True)
class Beginning:
  """Where a learner of several hosts goes on from a copy of its state.

  Attributes:
    source: where that came from.
    step: inner steps that it has seen.
    tokens: likewise.
    schedule_step: of the learning rate.
    position: in the data.
    entries: units that were told and not trained on, the begun one first.
  """

  source: str
  step: int
  tokens: int
  schedule_step: int
  position: tuple[int, int]
  entries: tuple[tuple[int, int], ...]


def assemble(
  program: Program,
  wire: client.GrpcLearnerWire,
  state: steps.TrainState,
  end: Termination,
  resumed: Resumed | None = None,
  epoch: int = 0,
) -> Part:
  """Everything that is needed to take part, short of the claim.

  Args:
    program: what runs.
    wire: to the syncer.
    state: to begin with.
    end: of this process.
    resumed: what belongs to that state, where it is a copy.
    epoch: of the learner's hosts.
  """
  claims, options = program.claims(), program.options
  if program.collective is None:
    notice = Notice(end, lambda: link.relieved, wire.ask_for_swap)
    link = _link(program, wire, state, claims, end, notice.stops)
    return Part(program, wire, state, claims, link, end, notice=notice)
  shared = Shared(
    options.process_id,
    program.order.unit_windows,
    program.config.batch.sequences,
  )
  agreement = ByStep(program.config.exchange.P, program.collective, shared)
  known = claims if options.process_id == 0 else NoClaims()
  link = _link(
    program,
    wire,
    state,
    known,
    end,
    end.requested.is_set,
    agreement=lambda fragments: agreement,
    resumed=resumed,
    epoch=epoch,
  )
  lanes = StepLanes(agreement, program.collective)
  return Part(program, wire, state, claims, link, end, shared, lanes)


def claim(part: Part, learner_id: int) -> Welcome:
  """Claims an id; refused, the part may claim another one.

  Raises:
    Refused: the syncer declined, and says why.
    Unreachable: it did not answer within its limit.
  """
  return part.link.join(part.state.params, learner_id)


def take_part(
  part: Part,
  welcome: Welcome,
  phases: Phases,
  first_step: Callable[[], None] = lambda: None,
  prepared: Origin | None = None,
  beginning: Beginning | None = None,
  after_step: Callable[[loop.Trained], None] = lambda now: None,
) -> int:
  """Trains to the end of the run; returns the exit status.

  Args:
    part: is used up.
    welcome: from `claim`.
    phases: gets the marks `joined`, `parameters`, `optimizer_state`, `ready`.
    first_step: told after the boundary that follows the first inner step.
    prepared: optimizer state that was got before the claim.
    beginning: of a learner of several hosts that goes on from a copy.
    after_step: told after every boundary; must not block.

  Raises:
    DecoupledError: with the line that the user reads.
  """
  program, link, claims, end = part.program, part.link, part.claims, part.end
  config, options = program.config, program.options
  opt_specs, wire, state = program.specs.opt_state, part.wire, part.state
  end.role = options.role(welcome.learner_id)
  phases.mark("joined")
  search: Search | FreshSearch | Found
  if prepared is not None:
    search = Found(prepared)
  elif beginning is not None:
    search = Found(Origin(beginning.source))
    _go_on(part, beginning)
  elif part.shared is None:
    search = Search(
      wire.take_state, welcome, store_of(options), opt_specs, link.wake
    )
  else:
    search = FreshSearch(welcome)
  # The syncer answers reports, and there are none between here and the first
  # step: what it grants late, having just begun itself, is waited for here (for
  # the lease in which a new syncer only listens).
  first_unit_by = time.monotonic() + FIRST_S

  def enough() -> bool:
    phases.mark_once("parameters")
    if not search.done():
      return False
    phases.mark_once("optimizer_state")
    given = claims.ready or not part.speaks
    return given or time.monotonic() > first_unit_by

  # from here the loop has the only state: a swap lets go of what it holds
  part.state = state = state._replace(params=link.begin(state.params, enough))
  origin = search.result()
  if origin.opt_state is not None:
    state = state._replace(opt_state=origin.opt_state)
  phases.mark("ready")
  place = Place(store_of(options), welcome.learner_id, welcome.run_id)
  copies = Copies(program.copy)
  saved = Snapshots(
    place,
    config.checkpoint,
    config.exchange.H / config.exchange.P,
    copies,
    log_of(options),
    MonotonicClock(),
  )
  donor = Donor(link, welcome.learner_id, wire.give_state, copies, opt_specs)
  batches = _batches(part, welcome.learner_id)
  done = loop.Trained(
    state=state,
    schedule_step=max(link.common_step, origin.saved.get("schedule_step", 0)),
    position=batches.position,
  )
  if beginning is not None:
    done.step, done.tokens = beginning.step, beginning.tokens
    done.position = beginning.position
    done.schedule_step = max(done.schedule_step, beginning.schedule_step)
  if part.speaks:
    _say_ready(options, link, origin, phases, program.compiles)
  affinity.release()
  stopping = _stopping(part)
  end.something_to_lose()
  try:
    _train(part, done, saved, donor, batches, first_step, stopping, after_step)
    donor.close()
    _finish(part, done, saved)
  finally:
    batches.close()
    donor.close()
    saved.close()
  if link.done or (link.relieved and not end.requested.is_set()):
    return 0
  return end.status


def _stopping(part: Part) -> Callable[[], bool]:
  """When to leave: a host of several goes where all have agreed to."""
  link = part.link
  return (lambda: link.leaves) if part.notice is None else part.notice.stops


def _go_on(part: Part, beginning: Beginning) -> None:
  """The units that were begun, and those told after them, come first."""
  assert part.shared is not None
  unit = part.program.order.unit_windows
  part.shared.resume(beginning.entries)
  part.claims.resume(
    Claim(place, offset)
    for place, offset in beginning.entries
    if place >= 0 and offset < unit
  )


def _batches(part: Part, learner_id: int) -> ClaimedBatches:
  """What to train on, of the units that the learner claims."""
  program, options = part.program, part.program.options
  if part.shared is None:
    return ClaimedBatches(
      program.text.train,
      program.order,
      part.claims,
      program.config.batch.sequences,
      learner=learner_id,
    )
  return SharedBatches(
    program.text.train,
    program.order,
    part.claims,
    part.shared,
    program.config.batch.sequences,
    learner=learner_id,
    host=options.process_id,
    hosts=options.num_processes,
  )


def _say_ready(
  options: LearnerOptions,
  link: Link,
  origin: Origin,
  phases: Phases,
  compiles: compile_cache.CompileCounter,
) -> None:
  log = log_of(options)
  age = None
  if origin.schedule_step is not None:
    age = max(0, link.common_step - origin.schedule_step)
  if origin.donor is not None:
    _LOG.info(
      "optimizer state comes from learner %d, %d steps ago", origin.donor, age
    )
  log.emit(
    "ready",
    learner=link.welcome.learner_id,
    incarnation=link.welcome.incarnation,
    state_source=origin.source,
    donor=origin.donor,
    age_steps=age,
    phases=phases.since(options.started_at or 0.0),
    compiles=compiles.counts(),
  )
  log.close()


def log_of(options: LearnerOptions) -> EventLog:
  """The run's event log; its times count from the job's start."""
  return EventLog(
    options.workdir / "events.jsonl",
    options.started_at or 0.0,
    MonotonicClock(),
  )


def store_of(options: LearnerOptions) -> str:
  """Folder or URL of the run's checkpoints."""
  return options.store or str(options.workdir / "checkpoints")


def _link(
  program: Program,
  wire: client.GrpcLearnerWire,
  state: steps.TrainState,
  claims: DataClaims,
  end: Termination,
  stops: Callable[[], bool],
  agreement: Callable[[int], Agreement] | None = None,
  resumed: Resumed | None = None,
  epoch: int = 0,
) -> Link:
  limits = program.config.limits

  def leaving(ending: bool) -> bool:
    """A drain is worth some of the grace time, any other wait is not."""
    return end.half_over() if ending else stops()

  return Link(
    wire,
    state.params,
    program.hello(-1, epoch),
    patience=Patience(
      join_s=limits.start_s + limits.connect_s, end_s=4 * limits.drain_s
    ),
    leaving=leaving,
    claims=claims,
    agreement=agreement,
    kernels=program.kernels,
    resumed=resumed,
  )


def _train(
  part: Part,
  done: loop.Trained,
  saved: Snapshots,
  donor: Donor,
  batches: ClaimedBatches,
  first_step: Callable[[], None],
  stopping: Callable[[], bool],
  beside: Callable[[loop.Trained], None],
) -> None:
  program, link = part.program, part.link
  config, mesh = program.config, program.mesh
  learner_id = link.welcome.learner_id
  per_step = config.batch.sequences * config.corpus.context
  metrics: Metrics | None = None
  if part.speaks:
    metrics = Metrics(
      program.options.workdir / "metrics" / f"learner_{learner_id}"
    )
  flops = program.task.flops_per_token(config.corpus.context) * per_step
  device = mesh.devices.flat[0].device_kind
  clock = MonotonicClock()
  said, begins_at = 0.0, done.step

  def after_step(now: loop.Trained) -> None:
    nonlocal said
    if part.shared is None:
      saved.after_step(now)
      donor.after_step(now)
    if now.step == begins_at + 1:
      first_step()
    beside(now)
    time_s = clock.now()
    if metrics is None or time_s - said < _METRICS_EVERY_S:
      return
    said, step_s = time_s, now.step_s[-1]
    metrics.step(
      now.schedule_step,
      loss=now.loss,
      tokens_per_second=per_step / step_s,
      learning_rate=now.learning_rate,
      model_flop_utilisation=flop_utilisation(flops, step_s, device, mesh.size),
    )

  pace, slow = Pace(clock), Slowdown.from_environment()
  ended = False
  try:
    loop.train(
      link,
      done,
      program.train_step,
      batches,
      mesh,
      pace,
      tokens_per_step=per_step,
      learner_id=learner_id,
      pad=_pad(config, learner_id, mesh),
      slow=slow,
      lanes=part.lanes,
      stopping=stopping,
      after_step=after_step,
    )
    ended = True
    if link.relieved and not link.done:
      link.leave(HANDED_OVER)  # at once: the standby waits for that
  finally:
    slow.close()
    pace.close()
    if metrics is not None:  # a swap does not wait for its disk
      metrics.close(_WRITE_S if ended else 0.0)


def _pad(
  config: Config, learner_id: int, mesh: jax.sharding.Mesh
) -> Callable[[], float]:
  """The sleep of each step: fixed, or spread evenly about its mean.

  It stands for accelerator time: where there is an accelerator, there is none.
  """
  if mesh.devices.flat[0].platform != "cpu":
    return lambda: 0.0
  mean, share = config.local.pad_s, config.local.jitter
  draw = random.Random(learner_id)
  return lambda: mean * (1 + share * draw.uniform(-1, 1)) if share else mean


def _finish(part: Part, done: loop.Trained, saved: Snapshots) -> None:
  """Saves the inner optimizer state, if it has trained; says goodbye, leaves.

  Whatever takes too long here, `end` leaves in its place.
  """
  link, end, options = part.link, part.end, part.program.options
  log = log_of(options)
  faults.reached("learner.finished")
  outcome = "nothing_to_save"
  relieved = link.relieved and not link.done
  if relieved:
    outcome = "handed_over"  # whoever took its place saves from now on
  elif done.step and part.shared is None:
    outcome = "saved" if saved.save(done, end.left_s) else "not_saved"
  reason = "ended" if link.done else "left"
  step_s = sorted(done.step_s) or [0.0]
  log.emit(
    "learner_done" if part.speaks else "host_done",
    host=options.process_id,
    learner=link.welcome.learner_id,
    incarnation=link.welcome.incarnation,
    steps=done.step - link.earlier[0],
    tokens=done.tokens - link.earlier[1],
    median_step_s=statistics.median(step_s),
    p99_step_s=step_s[int(0.99 * (len(step_s) - 1))],
    compiles=part.program.compiles.counts(),
    loss=done.loss,
    versions=[list(version) for version in link.versions],
    params_digest=link.digest(done.state.params),
    exit_reason=reason,
  )
  link.close(HANDED_OVER if relieved else reason if link.done else end.why)
  end.ended(outcome)
  log.close()
