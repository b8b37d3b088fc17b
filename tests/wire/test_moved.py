"""A syncer that takes over listens elsewhere, and is found there."""

import socket
import time

import pytest

from decoupled.errors import Unreachable
from decoupled.launch import address as address_lib
from decoupled.wire.address import Address, publish_address
from decoupled.wire.client import GrpcLearnerWire
from tests.wire import fakes
from tests.wire.fakes import TOKEN, Server, wait_until


@pytest.fixture(params=["nobody", "a stopped process"])
def gone(request):
  """An address where nobody answers any more."""
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    if request.param != "nobody":
      taken.listen()  # the kernel accepts, and that is all
    yield Address(*taken.getsockname())


def test_the_address_is_read_again_while_hello_waits(tmp_path, gone):
  """A dead syncer's address may still be published when a learner returns."""
  path = tmp_path / "syncer.address"
  publish_address(path, gone)
  looks = []

  with Server() as server:

    def moved():
      looks.append(time.monotonic())
      if len(looks) == 6:
        publish_address(path, server.address)
      return address_lib.published(f"@{path}")

    wire = GrpcLearnerWire(gone, TOKEN, connect_s=fakes.LIMIT_S, moved=moved)
    try:
      assert wire.hello(fakes.hello()).incarnation == 1
      assert wire.peer == str(server.address)
      told = []
      wire.listen(told.append, told.append)
      wait_until(lambda: bool(told), "the first announcement")
      assert len(wire._channels) == 2
    finally:
      wire.close()


def test_an_address_that_stays_is_named_when_nobody_answers(tmp_path, gone):
  path = tmp_path / "syncer.address"
  publish_address(path, gone)
  wire = GrpcLearnerWire(
    gone, TOKEN, connect_s=0.6, moved=lambda: address_lib.published(f"@{path}")
  )
  try:
    with pytest.raises(Unreachable, match=str(gone)):
      wire.hello(fakes.hello())
  finally:
    wire.close()


def test_what_is_published_may_be_missing_or_torn(tmp_path):
  path = tmp_path / "syncer.address"
  assert address_lib.published(f"@{path}") is None
  path.write_text("127.0.0")
  assert address_lib.published(f"@{path}") is None
  assert address_lib.published("127.0.0.1:5") is None
