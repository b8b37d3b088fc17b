"""Progress of a job while it runs, by following its log."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from decoupled.clock import Clock, MonotonicClock
from decoupled.observe.events import EventReader
from decoupled.observe.live import Live, number

if TYPE_CHECKING:
  from rich.progress import Progress as Bars

LINE_EVERY_S = 5.0


class Progress:
  """A bar on a terminal, else a line every few seconds.

  Notable events are told as they happen in both. Call `update` a few times a
  second and `close` at the end.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    rounds: int = 0,
    learners: int = 0,
    out: TextIO | None = None,
    clock: Clock | None = None,
  ):
    """Begins at the end of the log, so that earlier jobs are not retold.

    Args:
      workdir: of the job.
      rounds: rounds after which it ends; 0 = not known.
      learners: how many the job has; 0 = not known.
      out: standard error unless given.
      clock: for the pace of the lines.
    """
    self.live = Live()
    self._rounds = rounds
    self._learners = learners
    self._out = sys.stderr if out is None else out
    self._clock = clock or MonotonicClock()
    self._reader = EventReader(Path(workdir) / "events.jsonl")
    self._reader.new()
    self._said_s = self._clock.now()
    self._said = ""
    self._bars: Bars | None = None
    self._show: Callable[[], None] | None = None
    if self._out.isatty() and os.environ.get("TERM") != "dumb":
      self._open_bars()

  def update(self) -> None:
    """Reads what is new and shows it."""
    self.live.take(self._reader.new())
    for note in self.live.take_notes():
      self._print(note)
    if self._show is not None:
      self._show()
    elif self._clock.now() - self._said_s >= LINE_EVERY_S:
      self._said_s = self._clock.now()
      self._say()

  def close(self) -> None:
    self.update()
    if self._bars is not None:
      self._bars.stop()
      self._bars = self._show = None
    else:
      self._say()

  def line(self) -> str:
    """How the job stands, in one line."""
    live = self.live
    of = f"/{self._rounds}" if self._rounds else ""
    return (
      f"[{live.now_s:7.1f} s] round {live.round}{of}  "
      f"loss {number(live.loss, '.3f')}  "
      f"{number(live.tokens_per_second, ',.0f')} tokens/s  "
      f"{self._who()}  {live.phase}"
    )

  def _who(self) -> str:
    """Which learners are live, such as `learners 0,2 of 3`."""
    who = ",".join(map(str, self.live.alive)) or "none"
    return f"learners {who}" + (
      f" of {self._learners}" if self._learners else ""
    )

  def _say(self) -> None:
    line = self.line()
    if line != self._said:
      self._said = line
      self._print(line)

  def _print(self, text: str) -> None:
    if self._bars is not None:
      self._bars.console.print(text, markup=False, highlight=False)
      return
    try:
      print(text, file=self._out, flush=True)
    except (OSError, ValueError):
      self._out = _Nowhere()  # the reader of our output has gone away

  def _open_bars(self) -> None:
    from rich.console import Console
    from rich.progress import (
      BarColumn,
      MofNCompleteColumn,
      Progress,
      TextColumn,
      TimeElapsedColumn,
    )

    bars = Progress(
      TextColumn("round"),
      BarColumn(bar_width=24),
      MofNCompleteColumn(),
      TimeElapsedColumn(),
      TextColumn("{task.description}"),
      console=Console(file=self._out),
      transient=True,
    )
    task = bars.add_task("starting", total=self._rounds or None)

    def show() -> None:
      live = self.live
      bars.update(
        task,
        completed=live.round,
        description=(
          f"loss {number(live.loss, '.3f')}  "
          f"{number(live.tokens_per_second, ',.0f')} tok/s  "
          f"{self._who()}"
        ),
      )

    bars.start()
    self._bars, self._show = bars, show


class _Nowhere:
  """A text stream that drops everything."""

  def write(self, text: str) -> int:
    return len(text)

  def flush(self) -> None: ...
