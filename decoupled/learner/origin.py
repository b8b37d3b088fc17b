"""Where a joiner's optimizer state comes from: a donor, a checkpoint, nowhere.

In this order (design section 5): a donor's moments are those of the run as it
is now; the newest checkpoint of this learner is as old as it is; fresh moments
are said loudly. What does not fit, or comes damaged, changes nothing here: the
next donor is asked, then the next source.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from decoupled import faults
from decoupled.checkpoint import learner_store
from decoupled.errors import Refused, Unreachable
from decoupled.learner.donor import leaves_of
from decoupled.types import Welcome
from decoupled.wire import states

Take: TypeAlias = Callable[[], AbstractContextManager[states.Incoming]]

_LOG = logging.getLogger("decoupled.learner")
_UNREACHED = 3  # tries without a syncer before the next source
_RETRY_S = 1.0
# What is wrong with one donor; the syncer names another one, or says none is.
_OF_ONE = (
  *("donor", "misfit", "not_finite", "malformed"),
  *("checksum", "incomplete", "shape"),
)


@dataclasses.dataclass(frozen=True)
class Origin:
  """What was found.

  Attributes:
    source: "donor", "checkpoint", "fresh", or "survivor": a host of the same
      learner, or this one's memory.
    opt_state: the state, laid out for this learner; None where fresh.
    schedule_step: of the learning-rate schedule, when that state was current.
    donor: the learner that gave it, None for any other source.
    saved: plain values of this learner's newest checkpoint, whatever the
      source; empty where there is none of this run.
  """

  source: str
  opt_state: Any = None
  schedule_step: int | None = None
  donor: int | None = None
  saved: dict[str, Any] = dataclasses.field(default_factory=dict)


class Search:
  """Looks for optimizer state on a thread, while the link visits boundaries.

  Args:
    take: asks for a donor's state; each time another's.
    welcome: of the run; without history no donor is asked.
    store: folder or URL of the run's checkpoints.
    specs: the state wanted, with its shardings.
    ended: called when there is a result.
  """

  def __init__(
    self,
    take: Take,
    welcome: Welcome,
    store: str,
    specs: Any,
    ended: Callable[[], None] = lambda: None,
  ):
    self._take = take
    self._welcome = welcome
    self._store = store
    self._specs = specs
    self._ended = ended
    self._found: Origin | None = None
    self._error: BaseException | None = None
    self._over = threading.Event()
    threading.Thread(target=self._run, name="origin", daemon=True).start()

  def done(self) -> bool:
    """Whether `result` would not wait."""
    return self._over.is_set()

  def result(self) -> Origin:
    """What was found, once it is.

    Raises:
      DecoupledError: checkpoints were committed, but none of them is good.
    """
    self._over.wait()
    if self._error is not None:
      raise self._error
    assert self._found is not None
    return self._found

  def _run(self) -> None:
    try:
      self._found = self._search()
    except BaseException as error:
      self._error = error
    self._over.set()
    self._ended()

  def _search(self) -> Origin:
    found = self._donated() if self._welcome.has_history else None
    if found is not None:
      saved = learner_store.newest_meta(self._store, self._welcome.learner_id)
      return dataclasses.replace(found, saved=self._own(saved))
    return self._restored() or self._fresh()

  # --- a donor -------------------------------------------------------------

  def _donated(self) -> Origin | None:
    """Asks one donor after the other; None when nobody is left."""
    unreached = 0
    while unreached < _UNREACHED:
      try:
        with self._take() as incoming:
          return received(incoming, self._specs)
      except (Refused, Unreachable) as error:
        reason = error.reason if isinstance(error, Refused) else ""
        if reason in ("no_donor", "protocol"):
          _LOG.info("%s", error)
          return None
        _LOG.warning("no optimizer state: %s; asking on", error)
        if reason not in _OF_ONE:
          unreached += 1
          time.sleep(_RETRY_S)
    return None

  # --- a checkpoint, or nothing --------------------------------------------

  def _restored(self) -> Origin | None:
    """The newest good checkpoint of this learner, if it is of this run."""
    snapshot = learner_store.restore_learner(
      self._store, self._welcome.learner_id, {"opt_state": self._specs}
    )
    if snapshot is None:
      return None
    for sentence in snapshot.skipped:
      _LOG.warning("%s", sentence)
    saved = self._own(snapshot.meta)
    if not saved:
      return None
    _LOG.info("optimizer state comes from %s", snapshot.path)
    return Origin(
      "checkpoint",
      snapshot.tree["opt_state"],
      saved.get("schedule_step"),
      saved=saved,
    )

  def _own(self, saved: dict[str, Any] | None) -> dict[str, Any]:
    """What was saved, unless it is of another run."""
    run_id = self._welcome.run_id
    if saved is None or saved.get("run_id", run_id) == run_id:
      return saved or {}
    _LOG.warning(
      "the checkpoint of learner %d is of run %s, not of %s: not used",
      *(self._welcome.learner_id, saved["run_id"], run_id),
    )
    return {}

  def _fresh(self) -> Origin:
    if self._welcome.has_history:
      _LOG.warning(
        "learner %d found no donor and has no checkpoint: it goes on with "
        "fresh optimizer moments",
        self._welcome.learner_id,
      )
    return Origin("fresh")


def received(incoming: states.Incoming, wanted: Any) -> Origin:
  """A donor's state, placed leaf after leaf as it comes.

  Args:
    incoming: from the donor.
    wanted: specs of the state, with shardings.

  Raises:
    Refused: it does not fit, is not finite, or came damaged.
  """
  header = incoming.header
  specs, structure = jax.tree.flatten(wanted)
  own = leaves_of(wanted)
  states.check_fit(header, own)
  placed = []
  arrays = incoming.arrays()
  for leaf, spec in zip(own, specs, strict=True):
    array = next(arrays)
    if not _finite(array):
      raise Refused(
        "not_finite",
        f"{leaf} of learner {header.donor} has values that are not finite",
      )
    faults.reached("donor.receiving")
    placed.append(jax.device_put(array, spec.sharding))
  next(arrays, None)  # nothing may follow
  return Origin(
    "donor",
    jax.tree.unflatten(structure, placed),
    header.schedule_step,
    header.donor,
  )


class FreshSearch:
  """Of a learner of several hosts, which begins with fresh moments.

  Its hosts would have to agree on a donor, or on a checkpoint.
  """

  def __init__(self, welcome: Welcome):
    if welcome.has_history:
      _LOG.warning(
        "learner %d has several hosts: it goes on with fresh optimizer moments",
        welcome.learner_id,
      )

  def done(self) -> bool:
    return True

  def result(self) -> Origin:
    return Origin("fresh")


class Found:
  """Nothing is searched for: the state is there.

  In this host's memory, or got before the claim from who is relieved.
  """

  def __init__(self, origin: Origin):
    self._origin = origin

  def done(self) -> bool:
    return True

  def result(self) -> Origin:
    return self._origin


def _finite(array: np.ndarray) -> bool:
  """Whether no value is infinite or NaN; true of integers."""
  if not jnp.issubdtype(array.dtype, np.inexact):
    return True
  return bool(np.isfinite(array).all())
