"""Errors that a person reads: one line, both sides, and what to do."""


class DecoupledError(Exception):
  """Any failure whose message is meant for the user, without a traceback."""


class ConfigError(DecoupledError):
  """The configuration is wrong or impossible; nothing has been started."""


class Refused(DecoupledError):
  """The syncer declined a call; training elsewhere goes on.

  Attributes:
    reason: a short stable word, the key under which refusals are counted.
  """

  def __init__(self, reason: str, message: str):
    super().__init__(message)
    self.reason = reason


class Unreachable(DecoupledError):
  """A peer did not answer within its limit; the message names it."""
