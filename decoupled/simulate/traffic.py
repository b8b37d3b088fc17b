"""Bits per second that policies move, from their formulas.

Every rate is of one direction; what is received is as much.
"""

from collections import Counter

from decoupled.algorithm.policy import Exchange
from decoupled.algorithm.schedule import fragment_of

# Bits on the wire per parameter. The program's own codecs are the first two;
# scales of the block formats (about 0.1 bit) are not counted.
CODEC_BITS = {
  "float32": 32.0,
  "bfloat16": 16.0,
  "int8": 8.0,
  "int4": 4.0,
}


def data_parallel_bps(
  params: float, bits: float, parts: int, step_s: float
) -> float:
  """A ring all-reduce of all gradients over `parts` members, every step.

  2 (n - 1) / n x parameters x bits / step: each member sends (and receives)
  its shares twice around the ring.
  """
  return 2 * (parts - 1) / parts * params * bits / step_s


def learner_bps(
  params: float, bits: float, rule: Exchange, round_s: float
) -> float:
  """One learner: one fragment of 1/P of the parameters per round."""
  return params / rule.P * bits / round_s


def shard_bps(
  params: float, bits: float, rule: Exchange, round_s: float, learners: int
) -> float:
  """The busiest of as many syncer shards as there are learners.

  Fragment p belongs to shard p mod M; each visit brings one contribution of
  every learner.
  """
  owned = Counter(
    fragment_of(r, rule.P) % learners for r in range(1, rule.P + 1)
  )
  share = max(owned.values()) / rule.P
  return learners * share * learner_bps(params, bits, rule, round_s)
