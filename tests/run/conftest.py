"""What tests of real processes share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.processes import Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
  """Starts processes; whatever still runs at the end is killed."""
  started = Processes(tmp_path)
  yield started
  started.close()
