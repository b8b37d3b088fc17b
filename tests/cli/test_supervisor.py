"""The supervisor on real processes: deaths, restarts, failures, orphans."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from decoupled.launch import affinity
from decoupled.launch.supervisor import (
  Role,
  RoleFailed,
  Supervisor,
  last_error,
)
from decoupled.observe import events

LIMIT_S = 30.0
FOREVER = "import time; print('up', flush=True); time.sleep(600)"


def until(supervisor, condition, what):
  deadline = time.monotonic() + LIMIT_S
  while not condition():
    assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
    supervisor.step(0.02)


def gone(pid):
  """Whether a process has ended (a zombie nobody has reaped counts)."""
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0] == "Z"
  except OSError:
    return True


@pytest.fixture
def log(tmp_path):
  return events.EventLog(tmp_path / "events.jsonl", time.monotonic())


@pytest.fixture
def supervisor(log):
  supervisor = Supervisor(log, backoff_s=0.05)
  yield supervisor
  supervisor.stop(0.0, signal.SIGKILL)
  assert not supervisor.running()


@pytest.fixture
def role(tmp_path):
  def make(name, code, restarts=True):
    return Role(
      name,
      (sys.executable, "-c", textwrap.dedent(code)),
      dict(os.environ),
      tmp_path / "logs" / f"{name.replace('/', '-')}.log",
      restarts,
    )

  return make


def kinds(log, kind):
  found = [e for e in events.read(log.path) if e["kind"] == kind]
  assert all(not events.problems(event) for event in found)
  return found


def up(role):
  return role.log.exists() and "up" in role.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_ended_by_a_signal_is_started_again(
  supervisor, role, log, number
):
  learner = role("learner/1", FOREVER)
  supervisor.start(learner)
  first = supervisor.pid("learner/1")
  supervisor.ready("learner/1")
  supervisor.send("learner/1", number)
  until(
    supervisor,
    lambda: supervisor.pid("learner/1") not in (None, first),
    "restarted",
  )
  assert "learner/1" in supervisor.owed()
  supervisor.ready("learner/1")
  assert not supervisor.owed()
  (ended,) = kinds(log, "exit")
  assert (ended["role"], ended["signal"]) == ("learner/1", number.name)
  (again,) = kinds(log, "restart")
  assert (again["role"], again["attempt"]) == ("learner/1", 2)


def test_norestart_means_gone(supervisor, role, log):
  supervisor.start(role("learner/1", FOREVER))
  supervisor.expect_fault("learner/1", restart=False)
  supervisor.send("learner/1", signal.SIGKILL)
  until(
    supervisor, lambda: supervisor.finished("learner/1") is not None, "gone"
  )
  assert supervisor.finished("learner/1") == -signal.SIGKILL
  supervisor.step(0.2)
  assert not supervisor.running()
  assert not supervisor.owed()
  assert not kinds(log, "restart")


def test_a_terminated_process_that_leaves_politely_comes_back(supervisor, role):
  learner = role(
    "learner/1",
    """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("up", flush=True)
    time.sleep(600)
    """,
  )
  supervisor.start(learner)
  first = supervisor.pid("learner/1")
  until(supervisor, lambda: up(learner), "up")
  supervisor.expect_fault("learner/1", restart=True)
  supervisor.send("learner/1", signal.SIGTERM)
  until(
    supervisor,
    lambda: supervisor.pid("learner/1") not in (None, first),
    "restarted",
  )


def test_a_role_that_is_done_is_not_started_again(supervisor, role, log):
  supervisor.start(role("learner/0", "pass"))
  until(
    supervisor, lambda: supervisor.finished("learner/0") is not None, "done"
  )
  assert supervisor.finished("learner/0") == 0
  assert not kinds(log, "restart")


def test_failing_before_being_ready_names_role_cause_and_log(
  supervisor, role, log
):
  learner = role(
    "learner/2",
    """
    print("some noise")
    raise ValueError("the corpus is empty")
    """,
  )
  supervisor.start(learner)
  with pytest.raises(RoleFailed) as caught:
    until(supervisor, lambda: False, "failure")
  assert str(caught.value) == (
    "learner/2 exited with status 1: ValueError: the corpus is empty; see "
    f"{learner.log}"
  )
  assert not kinds(log, "restart")


def test_a_restart_may_have_arguments_of_its_own(supervisor, role):
  code = "import sys, time; print(*sys.argv, flush=True); time.sleep(600)"
  learner = role("learner/0", code)
  learner = dataclasses.replace(
    learner, argv=(*learner.argv, "--up=1"), again=("--up=2",)
  )
  supervisor.start(learner)
  until(supervisor, lambda: up(learner), "up")
  supervisor.expect_fault("learner/0", restart=True)
  supervisor.send("learner/0", signal.SIGKILL)
  until(supervisor, lambda: "--up=2" in learner.log.read_text(), "again")
  assert learner.log.read_text().splitlines() == [
    "-c --up=1",
    "-c --up=1 --up=2",
  ]


def test_status_0_may_mean_that_the_job_is_done(supervisor, role):
  code = (
    "import signal, sys, time; "
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
    "print('up', flush=True); time.sleep(600)"
  )
  syncer = dataclasses.replace(role("syncer", code), done_at_zero=True)
  supervisor.start(syncer)
  until(supervisor, lambda: up(syncer), "up")
  supervisor.expect_fault("syncer", restart=True)
  supervisor.send("syncer", signal.SIGTERM)
  until(supervisor, lambda: supervisor.finished("syncer") == 0, "done")


def test_who_was_told_to_end_and_has_not_done_the_job_comes_back(
  supervisor, role
):
  code = (
    "import signal, sys, time; "
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
    "print('up', flush=True); time.sleep(600)"
  )
  syncer = dataclasses.replace(role("syncer", code), done_at_zero=True)
  supervisor.start(syncer)
  first = supervisor.pid("syncer")
  assert supervisor.booting() == ("syncer",)
  supervisor.ready("syncer")
  assert supervisor.booting() == ()
  until(supervisor, lambda: up(syncer), "up")
  supervisor.send("syncer", signal.SIGTERM)
  until(
    supervisor,
    lambda: supervisor.pid("syncer") not in (None, first),
    "restarted",
  )
  assert supervisor.booting() == ("syncer",)


def test_at_the_end_only_who_is_needed_for_it_is_restarted(
  supervisor, role, log
):
  for name in ("syncer", "learner/0"):
    supervisor.start(role(name, FOREVER))
  first = {name: supervisor.pid(name) for name in supervisor.running()}
  supervisor.no_more_restarts(but=frozenset({"syncer"}))
  for name in first:
    supervisor.send(name, signal.SIGKILL)
  until(
    supervisor,
    lambda: supervisor.pid("syncer") not in (None, first["syncer"]),
    "restarted",
  )
  until(
    supervisor,
    lambda: supervisor.finished("learner/0") == -signal.SIGKILL,
    "ended for good",
  )
  planned = {e["role"]: e["planned"] for e in kinds(log, "exit")}
  assert planned == {"syncer": False, "learner/0": True}
  supervisor.restarts_again()
  supervisor.start(role("learner/1", FOREVER))
  supervisor.ready("learner/1")
  supervisor.send("learner/1", signal.SIGKILL)
  until(supervisor, lambda: "learner/1" in supervisor.owed(), "owed")


def test_a_role_that_never_restarts_fails_the_job(supervisor, role):
  syncer = role("syncer", FOREVER, restarts=False)
  supervisor.start(syncer)
  until(supervisor, lambda: up(syncer), "up")
  supervisor.ready("syncer")
  supervisor.send("syncer", signal.SIGKILL)
  with pytest.raises(RoleFailed, match="syncer was ended by SIGKILL"):
    until(supervisor, lambda: False, "failure")


def test_dying_again_and_again_ends_the_job(log, role):
  supervisor = Supervisor(log, backoff_s=0.01, max_failures=2)
  supervisor.start(
    role("learner/0", "import os, signal; os.kill(os.getpid(), 9)")
  )
  with pytest.raises(RoleFailed, match="learner/0 was ended by SIGKILL"):
    until(supervisor, lambda: False, "failure")
  assert len(kinds(log, "restart")) == 2


def test_being_ready_forgives_earlier_failures(log, role):
  supervisor = Supervisor(log, backoff_s=0.01, max_failures=1)
  supervisor.start(role("learner/0", FOREVER))
  for attempt in range(1, 4):
    until(
      supervisor,
      lambda: supervisor.pid("learner/0") is not None,
      "running",
    )
    supervisor.ready("learner/0")
    before = supervisor.pid("learner/0")
    supervisor.send("learner/0", signal.SIGKILL)
    until(
      supervisor,
      lambda before=before: supervisor.pid("learner/0") not in (None, before),
      f"restart {attempt}",
    )
  supervisor.stop(0.0, signal.SIGKILL)


def test_an_injected_kill_while_booting_does_not_end_the_job(log, role):
  supervisor = Supervisor(log, backoff_s=0.01, max_failures=0)
  supervisor.start(role("learner/0", FOREVER))
  first = supervisor.pid("learner/0")
  supervisor.expect_fault("learner/0", restart=True)
  supervisor.send("learner/0", signal.SIGKILL)
  until(
    supervisor,
    lambda: supervisor.pid("learner/0") not in (None, first),
    "restarted",
  )
  supervisor.stop(0.0, signal.SIGKILL)


def test_stop_escalates_and_reaches_a_stopped_process(supervisor, role):
  stubborn = role(
    "learner/0",
    """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    time.sleep(600)
    """,
  )
  frozen = role(
    "learner/1",
    """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("up", flush=True)
    time.sleep(600)
    """,
  )
  supervisor.start(stubborn)
  supervisor.start(frozen)
  until(supervisor, lambda: up(stubborn) and up(frozen), "up")
  supervisor.send("learner/1", signal.SIGSTOP)
  supervisor.stop(1.0, signal.SIGTERM)
  assert not supervisor.running()
  assert supervisor.finished("learner/0") == -signal.SIGKILL
  assert supervisor.finished("learner/1") == 7


def test_children_of_a_dead_process_go_with_it(supervisor, role, tmp_path):
  child = tmp_path / "child.pid"
  learner = role(
    "learner/0",
    f"""
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; "
      "time.sleep(600)"])
    open({str(child)!r}, "w").write(str(child.pid))
    print("up", flush=True)
    time.sleep(600)
    """,
  )
  supervisor.start(learner)
  until(supervisor, lambda: up(learner), "up")
  pid = int(child.read_text())
  supervisor.expect_fault("learner/0", restart=False)
  supervisor.send("learner/0", signal.SIGKILL)
  until(supervisor, lambda: gone(pid), "the child is gone")


def test_only_a_restarted_process_boots_on_one_core(supervisor, role):
  learner = role(
    "learner/0",
    """
    import os, threading, time
    from decoupled.launch import affinity
    full = len(os.sched_getaffinity(0))
    affinity.confine()
    boot = len(os.sched_getaffinity(0))
    inherited, released, masks = threading.Event(), threading.Event(), []
    def thread():
      masks.append(len(os.sched_getaffinity(0)))
      inherited.set()
      released.wait()
      masks.append(len(os.sched_getaffinity(0)))
    worker = threading.Thread(target=thread)
    worker.start()
    inherited.wait()
    affinity.release()
    released.set()
    worker.join()
    print("up", full, boot, *masks, len(os.sched_getaffinity(0)), flush=True)
    time.sleep(600)
    """,
  )
  cores = len(os.sched_getaffinity(0))
  boot = 1 if affinity.boot_core() is not None else cores
  supervisor.start(learner)
  until(supervisor, lambda: up(learner), "up")
  supervisor.ready("learner/0")
  supervisor.send("learner/0", signal.SIGKILL)
  until(supervisor, lambda: learner.log.read_text().count("up") == 2, "again")
  first, second = learner.log.read_text().splitlines()
  assert first == f"up {cores} {cores} {cores} {cores} {cores}"
  assert second == f"up {cores} {boot} {boot} {cores} {cores}"


@pytest.mark.parametrize("stopped", [False, True])
def test_no_process_outlives_a_killed_runner(tmp_path, stopped):
  runner = textwrap.dedent(
    f"""
      import os, pathlib, sys, time
      from decoupled.launch.supervisor import Role, Supervisor
      from decoupled.observe.events import EventLog
      base = pathlib.Path({str(tmp_path)!r})
      code = (
        "import os, time; from decoupled.launch import child; child.enter();"
        "print('up', os.getpid(), flush=True); time.sleep(600)"
      )
      supervisor = Supervisor(EventLog(base / "events.jsonl", 0.0))
      for number in range(2):
        supervisor.start(Role(
          f"learner/{{number}}", (sys.executable, "-c", code),
          dict(os.environ), base / f"{{number}}.log"))
      while True:
        supervisor.step(1.0)
      """
  )
  logs = [tmp_path / f"{number}.log" for number in range(2)]
  popen = subprocess.Popen([sys.executable, "-c", runner])
  try:
    wait_for(lambda: all(log.exists() and log.read_text() for log in logs))
    pids = [int(log.read_text().split()[1]) for log in logs]
    assert not any(gone(pid) for pid in pids)
    if stopped:
      os.kill(pids[0], signal.SIGSTOP)
  finally:
    popen.kill()
    popen.wait()
  wait_for(lambda: all(gone(pid) for pid in pids))


def wait_for(condition):
  deadline = time.monotonic() + LIMIT_S
  while not condition():
    assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s"
    time.sleep(0.02)


def test_the_cause_is_the_last_line_that_reads_like_an_error(tmp_path):
  log = tmp_path / "role.log"
  assert last_error(log) == ""
  log.write_text("starting\nstill\n\n")
  assert last_error(log) == "still"
  log.write_text(
    "jax.errors.Thing: old\ndecoupled learner: no syncer at 127.0.0.1:9\n"
    "E0000 noise of a library\n"
  )
  assert last_error(log) == "decoupled learner: no syncer at 127.0.0.1:9"
  with log.open("a") as file:
    start = file.tell()
    file.write("KeyError: 'new'\n")
  assert last_error(log) == "KeyError: 'new'"
  assert last_error(log, start) == "KeyError: 'new'"


def test_a_spare_takes_a_part_and_the_dead_one_becomes_the_spare(
  supervisor, role, log
):
  learner = dataclasses.replace(role("learner/0", FOREVER), held_s=600.0)
  spare = dataclasses.replace(role("standby/0", FOREVER), spare=True)
  for each in (learner, spare):
    supervisor.start(each)
    until(supervisor, lambda each=each: up(each), "up")
    supervisor.ready(each.name)
  warm = supervisor.pid("standby/0")
  supervisor.expect_fault("learner/0", restart=True)
  supervisor.send("learner/0", signal.SIGKILL)
  until(supervisor, lambda: supervisor.owed(), "the restart to be owed")
  # its restart waits for the word that somebody else takes its part
  assert supervisor.pid("learner/0") is None
  supervisor.swap("learner/0", "standby/0")
  assert supervisor.pid("learner/0") == warm
  assert supervisor.owed() == {}
  until(supervisor, lambda: supervisor.pid("standby/0"), "the new standby")
  assert [e["role"] for e in kinds(log, "restart")] == ["standby/0"]
  # who has taken the part is struck under that name, and starts again as that
  supervisor.expect_fault("learner/0", restart=True)
  supervisor.send("learner/0", signal.SIGKILL)
  until(supervisor, lambda: "learner/0" in supervisor.owed(), "its exit")
  assert gone(warm)
  supervisor.release("learner/0")
  until(supervisor, lambda: supervisor.pid("learner/0"), "the restart")
  until(
    supervisor,
    lambda: learner.log.read_text().count("up") == 2,
    "it to be started as the learner",
  )


def test_norestart_and_a_swap_leave_no_spare_behind(supervisor, role):
  supervisor.start(role("learner/0", FOREVER))
  spare = dataclasses.replace(role("standby/0", FOREVER), spare=True)
  supervisor.start(spare)
  supervisor.expect_fault("learner/0", restart=False)
  supervisor.send("learner/0", signal.SIGKILL)
  until(supervisor, lambda: supervisor.finished("learner/0"), "its end")
  supervisor.swap("learner/0", "standby/0")
  assert supervisor.running() == ("learner/0",)
  assert supervisor.finished("standby/0") == -signal.SIGKILL
  assert supervisor.finished("learner/0") is None


def test_one_that_froze_and_lost_its_part_is_continued_and_comes_back(
  supervisor, role, log
):
  supervisor.start(role("learner/0", FOREVER))
  spare = dataclasses.replace(role("standby/0", FOREVER), spare=True)
  supervisor.start(spare)
  frozen = supervisor.pid("learner/0")
  supervisor.ready("learner/0")
  supervisor.send("learner/0", signal.SIGSTOP)
  supervisor.swap("learner/0", "standby/0")
  assert supervisor.pid("standby/0") == frozen
  supervisor.resume(frozen)
  os.kill(frozen, signal.SIGTERM)
  until(
    supervisor,
    lambda: supervisor.pid("standby/0") not in (None, frozen),
    "it to come back as a standby",
  )
  [exited] = kinds(log, "exit")
  assert (exited["role"], exited["planned"]) == ("standby/0", True)


def test_a_spare_that_cannot_start_does_not_end_the_job(supervisor, role):
  spare = dataclasses.replace(
    role("standby/0", "import sys; sys.exit(3)"), spare=True
  )
  supervisor.start(spare)
  until(supervisor, lambda: supervisor.finished("standby/0"), "its end")
  assert supervisor.finished("standby/0") == 3


IN_ORDER = """
  import signal, sys, time
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  print('up', flush=True)
  time.sleep(600)
"""


@pytest.fixture
def hosts(supervisor, role):
  """Two hosts of one learner, running."""

  def start(code=FOREVER):
    names = [f"learner/0/host/{host}" for host in range(2)]
    for name in names:
      made = dataclasses.replace(role(name, code), group="learner/0")
      supervisor.start(made)
      until(supervisor, lambda made=made: up(made), name)
      supervisor.ready(name)
    return names

  return start


def restarted(supervisor, names, before):
  def done():
    pids = [supervisor.pid(name) for name in names]
    return None not in pids and not set(pids) & set(before)

  until(supervisor, done, "all hosts to be started again")


def test_a_host_that_dies_is_started_again_alone(supervisor, hosts, log):
  names = hosts()
  before = [supervisor.pid(name) for name in names]
  os.kill(before[1], signal.SIGKILL)
  restarted(supervisor, names[1:], before[1:])
  assert supervisor.pid(names[0]) == before[0]
  (ended,) = kinds(log, "exit")
  assert (ended["role"], ended["planned"]) == (names[1], False)
  (again,) = kinds(log, "restart")
  assert (again["role"], again["attempt"]) == (names[1], 2)
  assert set(supervisor.owed()) == {names[1]}


def test_the_others_wait_for_a_host_that_is_not_started_again(
  supervisor, hosts, log
):
  names = hosts()
  supervisor.expect_fault(names[0], restart=False)
  supervisor.send(names[0], signal.SIGKILL)
  until(supervisor, lambda: supervisor.finished(names[0]), "one to be gone")
  assert supervisor.running() == (names[1],)
  assert not supervisor.owed()
  assert not kinds(log, "restart")


def test_hosts_that_leave_in_order_are_started_again_together(
  supervisor, hosts
):
  names = hosts(IN_ORDER)
  before = [supervisor.pid(name) for name in names]
  supervisor.expect_fault(names[0], restart=True)
  supervisor.send(names[0], signal.SIGTERM)
  until(supervisor, lambda: supervisor.pid(names[0]) is None, "one to leave")
  supervisor.step(0.1)
  assert supervisor.pid(names[0]) is None  # waits for the other one
  assert supervisor.pid(names[1]) == before[1]
  supervisor.send(names[1], signal.SIGTERM)  # as the hosts have agreed
  restarted(supervisor, names, before)
