"""Asking a learner of a whole job for its optimizer state, and its death."""

from tests.exchange import jobs


def test_a_donor_is_asked_by_its_announcement_until_it_dies():
  made = jobs.job(learners=3, rounds=60)
  made.run_until(lambda: made.rounds.rounds_closed >= 10)
  members = made.rounds.membership.live
  for member in members.values():
    member.gives_state = True
  joiner = made.learners[2]
  incarnation = joiner.link.welcome.incarnation
  asked = made.rounds.donors.ask(made.clock.now(), 2, incarnation)
  donor = made.learners[asked.donor]

  made.run_until(lambda: donor.link.donation is not None)
  assert donor.link.donation[1] == asked.request
  others = [x for x in made.learners.values() if x is not donor]
  assert all(x.link.donation is None for x in others)

  made.kill(asked.donor)
  assert "has gone" in asked.over
  again = made.rounds.donors.ask(made.clock.now(), 2, incarnation)
  assert {asked.donor, again.donor} == {0, 1}

  # one that never answers: given up by the clock, and not asked any more
  made.run_until(lambda: again.over is not None)
  assert "has moved nothing" in again.over
  second = made.learners[again.donor]
  made.run_until(lambda: second.link.donation is None)
  made.run()
  jobs.check_ended(made)
