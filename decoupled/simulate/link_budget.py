"""Codec and H: what of the exchange a link can carry."""

import dataclasses
import itertools

from decoupled.algorithm.policy import CODECS, Exchange
from decoupled.simulate.plan import Choice
from decoupled.simulate.scenario import Scenario
from decoupled.simulate.traffic import CODEC_BITS

_MOST_H = 1536
# A link is planned to be busy for this share of the time.
_BUSY = 0.8


def needed_gbps(exchange: Exchange, params: float, step_s: float) -> float:
  """Gbit/s that a learner's link must carry each way.

  The larger of two needs: fragments on average, one in H/P steps; and one
  fragment up and its merge down within the overlap budget of tau steps.
  """
  bits = CODEC_BITS[exchange.codec] * params / exchange.P
  average_s = exchange.H / exchange.P * step_s
  overlap_s = max(exchange.tau, 1) * step_s / 2  # half for each way
  return bits / min(average_s, overlap_s) / _BUSY / 1e9


def fitted(
  scenario: Scenario, link_gbps: float
) -> tuple[Exchange, list[Choice], list[str]]:
  """The most precise codec at the smallest H that the link can carry."""
  own = scenario.exchange
  codecs = sorted(CODECS, key=lambda codec: -CODEC_BITS[codec])
  longer = [own.H << n for n in range(1, 12) if own.H << n <= _MOST_H]
  tried, need = own, 0.0
  for h, codec in itertools.product([own.H, *longer], codecs):
    tried = dataclasses.replace(own, H=h, P=h * own.P // own.H, codec=codec)
    need = needed_gbps(tried, scenario.params, scenario.step_s)
    if need <= link_gbps:
      return tried, _choices(own, tried, need, link_gbps), []
  short = (
    f"the link is too slow: {need:.3g} Gbit/s are needed even with "
    f"{tried.codec} and H = {tried.H}, there are {link_gbps:g}; raise "
    "--link_gbps or --step_s"
  )
  return tried, _choices(own, tried, need, link_gbps), [short]


def _choices(
  own: Exchange, chosen: Exchange, need: float, link: float
) -> list[Choice]:
  fits = "the most precise that fits" if need <= link else "the smallest"
  why_codec = f"{fits}: {need:.3g} Gbit/s needed of the {link:g} there are"
  if chosen.H == own.H:
    why_h = "as configured: merging more seldom only helps a slow link"
  else:
    why_h = (
      f"H = {own.H} does not fit with any codec; P goes with it, so that the "
      "fragments are smaller, if the model has as many tensors"
    )
  return [
    Choice("codec", chosen.codec, why_codec),
    Choice("H", str(chosen.H), why_h),
  ]
