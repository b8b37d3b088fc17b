"""What a preset of the simulator found, beside what was published."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from decoupled.errors import ConfigError

Policy = Literal["dp_rigid", "dp_elastic", "diloco", "decoupled"]
POLICIES: tuple[str, ...] = get_args(Policy)


@dataclasses.dataclass(frozen=True)
class Cell:
  """One figure.

  Attributes:
    policy: one of `POLICIES`.
    learners: learners of the job (1 for data-parallel ones).
    chips: chips of the job.
    simulated: the figure found here; a fraction where it is a goodput.
    published: the same figure where somebody published it.
    fitted: whether a constant was chosen to reproduce `published`, so that
      agreement proves nothing.
    low: lower end of the 95 % interval of `simulated`.
    high: its upper end.
    note: what a reader has to know about this cell.
    subject: whose figure it is, where policy and chips do not say it.
    quantity: what the figure is.
    unit: its unit, "" for a fraction.
    mode: which set of assumptions it belongs to, where a preset has several.
  """

  policy: str
  learners: int
  chips: int
  simulated: float
  published: float | None
  fitted: bool
  low: float
  high: float
  note: str = ""
  subject: str = ""
  quantity: str = "goodput"
  unit: str = ""
  mode: str = ""

  def __post_init__(self) -> None:
    if self.policy not in POLICIES:
      raise ConfigError(
        f"Cell.policy = {self.policy!r} must be one of {', '.join(POLICIES)}"
      )

  def error(self) -> float | None:
    """Simulated less published, None where nothing was published."""
    return None if self.published is None else self.simulated - self.published


@dataclasses.dataclass(frozen=True)
class PresetResult:
  """All figures of a preset.

  Attributes:
    preset: its name.
    cells: the figures, in the order in which they are shown.
    constants: what was assumed or fitted, by name.
    wall_s: seconds it took.
    note: what a reader has to know about all of it.
  """

  preset: str
  cells: tuple[Cell, ...]
  constants: dict[str, float]
  wall_s: float
  note: str = ""

  def errors(self, quantity: str = "goodput") -> list[float]:
    """Absolute differences of the cells of a quantity that have a target."""
    found = [c.error() for c in self.cells if c.quantity == quantity]
    return [abs(error) for error in found if error is not None]


def as_json(result: PresetResult) -> dict[str, Any]:
  """The result as plain data; a figure that is not finite becomes None."""
  table: dict[str, Any] = plain(result)
  return table


def plain(value: Any) -> Any:
  """Dataclasses, containers and numbers as what JSON has."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    value = dataclasses.asdict(value)
  if isinstance(value, Mapping):
    return {key: plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [plain(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
