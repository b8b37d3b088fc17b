"""The run token's file, and where it may travel."""

import os
import stat

import pytest

from decoupled.errors import ConfigError
from decoupled.wire import credentials
from decoupled.wire.address import Address

TOKEN = "0123456789abcdef"


def test_a_token_is_made_for_its_owner_only(tmp_path):
  path = tmp_path / "token"
  before = os.umask(0)
  try:
    token = credentials.make_token(path)
  finally:
    os.umask(before)
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  assert credentials.read_token(path) == token
  assert len(token) >= 32
  assert credentials.make_token(tmp_path / "other") != token


def test_a_token_file_is_never_overwritten(tmp_path):
  path = tmp_path / "token"
  token = credentials.make_token(path)
  with pytest.raises(ConfigError, match="File exists"):
    credentials.make_token(path)
  assert credentials.read_token(path) == token


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622, 0o644])
def test_a_file_that_others_can_use_is_refused(tmp_path, mode):
  path = tmp_path / "token"
  credentials.make_token(path)
  path.chmod(mode)
  with pytest.raises(ConfigError, match=f"{mode:04o}.*chmod 600"):
    credentials.read_token(path)


@pytest.mark.parametrize(
  "text",
  ["", "short", "two words in a token", "a\nsecond-line-of-text", "ü" * 20,
   "x" * 2000],
)  # fmt: skip
def test_what_is_no_token_is_refused(tmp_path, text):
  path = tmp_path / "token"
  path.touch(0o600)
  path.write_text(text, "utf-8")
  with pytest.raises(ConfigError, match="no run token") as caught:
    credentials.read_token(path)
  assert not text or text not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(ConfigError, match="nowhere"):
    credentials.read_token(tmp_path / "nowhere")


@pytest.mark.parametrize("host", ["10.0.0.1", "node7", "0.0.0.0", "::"])
def test_no_token_in_plain_text_beyond_this_machine(host):
  with pytest.raises(ConfigError, match="plain text") as caught:
    credentials.channel(Address(host, 1), TOKEN)
  assert TOKEN not in str(caught.value)


def test_every_address_has_a_name_in_grpc():
  assert credentials.target(Address("127.0.0.1", 1)) == "ipv4:127.0.0.1:1"
  assert credentials.target(Address("::1", 1)) == "ipv6:[::1]:1"
  assert credentials.target(Address("node7", 1)) == "dns:///node7:1"
