"""The run token, and the channels and servers that insist on it.

Everybody who may change a run holds its token: a random secret in a file that
only its owner can read, sent as metadata on every call. Plain text is for
this machine only; beyond loopback a caller brings TLS credentials of gRPC's
own (`tls=`), here as at the server.
"""

import hmac
import os
import pathlib
import secrets
import stat
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from decoupled.errors import ConfigError
from decoupled.wire.address import Address

CHUNK_BYTES = 512 * 1024
# Chunks are the largest thing on the bulk connection, the specs of a big
# model's tensors (in Hello and Welcome) the largest on the other.
MESSAGE_BYTES = 4 * 1024 * 1024
MAX_TOKEN_BYTES = 1024

_HEADER = "authorization"
_SCHEME = "Bearer "

SIZE_OPTIONS: tuple[tuple[str, int], ...] = (
  ("grpc.max_receive_message_length", MESSAGE_BYTES),
  ("grpc.max_send_message_length", MESSAGE_BYTES),
  # A slow reader is to fill its own window, not the sender's memory.
  ("grpc.http2.bdp_probe", 0),
)
CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
  *SIZE_OPTIONS,
  # Each channel has connections of its own: bulk cannot starve control.
  ("grpc.use_local_subchannel_pool", 1),
  ("grpc.enable_http_proxy", 0),
  ("grpc.enable_retries", 0),
  ("grpc.initial_reconnect_backoff_ms", 100),
  ("grpc.min_reconnect_backoff_ms", 1000),
  ("grpc.max_reconnect_backoff_ms", 1000),
  # A network that swallows packets, or a syncer that is stopped, is noticed
  # within the sum of these; the second is a minute unless said otherwise.
  ("grpc.keepalive_time_ms", 5000),
  ("grpc.http2.ping_timeout_ms", 5000),
  ("grpc.keepalive_timeout_ms", 5000),
  ("grpc.keepalive_permit_without_calls", 1),
  ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
  *SIZE_OPTIONS,
  # Two syncers on one port would each get some of the learners.
  ("grpc.so_reuseport", 0),
  # The clients' pings are asked for: no connection is cut for them, however
  # long a learner has nothing to send.
  ("grpc.http2.min_ping_interval_without_data_ms", 1000),
  ("grpc.http2.max_ping_strikes", 0),
  ("grpc.keepalive_permit_without_calls", 1),
)
# One fragment is in flight at a time and it is large: a wide window.
BULK_OPTIONS: tuple[tuple[str, int], ...] = (
  ("grpc.http2.lookahead_bytes", 4 * 1024 * 1024),
)


def make_token(path: str | os.PathLike[str]) -> str:
  """Makes a token and writes it where only its owner can read it.

  Raises:
    ConfigError: the file exists, or cannot be written.
  """
  token = secrets.token_urlsafe(32)
  flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
  try:
    handle = os.open(path, flags, 0o600)
  except OSError as error:
    raise ConfigError(
      f"token file {path} cannot be made: {error.strerror}"
    ) from None
  with os.fdopen(handle, "w", encoding="ascii") as file:
    os.fchmod(file.fileno(), 0o600)
    file.write(f"{token}\n")
  return token


def read_token(path: str | os.PathLike[str]) -> str:
  """Reads a run token.

  Raises:
    ConfigError: missing, readable by others, or not a token.
  """
  try:
    with pathlib.Path(path).open("rb") as file:
      mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
      text = file.read(MAX_TOKEN_BYTES + 1).strip()
  except OSError as error:
    raise ConfigError(
      f"token file {path} cannot be read: {error.strerror}"
    ) from None
  if mode & 0o077:
    raise ConfigError(
      f"token file {path} has mode {mode:04o}, so that others can use it: "
      f"chmod 600 {path}"
    )
  return _checked(text.decode("ascii", "replace"), f"token file {path}")


def _checked(token: str, where: str) -> str:
  if not token:
    raise ConfigError(f"{where} holds no run token: give one with --token_file")
  usable = token.isascii() and token.isprintable() and " " not in token
  if not (usable and 16 <= len(token) <= MAX_TOKEN_BYTES):
    raise ConfigError(
      f"{where} holds no run token: 16 to {MAX_TOKEN_BYTES} printable "
      "characters in one line are expected"
    )
  return token


def metadata(token: str) -> tuple[tuple[str, str], ...]:
  """What a client sends with every call."""
  return ((_HEADER, _SCHEME + token),)


def channel(
  address: Address,
  token: str,
  tls: grpc.ChannelCredentials | None = None,
  bulk: bool = False,
) -> grpc.Channel:
  """A channel over TCP connections that no other channel uses.

  Args:
    address: of the syncer.
    token: that its calls will carry (see `metadata`).
    tls: credentials of the channel, None for plain text.
    bulk: whether fragments will travel on it.

  Raises:
    ConfigError: the token would travel in plain text beyond this machine.
  """
  options = CLIENT_OPTIONS + (BULK_OPTIONS if bulk else ())
  if tls is not None:
    return grpc.secure_channel(target(address), tls, options)
  if token and not address.is_loopback:
    raise ConfigError(
      f"the run token may not go to {address} in plain text: use TLS, or an "
      "address of this machine (127.0.0.1, [::1], or a tunnel's end)"
    )
  return grpc.insecure_channel(target(address), options)


def target(address: Address) -> str:
  """The address in gRPC's words."""
  if not address.is_ip:
    return f"dns:///{address}"
  scheme = "ipv6" if ":" in address.host else "ipv4"
  return f"{scheme}:{str(address).replace('%', '%25')}"


def server(
  token: str, max_calls: int, options: tuple[tuple[str, int], ...] = ()
) -> grpc.aio.Server:
  """A server that answers only calls which carry the token."""
  return grpc.aio.server(
    interceptors=[TokenCheck(token)],
    options=SERVER_OPTIONS + BULK_OPTIONS + options,
    maximum_concurrent_rpcs=max_calls,
  )


def add_port(
  to: grpc.aio.Server, address: Address, tls: grpc.ServerCredentials | None
) -> int:
  """Lets a server listen, in plain text without `tls`; returns the port."""
  if tls is not None:
    return to.add_secure_port(str(address), tls)
  return to.add_insecure_port(str(address))


_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
  """Answers UNAUTHENTICATED to every call without the run's token."""

  def __init__(self, token: str):
    self._expected = (_SCHEME + _checked(token, "this syncer")).encode()

  async def intercept_service(
    self,
    continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
    handler_call_details: grpc.HandlerCallDetails,
  ) -> _Handler:
    if self._accepts(handler_call_details):
      return await continuation(handler_call_details)
    # One that streams both ways reads nothing before it refuses, and looks
    # the same to a caller of any kind.
    return grpc.stream_stream_rpc_method_handler(_deny)

  def _accepts(self, details: grpc.HandlerCallDetails) -> bool:
    offered = [
      value if isinstance(value, bytes) else value.encode()
      for key, value in details.invocation_metadata or ()
      if key == _HEADER
    ]
    if len(offered) != 1:
      return False
    return hmac.compare_digest(offered[0], self._expected)


async def _deny(
  _: object, context: grpc.aio.ServicerContext[bytes, bytes]
) -> None:
  await context.abort(
    grpc.StatusCode.UNAUTHENTICATED, "the run token is missing or wrong"
  )
