"""Networks that lose, delay and repeat messages, repeatably by seed."""

import random


class Storm:
  """Loses, delays (hence reorders) and repeats messages at random.

  Args:
    seed: of the draws.
    lose, delay, repeat: probabilities, each for every message.
    longest_s: bound of a delay.
  """

  def __init__(
    self,
    seed: int,
    lose: float,
    delay: float,
    repeat: float,
    longest_s: float = 3.0,
  ):
    self._draw = random.Random(seed)
    self._lose, self._delay, self._repeat = lose, delay, repeat
    self._longest_s = longest_s

  def __call__(
    self, kind: str, learner_id: int, message: object
  ) -> tuple[float, ...]:
    draw = self._draw
    if draw.random() < self._lose:
      return ()
    late = draw.random() < self._delay
    delays = [draw.uniform(0, self._longest_s) if late else 0.0]
    if draw.random() < self._repeat:
      delays.append(draw.uniform(0, self._longest_s))
    return tuple(delays)
