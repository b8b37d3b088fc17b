"""A copy of the optimizer's state that outlives the step that donates it.

Saving it and giving it to a joiner both take a while, beside the loop. There is
never more than one copy: who needs one while another is in use shares that
one, some steps older, rather than the memory of a second.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from decoupled.learner.loop import Trained

Copier: TypeAlias = Callable[[Any], Any]


def compile_copy(specs: Any) -> Copier:
  """A copy on the devices, compiled ahead: a loop must not wait for that."""
  copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
  compiled: Copier = copy.lower(specs).compile()
  return compiled


@dataclasses.dataclass(eq=False)
class StateCopy:
  """The optimizer's state at one boundary, and what was true there.

  Attributes:
    state: the tree, on the devices.
    step: inner steps of this process.
    tokens: tokens of this process.
    schedule_step: step of the learning-rate schedule.
    position: data position.
    loss: last training loss read.
    users: who works with it.
  """

  state: Any
  step: int
  tokens: int
  schedule_step: int
  position: tuple[int, int]
  loss: float
  users: set[object] = dataclasses.field(default_factory=set)


def uncopied(now: Trained) -> StateCopy:
  """The state itself, for where no step will follow while it is used."""
  return _of(now, now.state.opt_state)


class Copies:
  """Hands out the one copy there is.

  The loop's thread takes, the users' threads release; neither waits.

  Args:
    copy: from `compile_copy`.
  """

  def __init__(self, copy: Copier):
    self._copy = copy
    self._held: StateCopy | None = None

  def take(self, now: Trained, user: object) -> StateCopy:
    """A copy of the state at this boundary, or the one that is in use."""
    held = self._held
    if held is None or not held.users:
      held = _of(now, self._copy(now.state.opt_state))
    held.users.add(user)
    self._held = held
    return held

  def release(self, copy: StateCopy, user: object) -> None:
    """That user is done; the last one frees the memory."""
    copy.users.discard(user)
    if not copy.users and self._held is copy:
      self._held = None


def _of(now: Trained, state: Any) -> StateCopy:
  return StateCopy(
    state=state,
    step=now.step,
    tokens=now.tokens,
    schedule_step=now.schedule_step,
    position=now.position,
    loss=now.loss,
  )
