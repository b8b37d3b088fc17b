"""Lost, late, repeated, reordered and poisoned messages."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decoupled.algorithm.policy import Exchange
from decoupled.errors import Refused
from decoupled.types import (
  PROTOCOL_VERSION,
  Contribution,
  Heartbeat,
  Hello,
  Version,
)
from tests.exchange import jobs, storms

H8 = Exchange(H=8, P=8)


@settings(
  max_examples=5,
  deadline=None,
  derandomize=True,
  suppress_health_check=[HealthCheck.too_slow],
)
@given(
  seed=st.integers(0, 1000),
  lose=st.floats(0, 0.3),
  delay=st.floats(0, 0.3),
  repeat=st.floats(0, 0.3),
  carry=st.booleans(),
)
def test_a_storm_of_messages_ends_in_agreement(
  seed, lose, delay, repeat, carry
):
  exchange = Exchange(
    H=8, P=8, adoption="carry" if carry else "overwrite", codec="bfloat16"
  )
  made = jobs.job(
    exchange,
    learners=3,
    rounds=40,
    fault=storms.Storm(seed, lose, delay, repeat),
  )
  made.run(3000)
  jobs.check_ended(made)
  assert made.rounds.rounds_closed == 40


def poison(contribution, **header):
  copy = header.pop("copy", {})
  arrays = header.pop("arrays", contribution.arrays)
  new = dataclasses.replace(
    contribution.header,
    copy=contribution.header.copy._replace(**copy),
    **header,
  )
  return Contribution(contribution.learner_id, new, arrays)


def with_value(contribution, value):
  first = contribution.arrays[0].copy()
  first.flat[0] = value
  return (first, *contribution.arrays[1:])


POISONS = {
  "nan": (lambda c: poison(c, arrays=with_value(c, np.nan)), "nonfinite"),
  "inf": (lambda c: poison(c, arrays=with_value(c, np.inf)), "nonfinite"),
  "shape": (
    lambda c: poison(c, arrays=tuple(a[..., :-1] for a in c.arrays)),
    "shape",
  ),
  "fewer": (lambda c: poison(c, arrays=c.arrays[:-1]), "shape"),
  "dtype": (
    lambda c: poison(c, arrays=tuple(a.astype("f8") for a in c.arrays)),
    "dtype",
  ),
  "base": (lambda c: poison(c, base=Version(1, 99)), "base"),
  "term": (lambda c: poison(c, copy={"term": 2}), "term"),
  "zombie": (lambda c: poison(c, copy={"incarnation": 7}), "fenced"),
  "no tokens": (lambda c: poison(c, tokens=0), "counters"),
  "no steps": (lambda c: poison(c, steps=0, tokens=0), "counters"),
  "negative": (lambda c: poison(c, tokens=-5), "counters"),
  "huge": (lambda c: poison(c, tokens=2**60), "counters"),
  "too late": (lambda c: poison(c, copy={"round": 1}), "late"),
  "too early": (lambda c: poison(c, copy={"round": 999}), "late"),
  "other fragment": (lambda c: poison(c, copy={"fragment": 5}), "fragment"),
}


@pytest.mark.parametrize("name", POISONS)
def test_a_poisoned_contribution_is_refused_by_its_reason(name):
  spoil, reason = POISONS[name]
  made = jobs.job(H8, learners=2, rounds=24)
  rounds, caught = made.rounds, []
  real = rounds.contribution

  def once(now, contribution):
    copy = contribution.header.copy
    if not caught and copy.round >= 17 and contribution.learner_id == 1:
      before = [f.arrays for f in rounds.model.fragments]
      caught.append(real(now, spoil(contribution)))
      assert all(
        a is b
        for a, b in zip(
          before, [f.arrays for f in rounds.model.fragments], strict=True
        )
      )
      return caught[0]
    return real(now, contribution)

  rounds.contribution = once
  made.run(1000)
  jobs.check_ended(made)
  assert caught == [reason]
  assert rounds.refused[reason] >= 1
  refused = made.events.of("refused")
  assert refused[0]["reason"] == reason


def test_a_refused_copy_is_extracted_anew_while_its_round_is_open():
  made = jobs.job(H8, learners=1, rounds=30)
  rounds, seen = made.rounds, []
  real = rounds.contribution

  def spoil_first(now, contribution):
    copy = contribution.header.copy
    if copy.round == 17:
      seen.append(copy.attempt)
      if copy.attempt == 0:
        contribution = poison(
          contribution, arrays=with_value(contribution, np.nan)
        )
    return real(now, contribution)

  rounds.contribution = spoil_first
  made.run(1000)
  jobs.check_ended(made)
  assert seen[0] == 0
  assert 1 in seen
  assert rounds.refused["nonfinite"] == 1


def test_values_that_overflow_in_the_merge_never_become_global():
  """Each is finite; their difference from the global fragment is not."""
  made = jobs.job(H8, learners=2, rounds=40)
  rounds, real, spoilt = made.rounds, made.rounds.contribution, []

  def overflow(now, contribution):
    header = contribution.header
    if header.copy.round == 17:
      spoilt.append(header.copy)
      top = np.finfo(np.float32).max
      contribution = poison(
        contribution,
        arrays=tuple(np.full_like(a, -top) for a in contribution.arrays),
      )
    return real(now, contribution)

  rounds.contribution = overflow
  made.run_until(lambda: rounds.rounds_closed >= 16)
  before = {p: rounds.model.get(p).arrays for p in range(8)}
  made.run_until(lambda: rounds.rounds_closed >= 17)
  assert spoilt
  fragment = rounds.model.get(0)
  assert fragment.version == Version(1, 17)
  for ours, old in zip(fragment.arrays, before[0], strict=True):
    assert (ours == old).all()
  assert rounds.refused["overflow"] == len(spoilt)
  made.run(1000)
  jobs.check_ended(made)
  for p in range(8):
    for array in rounds.model.get(p).arrays:
      assert np.isfinite(array).all()
  assert jobs.counted(made)[-1]["round"] == 40


def test_a_refused_part_of_version_0_is_sent_again():
  made = jobs.job(H8, learners=2, rounds=16)
  real, seen = made.rounds.contribution, []

  def spoil_first(now, contribution):
    copy = contribution.header.copy
    if copy.round == 0 and copy.fragment == 3:
      seen.append(copy)
      if len(seen) == 1:
        contribution = poison(
          contribution, arrays=with_value(contribution, np.nan)
        )
    return real(now, contribution)

  made.rounds.contribution = spoil_first
  made.run(100)
  jobs.check_ended(made)
  assert len(seen) >= 2


def test_a_model_that_starts_with_nan_is_named_as_what_is_waited_for():
  made = jobs.job(H8, learners=1, rounds=16)
  params = made.learners[0].trainer.params
  made.learners[0].trainer.params = {**params, "out": params["out"] * np.nan}
  made.run_until(lambda: made.clock.now() > 20)
  assert made.rounds.model.versions == (Version(0, -1),) * 8
  note = made.rounds.announcement(made.clock.now(), 0).note
  assert "version 0" in note
  assert "learner 0" in note
  assert "nonfinite" in note


def hello(learner_id=0, holder="here:1", previous=0, **fields):
  from decoupled.link import tree
  from tests.exchange import toy

  specs = tree.tensor_specs(toy.init(), toy.roles, toy.STACKED)
  return Hello(
    learner_id=learner_id,
    holder=holder,
    run_id=fields.pop("run_id", ""),
    tensors=fields.pop("tensors", specs),
    previous=previous,
    **fields,
  )


def refusal(made, claim):
  with pytest.raises(Refused) as caught:
    made.rounds.hello(made.clock.now(), claim)
  return caught.value.reason, str(caught.value)


def test_claims_are_refused_with_both_sides_named():
  made = jobs.job(H8, learners=1, rounds=200)
  made.rounds.contract["Outer.momentum"] = "0.8"
  made.run_until(lambda: made.rounds.rounds_closed > 3)
  reason, said = refusal(made, hello(holder="there:2"))
  assert reason == "claimed"
  assert "memory:0.0" in said
  assert "there:2" in said
  reason, said = refusal(made, hello(5, run_id="other"))
  assert (reason, "other" in said, "memory" in said) == ("run", True, True)
  reason, said = refusal(made, hello(5, protocol=PROTOCOL_VERSION + 1))
  assert reason == "protocol"
  reason, said = refusal(made, hello(5, contract=(("Outer.momentum", "0.5"),)))
  assert reason == "contract"
  assert "Outer.momentum = 0.5" in said
  assert "Outer.momentum = 0.8" in said
  changed = hello(5).tensors
  changed = (dataclasses.replace(changed[0], shape=(7,)), *changed[1:])
  reason, said = refusal(made, hello(5, tensors=changed))
  assert reason == "contract"
  assert "embed float32[7]" in said
  assert "embed float32[6]" in said
  reason, _ = refusal(made, hello(5, tensors=hello(5).tensors[:-1]))
  assert reason == "contract"


def test_too_many_fragments_are_refused_with_both_numbers():
  made = jobs.job(Exchange(H=48, P=48), learners=0, rounds=8)
  reason, said = refusal(made, hello())
  assert reason == "contract"
  assert "48" in said
  assert "24" in said


def test_a_thousand_joins_leave_a_small_table_and_rising_incarnations():
  made = jobs.job(H8, learners=0, rounds=8)
  for k in range(1000):
    welcome = made.rounds.hello(made.clock.now(), hello(3, f"here:{k}"))
    assert welcome.incarnation == k + 1
    made.rounds.disconnected(made.clock.now(), 3, k + 1, "gone")
  assert made.rounds.membership.live == {}
  assert len(made.rounds.membership.incarnations) == 1
  late = Heartbeat(3, 999, 0.0)
  with pytest.raises(Refused) as caught:
    made.rounds.heartbeat(made.clock.now(), late)
  assert caught.value.reason == "fenced"
