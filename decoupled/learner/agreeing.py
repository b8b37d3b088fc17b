"""How the steps of a learner of several hosts carry what these agree on."""

import jax

from decoupled.learner.step import Metrics
from decoupled.link.agreement import ByStep
from decoupled.link.collective import Collective


class StepLanes:
  """Implements `loop.Lanes`.

  Args:
    agreement: of the link.
    collective: places lanes on the devices.
  """

  def __init__(self, agreement: ByStep, collective: Collective):
    self._agreement = agreement
    self._collective = collective

  def feed(self) -> tuple[jax.Array, ...]:
    return (self._collective.put(self._agreement.feed),)

  def carried(self, metrics: Metrics) -> None:
    self._agreement.carried(metrics["low"], metrics["high"])
