"""The global model by itself: merging is pure and rounding never adds up."""

import numpy as np
import pytest

from decoupled.algorithm.policy import Exchange, Outer
from decoupled.syncer.model import GlobalModel
from decoupled.types import (
  NO_VERSION,
  Contribution,
  CopyHeader,
  CopyId,
  Manifest,
  Role,
  TensorSpec,
  Unit,
  Version,
)
from decoupled.wire import codecs

SPECS = (
  TensorSpec("w", (4, 5), "float32"),
  TensorSpec("e", (7,), "float32", Role.EMBEDDING),
  TensorSpec("s", (3,), "float32", Role.STATISTIC),
)
MANIFEST = Manifest(SPECS, (tuple(Unit(spec.name) for spec in SPECS),))
PLAIN = Outer(
  learning_rate=1.0, momentum=0.0, merge="average", presence_exponent=0.0
)


def draw(seed, scale=1.0):
  rng = np.random.default_rng(seed)
  return tuple(
    (scale * rng.normal(size=spec.shape)).astype(np.float32) for spec in SPECS
  )


def model(codec="float32", outer=PLAIN):
  made = GlobalModel(MANIFEST, Exchange(H=1, P=1, codec=codec), outer)
  made.start(0, Version(1, 0), draw(0), 0)
  return made


def sent(made, learner_id, arrays):
  now = made.get(0)
  copy = CopyId(1, 1, now.version.round + 1, 0, 0)
  header = CopyHeader(copy, now.version, 1, 10, 10)
  return Contribution(learner_id, header, arrays)


def step(made, *contributions, weights=None):
  """Merges and commits the next version."""
  now = made.get(0)
  successor = made.merged(
    0,
    Version(1, now.version.round + 1),
    [sent(made, i, arrays) for i, arrays in enumerate(contributions)],
    [1.0] * len(contributions) if weights is None else weights,
    1.0,
    0,
  )
  made.commit(0, successor)
  return successor


def same(a, b):
  return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def moved(arrays, seed):
  steps = draw(seed, 1e-3)
  return tuple(a + s for a, s in zip(arrays, steps, strict=True))


def test_a_sole_learners_parameters_become_the_global_ones():
  made = model()
  theirs = moved(made.get(0).published, 1)
  for ours, wanted in zip(step(made, theirs).arrays, theirs, strict=True):
    np.testing.assert_allclose(ours, wanted, rtol=1e-6, atol=1e-7)


def test_merging_leaves_the_current_fragment_alone():
  """It runs beside the event loop, which goes on serving the old one."""
  made = model(outer=Outer())
  step(made, moved(made.get(0).published, 1))
  before = made.get(0)
  kept = [a.copy() for a in before.arrays]
  theirs = [moved(before.published, 2), moved(before.published, 3)]
  given = [tuple(a.copy() for a in arrays) for arrays in theirs]
  contributions = [sent(made, i, arrays) for i, arrays in enumerate(theirs)]
  first, again = (
    made.merged(0, Version(1, 2), contributions, [0.3, 0.7], 1.0, 0)
    for _ in range(2)
  )
  assert made.get(0) is before
  assert same(before.arrays, kept)
  assert all(same(a, b) for a, b in zip(theirs, given, strict=True))
  assert same(first.arrays, again.arrays)
  assert not same(first.arrays, kept)


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", [[], [0.0, 0.0]])
def test_without_any_weight_there_is_a_new_version_of_the_same(codec, weights):
  made = model(codec, Outer())
  step(made, moved(made.get(0).published, 1))
  before = made.get(0)
  after = step(made, *[draw(9)] * len(weights), weights=weights)
  assert same(after.arrays, before.arrays)
  assert after.version > before.version == after.base
  assert after.outer_state is before.outer_state


def test_a_learner_that_did_nothing_changes_nothing_in_any_precision():
  """Learners start from what was published, not from the syncer's own."""
  made = model("bfloat16")
  step(made, moved(made.get(0).published, 1))
  before = made.get(0)
  assert not same(before.arrays, before.published)
  after = step(made, before.published)
  assert same(after.arrays, before.arrays)


def test_what_is_published_is_what_learners_decode():
  made = model("bfloat16", Outer())
  held = made.get(0).published
  for k in range(6):
    after = step(made, moved(held, k))
    held = codecs.decode("bfloat16", after.delta, held)
    assert same(held, after.published)


def test_rounding_is_made_good_by_the_next_delta():
  """Deltas are taken against what learners hold, so errors cannot add up."""
  made = model("bfloat16")
  errors = []
  for k in range(40):
    after = step(made, moved(made.get(0).published, k))
    errors.append(
      max(
        float(np.abs(a - p).max())
        for a, p in zip(after.arrays, after.published, strict=True)
      )
    )
  step_size = 4e-3  # of the largest moves; half a unit of 8 bits of it
  assert max(errors) <= step_size / 2**8
  step(made, made.get(0).published)
  quiet = step(made, made.get(0).published)
  left = [
    float(np.abs(a - p).max())
    for a, p in zip(quiet.arrays, quiet.published, strict=True)
  ]
  assert max(left) < max(errors) / 10


def test_only_the_direct_successor_can_be_committed():
  made = model()
  theirs = sent(made, 0, draw(1))
  slow = made.merged(0, Version(1, 1), [theirs], [1.0], 1.0, 0)
  step(made, draw(2))
  with pytest.raises(ValueError, match="based on"):
    made.commit(0, slow)
  backward = made.merged(0, Version(1, 0), [theirs], [1.0], 1.0, 0)
  with pytest.raises(ValueError, match="is at"):
    made.commit(0, backward)


def test_a_fragment_without_a_version_says_so():
  made = GlobalModel(MANIFEST, Exchange(H=1, P=1), PLAIN)
  assert made.versions == (NO_VERSION,)
  with pytest.raises(ValueError, match="no version yet"):
    made.get(0)


def test_momentum_is_kept_per_fragment_and_not_for_statistics():
  made = model(outer=Outer(learning_rate=1.0, momentum=0.5, merge="average"))
  step(made, moved(made.get(0).published, 1))
  before = made.get(0)
  after = step(made, before.published)  # no push: momentum alone moves
  pairs = list(zip(after.arrays, before.arrays, strict=True))
  assert (pairs[0][0] != pairs[0][1]).all()
  assert (pairs[2][0] == pairs[2][1]).all()
