"""Merging a recording again, term by term, and comparing what comes out.

A term starts from version 0, or from the state at which an earlier term was
saved: then everything that this one had merged beyond it is a lost timeline.
Whatever is still in the store is compared bit for bit with the replayed state
at its versions; what has been dropped since, by its digests.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decoupled.algorithm import outer as outer_lib
from decoupled.algorithm.policy import exchange_of, outer_of
from decoupled.checkpoint import syncer_store
from decoupled.checkpoint.commit import Damaged, StorePath
from decoupled.checkpoint.syncer_store import GlobalSnapshot, Listed
from decoupled.errors import DecoupledError
from decoupled.syncer import recording, tape
from decoupled.syncer.model import GlobalFragment, GlobalModel
from decoupled.types import Arrays, Unit, Version


@dataclasses.dataclass
class Term:
  """One term of a recording, replayed.

  Attributes:
    term: its number.
    began: what it started from, in words.
    base: counted rounds that were in it then.
    counted: numbers of its counted rounds, in the order of merging.
    unwritten: counted rounds that the log has and the tape has not, since the
      syncer died before they were written.
    drained: rounds of the drain.
    lost: counted rounds that no later term started from.
    same: rounds of the snapshots that it agrees with.
  """

  term: int
  began: str = ""
  base: int = 0
  counted: list[int] = dataclasses.field(default_factory=list)
  unwritten: list[int] = dataclasses.field(default_factory=list)
  drained: int = 0
  lost: int = 0
  same: list[int] = dataclasses.field(default_factory=list)

  def line(self) -> str:
    """What is printed of it."""
    text = f"term {self.term}: from {self.began}, {len(self.counted)} rounds"
    if self.drained:
      text += f" and {self.drained} of the drain"
    if self.lost:
      text += f", {self.lost} of them lost"
    if self.unwritten:
      text += (
        f" (with {len(self.unwritten)} that were not on the tape yet when the "
        "syncer died)"
      )
    if self.same:
      text += "; the same bits as the snapshots of rounds " + ", ".join(
        map(str, sorted(self.same))
      )
    return text


@dataclasses.dataclass
class Replayed:
  """A whole recording, replayed.

  Attributes:
    terms: in order.
    notes: what is worth knowing and does no harm.
    problems: why the recording says nothing, or something else; none if it
      agrees.
    newest: the snapshot that it had to arrive at.
  """

  newest: Listed
  terms: list[Term] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)
  problems: list[str] = dataclasses.field(default_factory=list)


def replay(
  folder: Path, store: StorePath, closed: Mapping[int, Sequence[int]]
) -> Replayed:
  """Merges a recording again.

  Args:
    folder: of the recording.
    store: folder or URL of the run's checkpoints.
    closed: per term the counted rounds that the log knows of, in order.

  Raises:
    DecoupledError: there is no recording, or nothing to compare it with.
  """
  snapshots = syncer_store.listed(store)
  if not snapshots:
    raise DecoupledError(
      f"nothing to compare with: no snapshot lies under {store}; was it the "
      "--store of the run?"
    )
  files = tape.files(folder)
  if not files:
    raise DecoupledError(
      f"nothing was recorded in {folder}: run the job with --tape"
    )
  work = _Replay(files, snapshots)
  for term in files:
    work.term(term, closed.get(term, ()))
  return work.finish()


class _Replay:
  """The state of a replay."""

  def __init__(
    self, files: Mapping[int, dict[str, Path]], snapshots: Sequence[Listed]
  ):
    newest = snapshots[0]
    try:
      first = syncer_store.read(newest.path)
    except Damaged as error:
      raise DecoupledError(f"nothing to compare with: {error}") from None
    contract = dict(first.contract)
    self._files = files
    self._snapshots = [s for s in snapshots if s.run_id == newest.run_id]
    self._outer = outer_of(contract)
    self._model = GlobalModel(
      first.manifest, exchange_of(contract), self._outer
    )
    self._done = Replayed(newest)
    self._compared: set[Listed] = set()
    self._starts = {term: self._start(term) for term in files}
    # fragments at the versions that something starts from or was saved at
    self._wanted = {
      (p, version)
      for versions in (
        *(s.versions for s in self._snapshots),
        *(_versions(start) for start, _ in self._starts.values()),
      )
      for p, version in enumerate(versions)
    }
    self._held: dict[tuple[int, Version], GlobalFragment] = {}

  def finish(self) -> Replayed:
    done = self._done
    if done.newest not in self._compared:
      done.problems.append(
        f"the recording does not reach {done.newest.path}, of term "
        f"{done.newest.term} and round {done.newest.rounds}: {self._why()}"
      )
    return done

  def _why(self) -> str:
    """Why the newest snapshot was not reached, as far as files can tell."""
    newest = self._files.get(self._done.newest.term)
    if newest is None:
      return f"term {self._done.newest.term} was not recorded (no --tape)"
    end = newest.get("end")
    said = tape.read_end(end) if end is not None else ""
    return said or "what came last is missing"

  # --- one term ---------------------------------------------------------------

  def term(self, number: int, closed: Sequence[int]) -> None:
    """Replays one term, and says what came of it."""
    start, arrays = self._starts[number]
    run_id = start.get("run_id", self._done.newest.run_id)
    if run_id != self._done.newest.run_id:
      self._done.notes.append(f"term {number} is of run {run_id}: passed over")
      return
    done = Term(number)
    if not self._begin(done, start, arrays):
      return
    self._done.terms.append(done)
    self._merge(done)
    known = set(done.counted)
    done.unwritten = [r for r in closed if r not in known]
    after = closed[closed.index(done.unwritten[0]) :] if done.unwritten else ()
    if any(r in known for r in after):
      self._done.problems.append(
        f"round {done.unwritten[0]} of term {number} is in the log, but not on "
        "the tape, and later ones are on it"
      )
    for snapshot in self._snapshots:
      if snapshot.term == number:
        self._compare(done, snapshot)

  def _start(self, term: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    path = self._files[term].get("start")
    if path is None:
      return {}, {}
    try:
      return tape.read(path)
    except ValueError as error:
      self._done.problems.append(str(error))
      return {}, {}

  def _begin(
    self,
    done: Term,
    start: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
  ) -> bool:
    """Puts the model where the term began; False where that is not known."""
    if not start:
      if any(name.isdigit() for name in self._files[done.term]):
        self._done.problems.append(
          f"what term {done.term} began from is not on the tape"
        )
      return False
    done.base = start["rounds"]
    restored = start["restored"]
    self._lose(done.term, restored)
    if restored is None:
      done.began = "version 0"
      for p in range(len(self._model.fragments)):
        parameters, _ = recording.state_from(arrays, p)
        self._model.start(p, Version(done.term, 0), parameters, 0)
        self._keep(p)
      return True
    done.began = f"round {restored['rounds']} of term {restored['term']}"
    return self._go_on(done, restored, arrays)

  def _go_on(
    self,
    done: Term,
    restored: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
  ) -> bool:
    """Starts a term from what an earlier one had saved."""
    states = [
      self._state(p, Version(*version), restored, arrays)
      for p, version in enumerate(restored["versions"])
    ]
    for p, state in enumerate(states):
      if state is None:
        self._done.problems.append(
          f"term {done.term} began from {restored['path']}, which the "
          f"recording does not reach (fragment {p} at version "
          f"{tuple(restored['versions'][p])})"
        )
        return False
      parameters, outer = state
      found = [recording.digest(parameters), recording.digest(outer)]
      for what, ours, theirs in zip(
        ("parameters", "outer state"),
        found,
        restored["digests"][p],
        strict=True,
      ):
        if ours != theirs:
          self._done.problems.append(
            f"{done.began}: the {what} of fragment {p} are not those that "
            f"term {done.term} began from"
          )
      self._model.start(
        p,
        Version(done.term, done.base),
        parameters,
        0,
        outer_lib.state_from_arrays(self._outer, outer),
        restored=True,
      )
      self._keep(p)
    return True

  def _state(
    self,
    p: int,
    version: Version,
    restored: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
  ) -> tuple[Arrays, Arrays] | None:
    """A fragment at a version: replayed, or kept because nobody could."""
    held = self._held.get((p, version))
    if held is not None:
      return held.arrays, outer_lib.state_arrays(held.outer_state)
    if arrays:  # the earlier term was not recorded
      return recording.state_from(arrays, p)
    return None

  def _merge(self, done: Term) -> None:
    """Every recorded round of a term, in order."""
    names = sorted(n for n in self._files[done.term] if n.isdigit())
    for i, name in enumerate(names):
      path = self._files[done.term][name]
      if int(name) != i:
        self._done.problems.append(
          f"{i:09d} is missing before {path}: term {done.term} is replayed up "
          "to there"
        )
        return
      try:
        self._merge_one(done, path)
      except ValueError as error:
        last = i + 1 == len(names) and done.term < max(self._files)
        # what a dying syncer wrote last is of a lost timeline
        (self._done.notes if last else self._done.problems).append(str(error))
        return

  def _merge_one(self, done: Term, path: Path) -> None:
    header, arrays = tape.read(path)
    fragment, version = header["fragment"], Version(*header["version"])
    contributions = tape.contributions(header, arrays)
    stands = self._model.get(fragment).version
    for c in contributions:
      if c.header.base != stands:
        raise ValueError(
          f"{path} was merged into {tuple(c.header.base)}, but fragment "
          f"{fragment} stands at {tuple(stands)}"
        )
    successor = self._model.merged(
      fragment,
      version,
      contributions,
      header["weights"],
      header["rate_scale"],
      header["common_step"],
      restored=header["restored"],
    )
    self._model.commit(fragment, successor)
    self._keep(fragment)
    if header["restored"]:
      done.drained += 1
    else:
      done.counted.append(version.round)

  def _keep(self, p: int) -> None:
    fragment = self._model.get(p)
    if (p, fragment.version) in self._wanted:
      self._held[(p, fragment.version)] = fragment

  # --- what is lost, and what agrees ------------------------------------------

  def _lose(self, term: int, restored: Mapping[str, Any] | None) -> None:
    """Counts what a term had to do again."""
    kept = 0 if restored is None else restored["term"]
    for before in self._done.terms:
      closed = len(before.counted) + len(before.unwritten)
      if kept < before.term < term:
        before.lost = closed
      elif restored is not None and before.term == kept:
        beyond = before.base + closed - restored["rounds"]
        before.lost = max(before.lost, beyond)

  def _compare(self, done: Term, saved: Listed) -> None:
    held = [self._held.get((p, v)) for p, v in enumerate(saved.versions)]
    fragments = [fragment for fragment in held if fragment is not None]
    if len(fragments) < len(held):
      return  # `finish` says so, if it is the newest
    try:
      snapshot = syncer_store.read(saved.path)
    except Damaged as error:
      self._done.notes.append(f"not compared: {error}")
      return
    self._compared.add(saved)
    different = differences(fragments, snapshot)
    if different:
      self._done.problems.append(
        f"{saved.path} differs: {different[0]}"
        + (f" (and {len(different) - 1} more)" if different[1:] else "")
      )
    else:
      done.same.append(saved.rounds)


def differences(
  replayed: Sequence[GlobalFragment], saved: GlobalSnapshot
) -> list[str]:
  """Where the bits differ, a sentence each: fragment, tensor, by how much."""
  found = []
  for p, fragment in enumerate(replayed):
    units = saved.manifest.fragments[p]
    outer = outer_lib.state_arrays(fragment.outer_state)
    pairs = [
      *_named("parameters of ", map(_spelt, units), fragment.arrays,
              saved.fragments[p]),
      *_named("outer state ", map(str, range(len(outer))), outer,
              saved.outer[p]),
    ]  # fmt: skip
    found += [
      f"fragment {p}, {name}: {_by(ours, theirs)}"
      for name, ours, theirs in pairs
      if ours.dtype != theirs.dtype
      or ours.shape != theirs.shape
      or ours.tobytes() != theirs.tobytes()
    ]
  return found


def _named(
  what: str, names: Iterable[str], ours: Arrays, theirs: Arrays
) -> list[tuple[str, np.ndarray, np.ndarray]]:
  return [
    (f"{what}{name}", np.asarray(a), np.asarray(b))
    for name, a, b in zip(names, ours, theirs, strict=True)
  ]


def _spelt(unit: Unit) -> str:
  return unit.tensor if unit.layer is None else f"{unit.tensor}[{unit.layer}]"


def _by(ours: np.ndarray, theirs: np.ndarray) -> str:
  if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
    return (
      f"{ours.dtype}{list(ours.shape)} replayed, "
      f"{theirs.dtype}{list(theirs.shape)} saved"
    )
  apart = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
  count = int(np.count_nonzero(~(apart == 0)))
  return f"{count} of {apart.size} elements by up to {np.nanmax(apart):.3g}"


def _versions(start: Mapping[str, Any]) -> list[Version]:
  restored = start.get("restored")
  return [Version(*v) for v in restored["versions"]] if restored else []
