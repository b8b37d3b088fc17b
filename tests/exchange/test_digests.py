"""A short text says whether parameters are the same, bit for bit."""

import numpy as np

from decoupled.algorithm.policy import Exchange
from decoupled.link import digests
from tests.exchange import jobs


def test_whoever_was_there_for_the_drain_has_what_the_syncer_has():
  made = jobs.job(Exchange(H=8, P=8), learners=3, rounds=24)
  made.run(1000)
  fragments = [f.published for f in made.rounds.model.fragments]
  expected = digests.of(fragments)
  for learner in made.learners.values():
    assert learner.link.versions == made.rounds.model.versions
    assert learner.link.digest(learner.trainer.params) == expected
  changed = [tuple(a.copy() for a in arrays) for arrays in fragments]
  flat = changed[3][0].reshape(-1).view(np.uint32)
  flat[0] ^= 1
  assert digests.of(changed) != expected
