"""What a learner does between two steps, decided by decided messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from decoupled.algorithm.policy import Exchange
from decoupled.link.agreement import OneHost
from decoupled.link.boundary import Session
from decoupled.link.copies import HostCopy
from decoupled.link.ops import begin_host_copies
from decoupled.types import OpenRound, Phase, Stage, Version
from tests.exchange.hosts import Host, P

V0 = Version(1, 0)


def host(**policy):
  """A learner that holds version 0 and stands before its first step."""
  made = Host(OneHost(), Exchange(H=8, P=P, **policy))
  made.visit(0)
  return made


def opened(number, fragment, base=V0):
  return OpenRound(Version(1, number), fragment, base)


def landed(extraction):
  return HostCopy(
    extraction.header, (), extraction.device, extraction.step, extraction.tokens
  )


def test_an_open_round_is_extracted_once_with_what_was_done_since_adoption():
  h = host()
  h.announce(1, [opened(5, 0)])
  h.visit(3)
  h.visit(4)
  [header] = h.headers()
  assert (header.copy.round, header.base) == (5, V0)
  assert (header.steps, header.tokens, header.total_tokens) == (3, 30, 30)


def test_adoption_comes_before_extraction_and_resets_the_counters():
  """Else the copy would be of a base that nobody wants any more."""
  h = host()
  new = Version(1, 4)
  h.stage(0, new, V0)
  h.announce(1, [opened(8, 0, new), opened(9, 1)])
  h.visit(3)
  # no step lies on fragment 0 now: a copy of it would weigh nothing
  assert [x.copy.fragment for x in h.headers()] == [1]
  h.visit(4)
  header = h.headers()[-1]
  assert (header.copy.fragment, header.base) == (0, new)
  assert (header.steps, header.tokens, header.total_tokens) == (1, 10, 40)


def test_a_round_on_another_base_is_not_extracted():
  h = host()
  h.announce(1, [opened(8, 0, Version(1, 4))])
  h.visit(3)
  assert h.extracted == []


def test_a_drain_extracts_without_a_step_and_stops():
  h = host()
  h.announce(1, [opened(8, 0)], Phase.DRAINING)
  assert h.visit(0).stop
  [header] = h.headers()
  assert header.steps == 0


def test_a_refused_copy_is_extracted_anew_under_the_next_attempt():
  h = host()
  h.announce(1, [opened(5, 0)])
  h.visit(1)
  [first] = h.headers()
  h.boundary.refusals.append(first.copy)
  h.visit(2)
  _, second = h.headers()
  assert second.copy == first.copy._replace(attempt=1)
  assert second.steps == 2
  h.boundary.refusals.append(first.copy)  # heard twice: old news
  h.visit(3)
  assert len(h.extracted) == 2


def test_an_older_or_equal_version_is_never_adopted():
  h = host()
  h.stage(0, Version(1, 8), V0)
  h.visit(1)
  h.stage(0, Version(1, 4), V0)
  h.stage(0, Version(1, 8), V0)
  h.train()
  h.visit(2)
  assert h.boundary.held[0] == Version(1, 8)
  assert h.values() == [9.0, 1.0, 1.0, 1.0]
  # a restored one wins by its term, whatever its round
  h.stage(0, Version(2, 3), Version(0, -1), restored=True)
  h.visit(3)
  assert h.values()[0] == 3.0


def test_the_schedule_step_follows_the_largest_adopted():
  h = host()
  h.stage(0, Version(1, 8), V0, common_step=16)
  h.stage(1, Version(1, 5), V0, common_step=10)
  h.visit(1)
  assert h.boundary.common_step == 16


@pytest.mark.parametrize(
  ("adoption", "value"), [("overwrite", 4.0), ("blend", 4.5), ("carry", 6.0)]
)
def test_what_lies_on_top_of_an_included_copy(adoption, value):
  """3 steps, extraction, 2 steps; the merge says 4."""
  h = host(adoption=adoption)
  h.announce(1, [opened(4, 0)])
  h.train(3)
  h.visit(3)
  [extraction] = h.extracted
  h.train(2)
  h.stage(0, Version(1, 4), V0, included=landed(extraction))
  h.visit(5)
  assert h.values()[0] == value
  h.announce(2, [opened(8, 0, Version(1, 4))])
  h.train(1)
  h.visit(6)
  # only what no merge has seen counts in the next copy
  assert h.headers()[-1].steps == (3 if adoption == "carry" else 1)


def test_carry_keeps_all_where_the_merge_included_nothing():
  h = host(adoption="carry")
  h.train(3)
  base = h.ops.stage(0, (0 * h.leaves[0],))
  h.stage(0, Version(1, 4), V0, own_base=base)
  h.visit(3)
  assert h.values()[0] == 7.0


@pytest.mark.parametrize(
  "fields",
  [{"restored": True}, {"base": Version(1, 2)}, {"own_base": None}],
  ids=["restored", "skipped a version", "base is gone"],
)
def test_carry_overwrites_where_its_base_is_not_the_merges(fields):
  h = host(adoption="carry")
  h.train(3)
  base = h.ops.stage(0, (0 * h.leaves[0],))
  h.stage(0, Version(1, 4), **{"base": V0, "own_base": base, **fields})
  h.visit(3)
  assert h.values()[0] == 4.0


def slow():
  """A learner whose first step took 4 s where a round lasts 1 s."""
  h = host()
  h.clock.set(4.0)
  h.announce(1, [], next_round=1, next_open_in_s=0.5, pace_s=1.0)
  h.visit(1)
  return h


def test_a_slow_learner_extracts_what_opens_before_its_next_boundary():
  h = slow()
  assert [x.copy.round for x in h.headers()] == [1, 2, 3, 4]
  assert [x.copy.fragment for x in h.headers()] == [0, 1, 2, 3]


def test_nothing_is_extracted_ahead_while_the_run_drains():
  h = host()
  h.announce(1, [], Phase.DRAINING, next_round=5, pace_s=1.0)
  for k in range(3):
    h.clock.set(4.0 * k)
    h.visit(k)
  assert h.extracted == []


def test_a_slow_learner_does_not_extract_for_a_round_still_merging():
  """Round 1 is neither open nor written: round 5 will have another base."""
  h = host()
  h.clock.set(4.0)
  h.announce(1, [opened(2, 1)], next_round=5, next_open_in_s=0.5, pace_s=1.0)
  h.visit(1)
  assert [x.copy.round for x in h.headers()] == [2]


def test_a_copy_that_a_merge_overtook_is_made_anew():
  """It was extracted ahead, while the round before it was being merged."""
  h = host()
  h.announce(1, [opened(5, 0)])
  h.visit(1)
  new = Version(1, 4)
  h.stage(0, new, V0)
  h.visit(2)
  h.announce(2, [opened(5, 0, new)])
  h.visit(3)
  again = h.headers()[-1]
  assert (again.copy.round, again.copy.attempt, again.base) == (5, 1, new)


def test_a_new_session_counts_from_its_start_and_forgets_copies():
  h = host()
  h.announce(1, [opened(5, 0)])
  h.visit(3)
  h.boundary.session = Session(2, 1)
  h.announce(1, [opened(5, 0)])
  h.visit(4)
  first, second = h.headers()
  assert (first.copy.incarnation, second.copy.incarnation) == (1, 2)
  assert (second.copy.round, second.copy.attempt) == (5, 0)
  said = h.boundary.progress(6, 60, 6, (0, 6), Stage.TRAINING, 1.0)
  assert (said.incarnation, said.step, said.tokens) == (2, 2, 20)


def test_the_memory_of_extractions_is_bounded():
  h = host()
  for k in range(1, 100):
    h.announce(k, [opened(k, 0, h.boundary.held[0])])
    h.visit(2 * k)
    h.stage(0, Version(1, k), h.boundary.held[0])
    h.visit(2 * k + 1)
  assert len(h.extracted) == 99
  assert len(h.boundary._extracted) <= 2 * P + 1
  assert len(h.boundary._attempts) <= 2 * P + 1
  assert all(len(staged) <= 1 for staged in h.boundary._staged)


def test_copies_to_the_host_are_asked_for():
  """The loop forbids transfers that nobody asks for; newer JAX is strict."""
  mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
  sharded = jax.jit(
    lambda: jnp.arange(8.0) + 1,
    out_shardings=NamedSharding(mesh, PartitionSpec("fsdp")),
  )()
  with jax.transfer_guard("disallow"):
    begin_host_copies([sharded])
  np.testing.assert_array_equal(sharded, np.arange(8.0) + 1)
