"""Where a syncer listens, as `host:port`, `[::1]:port` or `:port`."""

import dataclasses
import ipaddress
import os
import pathlib
import socket
import tempfile

from decoupled.errors import ConfigError

LOOPBACK = "127.0.0.1"
_FORMS = "write host:port, [ipv6]:port, or :port for this machine"


@dataclasses.dataclass(frozen=True)
class Address:
  """A TCP address.

  Attributes:
    host: name or IP address, without brackets.
    port: 0 to 65535; 0 asks for any free one.
  """

  host: str
  port: int

  def __str__(self) -> str:
    host = f"[{self.host}]" if ":" in self.host else self.host
    return f"{host}:{self.port}"

  @property
  def is_loopback(self) -> bool:
    """Whether only this machine can reach it."""
    if self.host == "localhost":
      return True
    try:
      return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
    except ValueError:
      return False

  @property
  def is_ip(self) -> bool:
    """Whether the host is an IP address rather than a name."""
    try:
      ipaddress.ip_address(self.host.partition("%")[0])
    except ValueError:
      return False
    return True


def parse(text: str) -> Address:
  """Reads an address.

  Args:
    text: `host:port`, `[ipv6]:port` or `:port` (loopback).

  Raises:
    ConfigError: saying which part is wrong.
  """
  text = text.strip()
  host, separator, port = text.rpartition(":")
  if not separator or port.endswith("]"):
    raise ConfigError(f"address {text!r} has no port: {_FORMS}")
  if not (port.isascii() and port.isdigit()) or int(port) > 65535:
    raise ConfigError(
      f"address {text!r}: port {port!r} is not a number from 0 to 65535"
    )
  return Address(_host(host, text), int(port))


def _host(host: str, text: str) -> str:
  if not host:
    return LOOPBACK
  if host.startswith("[") and host.endswith("]"):
    try:
      ipaddress.IPv6Address(host[1:-1])
    except ValueError:
      raise ConfigError(
        f"address {text!r}: {host} is not an IPv6 address in brackets"
      ) from None
    return host[1:-1]
  if ":" in host:
    raise ConfigError(
      f"address {text!r}: an IPv6 host goes in brackets, such as [::1]:4000"
    )
  if any(c.isspace() or c in "/[]@" for c in host):
    raise ConfigError(f"address {text!r}: {host!r} is not a host: {_FORMS}")
  return host


def reachable(address: Address) -> Address:
  """How others dial a syncer that listens there.

  One that listens at every address of its machine is dialled by the
  machine's name.
  """
  try:
    everywhere = ipaddress.ip_address(address.host).is_unspecified
  except ValueError:
    return address
  return Address(socket.gethostname(), address.port) if everywhere else address


def publish_address(path: str | os.PathLike[str], address: Address) -> None:
  """Writes the real address for others to find, in one atomic step."""
  target = pathlib.Path(path)
  handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
  with os.fdopen(handle, "w", encoding="utf-8") as file:
    file.write(f"{address}\n")
  os.chmod(name, 0o644)
  os.replace(name, target)


def published_address(path: str | os.PathLike[str]) -> Address | None:
  """The address that a syncer published, None if it has not yet."""
  try:
    return parse(pathlib.Path(path).read_text("utf-8"))
  except FileNotFoundError:
    return None
