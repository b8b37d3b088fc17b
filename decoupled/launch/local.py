"""`decoupled run`: a whole job on this machine, as real processes.

One syncer and the learners, each a process of its own; the runner starts
them, injects the faults of `--chaos`, starts the killed again, shows progress
and, once everybody has gone, has the result evaluated and reported.
"""

import contextlib
import dataclasses
import datetime
import logging
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from decoupled.chaos import injectors, slow
from decoupled.chaos import plan as chaos_plan
from decoupled.chaos.plan import Event as ChaosEvent
from decoupled.chaos.proxy import Proxy
from decoupled.chaos.schedule import Schedule
from decoupled.config import (
  Config,
  contract_lines,
  gin_text,
  replaced,
  validate,
)
from decoupled.errors import ConfigError, DecoupledError
from decoupled.launch import control, termination
from decoupled.launch import devices as devices_lib
from decoupled.launch.devices import Devices
from decoupled.launch.options import JobOptions, RunOptions
from decoupled.launch.supervisor import Role, RoleFailed, Supervisor
from decoupled.launch.workdir import Standing, Workdir
from decoupled.observe.events import Event, EventLog, EventReader
from decoupled.observe.progress import Progress
from decoupled.wire import credentials
from decoupled.wire.address import Address, published_address
from decoupled.wire.client import AdminClient

_LOG = logging.getLogger("decoupled.run")
_TICK_S = 0.2
_CHAOS_TICK_S = 0.02
_EVALUATE_S = 600.0
_MARGIN_S = 2.0  # beyond the grace time of a process that is told to end
_LET_GO_S = 2.0
_HEAR_S = 5.0  # for a standby to hear of the end
HOSTS_TAU = 4  # Exchange.tau where learners have several hosts
# A killed learner is not started again before it is known whether a standby
# takes its part; the syncer says so as soon as it knows of the death.
_HELD_S = 2.0
# Beyond the drain itself: saving, and the syncer's own goodbyes.
_SAVE_S = 60.0
_ASK_S = 5.0  # for the syncer's answer, when the job is told to end


def run(config: Config, options: RunOptions) -> int:
  """Runs a job to its end; everything it writes is below the workdir.

  Returns:
    0 where the job did its rounds, or had done them before.

  Raises:
    DecoupledError: the job cannot be started, or failed; nothing is left
      running.
  """
  plan = chaos_plan.parse(options.chaos)
  config = _of_hosts(config, options.hosts_per_learner)
  _check(config, options, plan)
  hosts = options.hosts_per_learner
  # each host is given its share as if it were a learner
  devices = devices_lib.plan(
    options.learners * hosts + options.standbys,
    options.devices_per_host or devices_lib.suiting(config.mesh, hosts),
  )
  validate(
    config, learners=options.learners, devices=hosts * devices.per_learner
  )
  workdir = Workdir(options.workdir)
  workdir.create()
  workdir.lock()
  try:
    contract = (*contract_lines(config), ("--seed", str(options.seed)))
    standing = workdir.standing(
      contract, options.resume, options.rounds, options.tokens
    )
    if standing.complete:
      print(_complete_line(workdir, standing, options))
      return 0
    workdir.begin(gin_text(config), contract)
    return _Job(config, options, plan, devices, workdir, standing).run()
  finally:
    workdir.unlock()


def _of_hosts(config: Config, hosts: int) -> Config:
  """The contract of a run whose learners have several hosts.

  These agree one step late (design 4.9), so that the overlap budget is wider
  unless it was chosen. This is the one place that knows: the contract goes on
  from here to the syncer and to every learner. Who starts roles one by one
  says Exchange.tau to the syncer.
  """
  if hosts == 1 or config.origins["Exchange.tau"] != "default":
    return config
  return replaced(config, {"Exchange.tau": HOSTS_TAU}, "--hosts_per_learner")


def _check(
  config: Config, options: RunOptions, plan: tuple[ChaosEvent, ...]
) -> None:
  """Raises ConfigError for what this version or this machine cannot do."""
  if options.learners < 1:
    raise ConfigError(f"--learners={options.learners} must be at least 1")
  hosts = options.hosts_per_learner
  if hosts < 1:
    raise ConfigError(f"--hosts_per_learner={hosts} must be at least 1")
  if hosts > 1 and not config.exchange.tau:
    raise ConfigError(
      f"Exchange.tau = 0 with --hosts_per_learner={hosts}: the lock-step mode "
      f"is for learners of one host; choose Exchange.tau = {HOSTS_TAU}"
    )
  if config.batch.sequences % hosts:
    raise ConfigError(
      f"Batch.sequences = {config.batch.sequences} cannot be divided among "
      f"--hosts_per_learner={hosts}"
    )
  if options.http_port:
    raise ConfigError(
      f"--http_port={options.http_port}: this version has no status page yet; "
      "see `decoupled status`"
    )
  validate(config, learners=options.learners)
  injectors.check(plan, options.learners, options.standbys, hosts)


class _Job:
  """One job from its first process to its report."""

  def __init__(
    self,
    config: Config,
    options: RunOptions,
    plan: tuple[ChaosEvent, ...],
    devices: Devices,
    workdir: Workdir,
    standing: Standing,
  ):
    self._config = config
    self._options = options
    self._plan = plan
    self._devices = devices
    self._workdir = workdir
    self._standing = standing
    self._started_at = time.monotonic()
    self._rounds_closed = standing.rounds
    self._draining = False
    self._was_draining = False
    self._ended = False  # the run: its learners have been told, or are being
    self._let_go_at_s = 0.0
    self._why = ""
    self._signal: signal.Signals | None = None
    self._told: signal.Signals | None = None  # a syncer that stays away
    self._proxies: dict[int, Proxy] = {}
    self._standbys_proxy: Proxy | None = None
    self._control: dict[int, Path] = {}
    self._standbys_started = False
    self._without_learner_s: float | None = None
    self._reader = EventReader(workdir.events)
    self._reader.new()  # what earlier jobs wrote
    self._events = EventLog(workdir.events, self._started_at)
    self._supervisor = Supervisor(self._events)
    self._progress = Progress(workdir.path, options.rounds)

  def run(self) -> int:
    status, reason = "failed", ""
    with _signals(self._note_signal), self._everything_ended():
      try:
        self._start()
        reason = self._supervise()
        stopped = self._signal or self._told
        status = "interrupted" if stopped else "completed"
        if reason and not stopped:
          status = "failed"
      except RoleFailed as error:
        reason = str(error)
        self._wind_down("the job failed")
      if status != "failed":
        reason = self._evaluate(status) or reason
        status = "failed" if reason and status == "completed" else status
    return self._report(status, reason)

  # ---- starting --------------------------------------------------------------

  def _start(self) -> None:
    self._events.emit(
      "start",
      run_id=uuid.uuid4().hex[:12],
      seed=self._options.seed,
      wall_time=datetime.datetime.now(datetime.UTC).isoformat(),
      learners=self._options.learners,
      config=dict(contract_lines(self._config)),
      rounds=self._options.rounds,
      tokens=self._options.tokens,
      hosts_per_learner=self._options.hosts_per_learner,
      devices_per_host=self._devices.per_learner,
      resumed=self._standing.resumed,
    )
    for learner in injectors.partitioned(self._plan, self._options.learners):
      self._proxies[learner] = Proxy(self._syncer)
    if self._proxies and self._options.standbys:
      self._standbys_proxy = Proxy(self._syncer)
    self._control.update(
      (learner, self._learner_control(learner))
      for learner in range(self._options.learners)
    )
    self._own_proxies = dict(self._proxies)
    self._schedule = Schedule(
      self._plan,
      self._options.learners,
      self._options.seed,
      self._standing.rounds,
    )
    self._injectors = injectors.Injectors(
      self._supervisor,
      self._control,
      self._proxies,
      self._events,
      self._options.hosts_per_learner,
    )
    self._supervisor.start(self._syncer_role())
    if self._options.hosts_per_learner > 1:
      self._supervisor.start(self._coordinator_role())
    for learner in range(self._options.learners):
      for role in self._learner_roles(learner):
        self._supervisor.start(role)

  def _syncer(self) -> tuple[str, int] | None:
    address = published_address(self._workdir.address)
    return (address.host, address.port) if address else None

  def _syncer_role(self) -> Role:
    arguments = (
      f"--learners={self._options.learners}",
      f"--rounds={self._options.rounds}",
      f"--tokens={self._options.tokens}",
      f"--resume={self._options.resume}",
      *(["--tape"] if self._options.tape else []),
    )
    env = devices_lib.environment(None)
    role = self._role("syncer", "syncer", arguments, env)
    # whatever was asked of the job: a restart goes on with what there is
    again = ("--resume=auto",)
    return dataclasses.replace(role, done_at_zero=True, again=again)

  def _coordinator_role(self) -> Role:
    """Where the hosts of a learner meet, whoever of them dies."""
    argv = (
      *(sys.executable, "-m", "decoupled.cli", "coordinator"),
      f"--workdir={self._workdir.path}",
      f"--token_file={self._workdir.token}",
    )
    env = devices_lib.environment(None)
    return Role("coordinator", argv, env, self._workdir.log("coordinator"))

  def _learner_roles(self, learner: int) -> list[Role]:
    """One process for each host."""
    hosts = self._options.hosts_per_learner
    if hosts == 1:
      return [self._learner_role(learner, f"learner/{learner}", learner)]
    roles = []
    for host in range(hosts):
      role = self._learner_role(
        learner,
        f"learner/{learner}/host/{host}",
        learner * hosts + host,
        f"--process_id={host}",
        *self._hosts_arguments(),
      )
      roles.append(dataclasses.replace(role, group=f"learner/{learner}"))
    return roles

  def _hosts_arguments(self) -> tuple[str, ...]:
    hosts = self._options.hosts_per_learner
    if hosts == 1:
      return ()
    meeting = self._workdir.path / "coordinator.address"
    return (f"--num_processes={hosts}", f"--coordinator_address=@{meeting}")

  def _names_of(self, learner: int) -> list[str]:
    """The roles that are a learner."""
    hosts = self._options.hosts_per_learner
    if hosts == 1:
      return [f"learner/{learner}"]
    return [f"learner/{learner}/host/{host}" for host in range(hosts)]

  def _learner_role(
    self, learner: int, name: str, share: int, *more: str
  ) -> Role:
    """The process `name` of a learner, with that share of the devices."""
    proxy = self._proxies.get(learner)
    address = proxy.address if proxy else f"@{self._workdir.address}"
    held_s = _HELD_S if self._options.standbys else 0.0
    arguments = (
      f"--learner_id={learner}",
      f"--learners={self._options.learners}",
      f"--syncer_address={address}",
      f"--devices_per_host={self._devices.simulated}",
      *more,
    )
    env = devices_lib.environment(
      self._devices, share, self._config.local.xla_threads
    )
    env[slow.VARIABLE] = str(self._learner_control(learner))
    role = self._role(name, "learner", arguments, env)
    return dataclasses.replace(role, held_s=held_s)

  def _standby_role(self, standby: int) -> Role:
    proxy = self._standbys_proxy
    address = proxy.address if proxy else f"@{self._workdir.address}"
    name = f"standby/{standby}"
    arguments = (
      f"--name={name}",
      f"--syncer_address={address}",
      f"--devices_per_host={self._devices.simulated}",
      *self._hosts_arguments(),
    )
    env = devices_lib.environment(
      self._devices,
      self._options.learners * self._options.hosts_per_learner + standby,
      self._config.local.xla_threads,
    )
    env[slow.VARIABLE] = str(self._standby_control(standby))
    role = self._role(name, "standby", arguments, env)
    return dataclasses.replace(role, spare=True)

  def _learner_control(self, learner: int) -> Path:
    return self._workdir.chaos / f"learner-{learner}.json"

  def _standby_control(self, standby: int) -> Path:
    return self._workdir.chaos / f"standby-{standby}.json"

  def _role(
    self,
    name: str,
    command: str,
    arguments: tuple[str, ...],
    env: dict[str, str],
    restarts: bool = True,
  ) -> Role:
    argv: tuple[str, ...] = (
      *(sys.executable, "-m", "decoupled.cli", command),
      str(self._workdir.config),
      f"--workdir={self._workdir.path}",
      f"--store={self._options.store}",
      f"--seed={self._options.seed}",
      f"--started_at={self._started_at!r}",
    )
    if command != "evaluate":
      argv += (f"--token_file={self._workdir.token}",)
    log = self._workdir.log(name)
    return Role(name, (*argv, *arguments), env, log, restarts)

  # ---- while it runs ---------------------------------------------------------

  def _supervise(self) -> str:
    """Returns once the syncer has ended; "" or why the job failed."""
    while self._supervisor.finished("syncer") is None:
      self._turn()
      if self._signal:
        return self._wind_down(f"stopped by {self._signal.name}")
      if self._nobody_left():
        if not (self._draining or self._all_done()):
          self._wind_down("no learner is left")
          return "no learner is left: none runs, and no restart is owed"
        self._let_go()
    status = self._supervisor.finished("syncer")
    self._see_off(self._config.limits.drain_s + _SAVE_S)
    if status and termination.told(status):
      self._told = termination.signal_of(status)
    elif status:
      return f"the syncer ended with status {status}, and is not restarted"
    return ""

  def _turn(self) -> None:
    """Waits a moment for an exit and does whatever is due."""
    now_s = time.monotonic() - self._started_at
    due_s = min(self._schedule.next_at_s, self._injectors.next_at_s) - now_s
    tick_s = _CHAOS_TICK_S if self._schedule.waits_for_round else _TICK_S
    try:
      self._supervisor.step(max(0.0, min(tick_s, due_s)))
    except RoleFailed:
      # A process that was late for the end was turned away: no failure.
      self._read_events()
      if not self._draining or self._supervisor.finished("syncer"):
        raise
    self._read_events()
    self._settle_restarts()
    now_s = time.monotonic() - self._started_at
    for fault in self._schedule.due(now_s, self._rounds_closed):
      self._injectors.inject(fault, now_s)
    self._injectors.heal_due(now_s)
    self._tell_owed()
    self._progress.update()

  def _settle_restarts(self) -> None:
    """Nobody is started again for the drain alone, but the syncer.

    One that dies in the drain comes back with its last snapshot, from which
    training goes on.
    """
    if self._draining:
      self._supervisor.no_more_restarts(but=frozenset({"syncer"}))
    elif self._was_draining:
      self._supervisor.restarts_again()
    self._was_draining = self._draining

  def _read_events(self) -> None:
    for event in self._reader.new():
      if event["kind"] in ("ready", "first_step"):
        for role in self._names_of(int(event["learner"])):
          self._supervisor.ready(role)
      elif event["kind"] in ("standby", "decided", "promoted", "restart"):
        self._standby_event(event)
      elif event["kind"] == "round":
        self._rounds_closed = max(self._rounds_closed, int(event["round"]))
      elif event["kind"] == "phase":
        self._draining = event["phase"] in ("draining", "ended")
        self._ended = event["phase"] == "ended"
        self._why = str(event["why"])
        self._supervisor.ready("syncer")
        if self._supervisor.knows("coordinator"):
          self._supervisor.ready("coordinator")
        self._start_standbys(str(event["phase"]))
        self._told_owed = frozenset()  # it may be a new one, which knows none

  def _start_standbys(self, phase: str) -> None:
    """Once there is training; they find its programs in the compile cache."""
    if phase != "training" or self._standbys_started:
      return
    self._standbys_started = True
    for standby in range(self._options.standbys):
      self._supervisor.start(self._standby_role(standby))

  def _standby_event(self, event: Event) -> None:
    """Keeps roles and processes together when a standby takes a role."""
    kind = event["kind"]
    if kind == "standby":
      name = str(event["standby"])
      if event["state"] == "ready" and self._supervisor.knows(name):
        self._supervisor.ready(name)
    elif kind == "decided":
      if event["standby"] is None:
        self._supervisor.release(_role_of(event))
    elif kind == "promoted":
      self._promoted(_role_of(event), str(event["standby"]))
    elif str(event["role"]).startswith("learner/"):
      learner = int(str(event["role"]).split("/")[1])
      self._control[learner] = self._learner_control(learner)
      if learner in self._own_proxies:
        self._proxies[learner] = self._own_proxies[learner]

  def _promoted(self, role: str, name: str) -> None:
    """A standby's process has that role now, and faults reach it as that."""
    learner = int(role.split("/")[1])
    number = name.removeprefix("standby/")
    if not (self._supervisor.knows(name) and number.isdecimal()):
      return  # somebody else has started it
    self._supervisor.swap(role, name)
    if self._options.hosts_per_learner > 1:
      return
    self._control[learner] = self._standby_control(int(number))
    if learner in self._proxies and self._standbys_proxy is not None:
      self._proxies[learner] = self._standbys_proxy

  def _tell_owed(self) -> None:
    """Asks the syncer not to end before a learner's restart is back."""
    owed = frozenset(self._supervisor.owed())
    roles = [role.split("/") for role in owed - self._told_owed]
    for learner in {int(role[1]) for role in roles if role[0] == "learner"}:
      threading.Thread(
        target=self._expect, args=(learner,), daemon=True
      ).start()
    self._told_owed = owed

  def _expect(self, learner: int) -> None:
    """On a thread of its own: a syncer that hangs must not stop the runner."""
    limit_s = self._config.limits.restart_s
    error = self._ask(lambda syncer: syncer.expect(learner, limit_s))
    if error:
      _LOG.warning("the run may end without learner %d: %s", learner, error)

  def _let_go(self) -> None:
    """Tells a syncer that came back in the drain that nobody else will."""
    now_s = time.monotonic()
    if now_s - self._let_go_at_s < _LET_GO_S:
      return
    self._let_go_at_s = now_s
    threading.Thread(
      target=self._ask,
      args=(lambda syncer: syncer.drain("every learner has left"),),
      daemon=True,
    ).start()

  def _ask(self, call: Callable[[AdminClient], object]) -> str:
    """Calls the syncer; "" or why that failed. Not for the runner's thread."""
    address = self._syncer()
    if address is None:
      return "no syncer has published its address"
    token = credentials.read_token(self._workdir.token)
    try:
      with AdminClient(Address(*address), token) as syncer:
        call(syncer)
    except DecoupledError as error:
      return str(error)
    return ""

  _told_owed: frozenset[str] = frozenset()
  _own_proxies: Mapping[int, Proxy] = {}

  def _nobody_left(self) -> bool:
    owed = self._supervisor.owed()
    if self._draining:  # but for the syncer nobody is started again
      owed.pop("syncer", None)
    running = self._supervisor.running()
    if any(role.startswith("learner/") for role in running) or owed:
      self._without_learner_s = None
      return False
    if self._draining or not any(
      role.startswith("standby/") for role in running
    ):
      return True
    # A standby may be about to take over.
    now_s = time.monotonic()
    if self._without_learner_s is None:
      self._without_learner_s = now_s
    return now_s - self._without_learner_s > self._config.limits.restart_s

  def _all_done(self) -> bool:
    """Whether every learner left since the run had ended for it."""
    return all(
      self._supervisor.finished(role) == 0
      for i in range(self._options.learners)
      for role in self._names_of(i)
    )

  # ---- ending ----------------------------------------------------------------

  def _wind_down(self, why: str) -> str:
    """Ends early: the syncer drains and saves, then everybody leaves.

    A SIGTERM alone would make the syncer leave the run to another one. It is
    first asked for a drain, which the signal then gives its limit.
    """
    self._injectors.heal_all()
    booting = self._supervisor.booting()
    self._supervisor.no_more_restarts()
    for role in booting:  # it has nothing to save, and delays nobody
      self._supervisor.send(role, signal.SIGTERM)
    if "syncer" not in booting:
      asked = threading.Thread(
        target=self._ask, args=(lambda syncer: syncer.drain(why),), daemon=True
      )
      asked.start()
      self._await(lambda: not asked.is_alive(), _ASK_S)
      self._supervisor.send("syncer", signal.SIGTERM)
    grace_s = self._config.limits.grace_s
    self._await(
      lambda: self._supervisor.pid("syncer") is None, grace_s + _MARGIN_S
    )
    self._see_off(grace_s)
    return ""

  def _see_off(self, limit_s: float) -> None:
    """Waits for the learners to leave by themselves, then makes them.

    Args:
      limit_s: for those whose run has ended. The others would train on without
        a syncer, and are told to leave at once.
    """
    self._supervisor.no_more_restarts()
    self._read_events()
    if self._ended:
      self._await(lambda: not self._left_over("learner/", "syncer"), limit_s)
      # one that still boots has not heard of it
      self._await(lambda: not self._left_over("standby/"), _HEAR_S)
    grace_s = self._config.limits.grace_s
    self._supervisor.stop(grace_s + _MARGIN_S, signal.SIGTERM)

  def _left_over(self, *roles: str) -> bool:
    """Whether a process of such a role still runs."""
    return any(role.startswith(roles) for role in self._supervisor.running())

  def _await(self, done: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not done() and time.monotonic() < deadline:
      self._supervisor.step(_TICK_S)
      self._injectors.heal_due(time.monotonic() - self._started_at)
      self._progress.update()

  def _evaluate(self, status: str) -> str:
    """Has the result evaluated by a process of its own; "" or what failed."""
    simulated = self._options.hosts_per_learner * self._devices.simulated
    arguments = (f"--devices_per_host={simulated}",)
    env = devices_lib.environment(self._devices, 0, 0)
    role = self._role("evaluate", "evaluate", arguments, env, restarts=False)
    supervisor = Supervisor(self._events)
    supervisor.start(role)
    try:
      deadline = time.monotonic() + _EVALUATE_S
      while supervisor.running() and time.monotonic() < deadline:
        supervisor.step(_TICK_S)
        self._progress.update()
    except RoleFailed as error:
      # A job stopped before anything was saved has nothing to evaluate.
      return str(error) if status == "completed" else ""
    finally:
      late = bool(supervisor.running())
      supervisor.stop(0.0, signal.SIGKILL)
    if late:
      return f"evaluate took more than {_EVALUATE_S:g} s; see {role.log}"
    return ""

  def _report(self, status: str, reason: str) -> int:
    if status == "interrupted":
      reason = (
        f"stopped by {self._signal.name}"
        if self._signal
        else f"the syncer was stopped by {(self._told or signal.SIGTERM).name}"
      )
    elif status == "completed":
      reason = reason or self._why
    self._events.emit("end", status=status, reason=reason)
    self._events.close()
    self._progress.close()
    control.write_report(JobOptions(self._workdir.path))
    if status == "failed":
      raise DecoupledError(f"the job failed: {reason}")
    if status == "interrupted":
      print(f"{reason}; the same command goes on from here")
      return 128 + (self._signal or self._told or signal.SIGTERM)
    return 0

  # ---- signals and leftovers -------------------------------------------------

  def _note_signal(self, number: signal.Signals) -> None:
    if self._signal:  # the second one means: at once
      raise KeyboardInterrupt
    self._signal = number

  @contextlib.contextmanager
  def _everything_ended(self) -> Iterator[None]:
    """Whatever happens, no process and no proxy outlives the job."""
    try:
      yield
    finally:
      self._supervisor.stop(0.0, signal.SIGKILL)
      proxies = {*self._proxies.values(), *self._own_proxies.values()}
      for proxy in proxies:
        proxy.close()
      if self._standbys_proxy is not None:
        self._standbys_proxy.close()


def _role_of(event: Event) -> str:
  """The process that an event of a learner, or of its host, is about."""
  host = event.get("host")
  return f"learner/{event['learner']}" + (
    "" if host is None else f"/host/{host}"
  )


@contextlib.contextmanager
def _signals(note: Callable[[signal.Signals], None]) -> Iterator[None]:
  """Turns SIGINT and SIGTERM into calls of `note`."""

  def handle(number: int, frame: FrameType | None) -> None:
    note(signal.Signals(number))

  numbers = (signal.SIGINT, signal.SIGTERM)
  before = {number: signal.signal(number, handle) for number in numbers}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _complete_line(
  workdir: Workdir, standing: Standing, options: RunOptions
) -> str:
  end = (
    f"--rounds={options.rounds}"
    if options.rounds
    else f"--tokens={options.tokens}"
  )
  return (
    f"{workdir.path} is complete: {standing.rounds} rounds, asked for {end}; "
    f"the report is {workdir.report}. Ask for more to go on."
  )
