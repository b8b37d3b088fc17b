"""Addresses: forms, faults named, publication."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled.errors import ConfigError
from decoupled.wire import address
from decoupled.wire.address import Address


@pytest.mark.parametrize(
  ("text", "host", "port"),
  [
    ("node7:4000", "node7", 4000),
    ("127.0.0.1:0", "127.0.0.1", 0),
    ("[::1]:4000", "::1", 4000),
    ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
    (":4000", "127.0.0.1", 4000),
    (" a.b:65535\n", "a.b", 65535),
  ],
)
def test_forms(text, host, port):
  parsed = address.parse(text)
  assert parsed == Address(host, port)
  assert address.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
  ("text", "says"),
  [
    ("node7", "no port"),
    ("", "no port"),
    ("[::1]", "no port"),
    ("::1:4000", "in brackets"),
    ("node7:70000", "'70000'"),
    ("node7:-1", "'-1'"),
    ("node7:x", "'x'"),
    ("node7:", "port ''"),
    ("node7:٤", "not a number"),
    ("[nonsense]:1", "not an IPv6 address"),
    ("http://node7:1", "in brackets"),
    ("a b:1", "not a host"),
    ("x/y:1", "not a host"),
  ],
)
def test_faults_are_named_in_one_line(text, says):
  with pytest.raises(ConfigError) as caught:
    address.parse(text)
  assert says in str(caught.value)
  assert "\n" not in str(caught.value)


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_ip_address_survives_a_round_trip(ip, port):
  one = Address(str(ip), port)
  assert address.parse(str(one)) == one
  assert one.is_ip


@pytest.mark.parametrize(
  ("host", "expected"),
  [
    ("127.0.0.1", True),
    ("127.8.9.1", True),
    ("::1", True),
    ("localhost", True),
    ("0.0.0.0", False),
    ("::", False),
    ("10.0.0.1", False),
    ("127.0.0.1.example.org", False),
    ("localhost.example.org", False),
    ("node7", False),
  ],
)
def test_loopback(host, expected):
  assert Address(host, 1).is_loopback is expected


def test_publication_is_atomic_and_leaves_nothing_else(tmp_path):
  path = tmp_path / "syncer.address"
  assert address.published_address(path) is None
  address.publish_address(path, Address("::1", 4000))
  assert path.read_text() == "[::1]:4000\n"
  address.publish_address(path, Address("127.0.0.1", 1))
  assert address.published_address(path) == Address("127.0.0.1", 1)
  assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_who_listens_everywhere_is_dialled_by_name(host):
  found = address.reachable(Address(host, 7077))
  assert found == Address(socket.gethostname(), 7077)


def test_any_other_address_is_dialled_as_it_is():
  for host in ("127.0.0.1", "::1", "node7", "10.0.0.1"):
    assert address.reachable(Address(host, 1)) == Address(host, 1)
