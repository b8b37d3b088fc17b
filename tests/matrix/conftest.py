"""The matrix starts processes as the tests of whole jobs do."""

from tests.run.conftest import processes

__all__ = ["processes"]
