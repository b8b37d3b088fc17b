"""The log of a job of three learners, as fixtures."""

import pytest
from observe_logs import demo_events, write_log


@pytest.fixture(name="demo")
def demo_fixture():
  return demo_events()


@pytest.fixture(name="demo_workdir")
def demo_workdir_fixture(tmp_path, demo):
  write_log(tmp_path, demo)
  return tmp_path
