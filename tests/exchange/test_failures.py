"""Deaths, freezes, partitions and late comers: what the others notice."""

import itertools

import pytest

from decoupled.algorithm.policy import Exchange
from decoupled.errors import Refused
from decoupled.link import tree, workers
from decoupled.link.link import Link
from decoupled.syncer.settings import Limits
from decoupled.types import Hello, Phase
from tests.exchange import jobs, toy

H8 = Exchange(H=8, P=8)


def undisturbed(made, *learners):
  """Survivors step on at their own pace, whatever happens elsewhere."""
  for learner in learners:
    assert max(jobs.cadence(made, learner)) < 1.1


def after(made, rounds):
  made.run_until(lambda: made.rounds.rounds_closed >= rounds)


def test_a_killed_learner_returns_under_a_higher_incarnation():
  made = jobs.job(Exchange(), learners=3, rounds=200)
  after(made, 50)
  made.kill(1)
  at = made.clock.now()
  jobs.add(made, 1, 1.0, delay_s=10.0, init_seed=9)
  made.run(1000)
  jobs.check_ended(made)
  undisturbed(made, 0, 2)
  joins = [e for e in made.events.of("join") if e["learner"] == 1]
  assert [e["incarnation"] for e in joins] == [1, 2]
  without = [e for e in jobs.counted(made) if at + 2 < e["opened"] < at + 9]
  assert without
  assert all(e["participants"] == [0, 2] for e in without)
  assert all(e["alive"] == [0, 2] for e in without)
  assert len(jobs.merged_by(made, 1)) > 150
  assert made.rounds.accounts.discarded["failure"] > 0
  # it took the run's parameters, not its own fresh ones
  assert made.learners[1].losses[0] < 0.5 * made.learners[0].losses[0]


def test_a_frozen_learner_loses_its_lease_and_returns():
  made = jobs.job(Exchange(), learners=3, rounds=150)
  after(made, 50)
  made.freeze(1, 20.0)
  made.run(1000)
  jobs.check_ended(made)
  undisturbed(made, 0, 2)
  [leave] = [e for e in made.events.of("leave") if e["why"] == "lease"]
  assert leave["learner"] == 1
  assert made.learners[1].link.welcome.incarnation == 2
  closed = [e["merged"] for e in jobs.counted(made)]
  assert max(b - a for a, b in itertools.pairwise(closed)) < 2.5


def test_a_learner_that_freezes_after_its_report_holds_nobody_up():
  """Its copy is reported, and never comes: the budget is all it costs."""
  lost = []

  def fault(kind, learner_id, message):
    if kind == "contribution" and learner_id == 1 and lost:
      return ()
    return (0.0,)

  made = jobs.job(Exchange(), learners=3, rounds=120, fault=fault)
  after(made, 40)
  lost.append(True)
  at = made.clock.now()
  made.run_until(lambda: made.clock.now() > at + 30)
  undisturbed(made, 0, 2)
  hit = [e for e in jobs.counted(made) if e["opened"] > at]
  assert len(hit) >= 25
  assert all(e["closed"] - e["opened"] <= 2.1 for e in hit)
  assert all(1 not in e["participants"] for e in hit)


def test_a_partition_heals_and_stale_work_is_refused_by_its_base():
  made = jobs.job(H8, learners=3, rounds=150)
  after(made, 40)
  wire = made.learners[1].wire
  steps = made.learners[1].step
  wire.partition()
  at = made.clock.now()
  made.network.after(30.0, wire.heal)
  made.run_until(lambda: made.clock.now() > at + 29)
  assert made.learners[1].step > steps + 25  # it went on alone
  made.run(1000)
  jobs.check_ended(made)
  undisturbed(made, 0, 1, 2)
  assert made.learners[1].link.welcome.incarnation == 2
  assert any(e["opened"] > at + 30 for e in jobs.merged_by(made, 1))


def test_a_learner_too_long_alone_pauses_and_says_so():
  exchange = Exchange(H=8, P=8, max_unsynced_steps=20)
  made = jobs.job(exchange, learners=2, rounds=100)
  after(made, 30)
  wire, learner = made.learners[1].wire, made.learners[1]
  wire.partition()
  step, at = learner.step, made.clock.now()
  made.network.after(60.0, wire.heal)
  made.run_until(lambda: made.clock.now() > at + 59)
  assert step + 10 < learner.step <= step + 20
  made.run(1000)
  jobs.check_ended(made)
  assert learner.step > step + 20


def test_a_learner_that_is_told_to_leave_does_not_sit_out_its_pause():
  exchange = Exchange(H=8, P=8, max_unsynced_steps=20)
  made = jobs.job(exchange, learners=2, rounds=100)
  after(made, 30)
  made.learners[1].wire.partition()
  at, learner = made.clock.now(), made.learners[1]
  made.run_until(lambda: made.clock.now() > at + 59)
  link, asked = learner.link, []
  link._leaving = lambda ending: asked.append(ending) or True
  assert link.waits(learner.step)
  link.boundary(learner.trainer.params, step=learner.step, tokens=1)
  assert set(asked) == {False}
  assert not link.done


def test_an_id_that_is_owed_goes_to_its_holder_alone():
  made = jobs.job(H8, learners=2, rounds=60)
  after(made, 20)
  made.kill(1)
  made.rounds.expect(made.clock.now(), 1, 15.0)
  jobs.add(made, -1, 1.0)
  made.run_until(lambda: 2 in made.rounds.membership.live)
  assert 1 not in made.rounds.membership.live


def test_a_sole_learner_that_dies_never_lends_fresh_parameters():
  made = jobs.job(H8, learners=2, rounds=100)
  after(made, 40)
  made.kill(0)
  made.kill(1)
  versions = made.rounds.model.versions
  before = toy.global_loss(made)
  jobs.add(made, 5, 1.0, delay_s=5.0, init_seed=77)
  made.run_until(lambda: made.rounds.rounds_closed >= 60)
  assert all(
    new >= old
    for new, old in zip(made.rounds.model.versions, versions, strict=True)
  )
  assert toy.global_loss(made) < before + 0.02
  made.run(1000)
  jobs.check_ended(made)


def test_a_seeder_that_dies_is_replaced_and_its_half_forgotten():
  made = jobs.job(
    H8, learners=3, rounds=24, limits=Limits(start_s=20.0, lease_s=5.0)
  )
  made.run_until(lambda: len(made.rounds._seeds) >= 1)
  assert made.rounds._seeder == 0
  made.kill(0)
  assert made.rounds._seeds == {}
  made.run_until(lambda: made.rounds.phase is Phase.TRAINING, 60)
  made.run(1000)
  jobs.check_ended(made)


def test_without_a_quorum_rounds_wait_and_learners_do_not():
  made = jobs.job(Exchange(H=8, P=8, quorum=3), learners=3, rounds=60)
  after(made, 20)
  made.kill(2)
  at = made.clock.now()
  made.run_until(lambda: made.clock.now() > at + 20)
  closed = made.rounds.rounds_closed
  assert closed <= 22
  undisturbed(made, 0, 1)
  jobs.add(made, 2, 1.0)
  made.run(1000)
  jobs.check_ended(made)
  assert made.rounds.rounds_closed == 60


def test_too_few_at_the_start_are_named_and_waited_for_in_vain():
  limits = Limits(start_s=30.0)
  made = jobs.job(H8, learners=1, rounds=16, limits=limits)
  made.rounds._plan = type(made.rounds._plan)("memory", learners=3, rounds=16)
  made.run_until(lambda: made.clock.now() > 10, 11)
  assert made.rounds._note == "waiting for learners 1, 2"
  made.run(1000)
  jobs.check_ended(made)
  assert made.clock.now() > 30


def test_the_end_waits_for_a_restart_that_is_owed_but_not_for_ever():
  made = jobs.job(H8, learners=2, rounds=24)
  after(made, 20)
  made.kill(1)
  made.rounds.expect(made.clock.now(), 1, 60.0)
  jobs.add(made, 1, 1.0, delay_s=20.0)
  made.run(1000)
  jobs.check_ended(made)
  assert made.learners[1].step >= 1
  assert len(jobs.counted(made)) == 24

  made = jobs.job(H8, learners=2, rounds=24)
  after(made, 20)
  made.kill(1)
  at = made.clock.now()
  made.rounds.expect(at, 1, 15.0)
  made.run(1000)
  assert at + 14 < made.clock.now() < at + 25


def test_a_run_that_ends_before_it_began_is_told_to_those_who_wait():
  made = jobs.job(H8, learners=1, rounds=16)
  made.rounds._plan = type(made.rounds._plan)("memory", learners=2, rounds=16)
  made.run_until(lambda: made.clock.now() > 5)
  made.rounds.drain(made.clock.now(), "asked for")
  with pytest.raises(Refused, match="run memory at memory has ended before"):
    made.run_until(lambda: made.clock.now() > 10)


def test_a_learner_back_before_its_loss_is_noticed_takes_its_own_claim():
  made = jobs.job(H8, learners=2, rounds=60)
  after(made, 20)
  wire = made.learners[1].wire
  made.network.disconnected(wire)
  wire._on_lost("connection reset")  # the syncer has not noticed
  made.run(1000)
  jobs.check_ended(made)
  undisturbed(made, 0, 1)
  [leave] = [e for e in made.events.of("leave") if e["why"] == "closed"]
  assert (leave["learner"], leave["incarnation"]) == (1, 1)
  assert "joined again" in leave["detail"]
  assert made.learners[1].link.welcome.incarnation == 2


@pytest.mark.parametrize("frozen", [(1,), (0, 1, 2)])
def test_a_drain_does_not_wait_for_the_frozen(frozen):
  made = jobs.job(H8, learners=3, rounds=40)
  after(made, 38)
  for learner in frozen:
    made.freeze(learner, 1000.0)
  made.rounds.drain(made.clock.now(), "asked for")
  at = made.clock.now()
  made.run_until(lambda: made.rounds.ended, 500)
  assert made.clock.now() - at < 3 * Limits().drain_s
  assert len([e for e in made.events.of("round") if not e["counted"]]) == 8


@pytest.mark.parametrize("lost", [(1,), (0, 1, 2)])
def test_a_connection_that_breaks_in_the_drain_costs_no_last_steps(lost):
  made = jobs.job(H8, learners=3, rounds=24)
  made.run_until(lambda: made.rounds.phase is Phase.DRAINING)
  for learner in lost:
    made.learners[learner].wire.partition()
  made.network.after(2.0, lambda: [made.learners[i].wire.heal() for i in lost])
  made.run(1000)
  jobs.check_ended(made)
  assert all(not x.link._over for x in made.learners.values())
  drained = [e for e in made.events.of("round") if not e["counted"]]
  # overwriting leaves a learner with steps in every fragment but the newest
  assert all(set(e["participants"]) >= set(lost) for e in drained[1:])


def test_a_drain_waits_a_lease_for_the_dead_and_for_no_newcomer():
  made = jobs.job(H8, learners=3, rounds=24)
  made.run_until(lambda: made.rounds.phase is Phase.DRAINING)
  at = made.clock.now()
  made.kill(1)
  with pytest.raises(Refused, match="nobody joins"):
    made.network.wire().hello(
      Hello(3, "there:9", "", made.rounds.manifest.tensors)
    )
  made.run(1000)
  jobs.check_ended(made)
  assert made.clock.now() - at < Limits().lease_s + 1


def test_rounds_of_a_drain_without_work_close_unchanged():
  made = jobs.job(H8, learners=2, rounds=40)
  after(made, 20)
  made.kill(0)
  made.kill(1)
  before = toy.global_params(made)
  versions = made.rounds.model.versions
  made.rounds.drain(made.clock.now(), "asked for")
  made.run_until(lambda: made.rounds.ended, 200)
  after_ = toy.global_params(made)
  assert all((before[k] == after_[k]).all() for k in before)
  assert all(
    a > b for a, b in zip(made.rounds.model.versions, versions, strict=True)
  )


def test_a_higher_term_wins_over_what_learners_hold():
  """A syncer restored from a snapshot: rounds go on, everybody adopts."""
  first = jobs.job(H8, learners=2, rounds=24)
  first.run(1000)
  model = first.rounds.model
  second = jobs.job(H8, learners=2, rounds=48)
  second.rounds.term = 2
  second.rounds.restore(
    model.manifest,
    [(f.arrays, f.outer_state) for f in model.fragments],
    24,
    dict(first.rounds.contract),
    {0: 1, 1: 1},
    {0: (0, 30), 1: (0, 31)},
    2,
    {0: 3000, 1: 3000},
  )
  second.run(1000)
  jobs.check_ended(second)
  assert [e["round"] for e in jobs.counted(second)] == list(range(25, 49))
  assert {e["incarnation"] for e in second.events.of("join")} == {2}
  assert second.learners[0].trainer.schedule_steps[0] == 24
  assert second.learners[0].link.welcome.position == (0, 30)
  assert second.learners[0].losses[0] < 0.5 * first.learners[0].losses[0]


def test_work_that_the_goodbye_cuts_short_is_no_fault(caplog):
  """A transfer that begins while the wire is closed raises what gRPC likes."""
  made = jobs.job(H8, learners=0, rounds=8)
  params = toy.Toy(0).params
  told = {}

  def worker(name, handler, on_error):
    told[name] = on_error
    return workers.Inline(handler)

  hello = Hello(0, "here:1", "", tree.tensor_specs(params, toy.roles))
  link = Link(made.network.wire(), params, hello, worker=worker)
  told["link-fetcher"](ValueError("Channel closed!"))
  assert "background task failed" in caplog.text
  caplog.clear()
  link.close()
  told["link-fetcher"](ValueError("Channel closed!"))
  assert "background task failed" not in caplog.text
