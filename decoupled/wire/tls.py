"""TLS of the channels: PEM files in, gRPC's credentials out, faults in words.

gRPC tries again for as long as it may when a certificate does not verify, and
keeps the reason to itself. `fault` finds it out with a handshake of its own.
"""

import contextlib
import dataclasses
import functools
import os
import socket
import ssl
import stat
from pathlib import Path

import grpc

from decoupled.errors import ConfigError
from decoupled.wire.address import Address

_HANDSHAKE_S = 1.0
_MAKE = "make certificates with `decoupled certs --out DIR`"

# Of OpenSSL, as in `SSLCertVerificationError.verify_code`.
_NOT_YET, _EXPIRED, _OTHER_NAME, _OTHER_IP = 9, 10, 62, 64
# What OpenSSL makes of an answer that is no TLS.
_PLAIN = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")


@dataclasses.dataclass(frozen=True)
class ClientTls:
  """Whom a client believes.

  Attributes:
    path: of the certificate authority's file, for messages.
    authority: its content, PEM.
  """

  path: str
  authority: str = dataclasses.field(repr=False)

  @functools.cached_property
  def credentials(self) -> grpc.ChannelCredentials:
    """Of a channel to a server that this authority vouches for."""
    return grpc.ssl_channel_credentials(self.authority.encode())


def client(path: str | os.PathLike[str]) -> ClientTls:
  """Reads the certificate authority of a run (`--tls_ca`).

  Raises:
    ConfigError: missing, or no certificate.
  """
  text = _read(path, "--tls_ca")
  made = ClientTls(str(path), text)
  try:
    _context(made)
  except (ssl.SSLError, ValueError):
    raise ConfigError(
      f"--tls_ca: {path} holds no certificate: give the ca.pem that "
      "`decoupled certs` made for this run's syncer"
    ) from None
  return made


def server(
  certificate: str | os.PathLike[str], key: str | os.PathLike[str]
) -> grpc.ServerCredentials:
  """Reads the certificate and the key of a syncer.

  Raises:
    ConfigError: missing, readable by others, not a pair, or out of date.
  """
  chain = _read(certificate, "--tls_cert")
  secret = _read(key, "--tls_key", private=True)
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  try:
    context.load_cert_chain(certificate, key, password=lambda: "")
  except (ssl.SSLError, ValueError) as error:
    what = getattr(error, "reason", "") or "they are no PEM files"
    raise ConfigError(
      f"--tls_cert={certificate} and --tls_key={key} do not belong together "
      f"({str(what).replace('_', ' ').lower()}): {_MAKE}"
    ) from None
  _check_dates(context, chain, certificate)
  return grpc.ssl_server_credentials([(secret.encode(), chain.encode())])


def fault(address: Address, tls: ClientTls | None) -> str:
  """What keeps TLS from working at an address, in a sentence with a remedy.

  Args:
    address: of the syncer.
    tls: what the client was given, None for plain text.

  Returns:
    "" where nothing is wrong, or nobody answers within a second.
  """
  if tls is None:
    return _spoken_in_secret(address)
  try:
    _shake_hands(address, _context(tls))
  except ssl.SSLCertVerificationError as error:
    return _verdict(address, tls, error)
  except ssl.SSLError as error:
    if error.reason in _PLAIN:
      return (
        f"what listens at {address} does not speak TLS: start that syncer "
        "with --tls_cert and --tls_key, or leave --tls_ca out"
      )
  except OSError:
    pass  # nobody there (yet): not a fault of TLS
  return ""


def _spoken_in_secret(address: Address) -> str:
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  context.check_hostname = False
  context.verify_mode = ssl.CERT_NONE  # nothing is sent: only whether it works
  with contextlib.suppress(OSError):
    _shake_hands(address, context)
    return (
      f"the syncer at {address} speaks TLS only: name the ca.pem of its run "
      "with --tls_ca"
    )
  return ""


def _verdict(
  address: Address, tls: ClientTls, error: ssl.SSLCertVerificationError
) -> str:
  said = f"the certificate of the syncer at {address} "
  code = error.verify_code
  if code == _EXPIRED:
    return f"{said}has expired: {_MAKE}, and start the syncer with them"
  if code == _NOT_YET:
    return f"{said}is not valid yet: check the clocks of both machines"
  if code in (_OTHER_NAME, _OTHER_IP):
    return (
      f"{said}is not made out to {address.host}: dial one of the names it is "
      f"made out to, or {_MAKE} --hosts {address.host}"
    )
  return (
    f"{said}is not signed by {tls.path} ({error.verify_message}): use the "
    "ca.pem that was made together with it"
  )


def _shake_hands(address: Address, context: ssl.SSLContext) -> None:
  context.set_alpn_protocols(["h2"])
  host = address.host
  with socket.create_connection((host, address.port), _HANDSHAKE_S) as raw:
    name = host.partition("%")[0]
    with context.wrap_socket(raw, server_hostname=name):
      return


def _context(tls: ClientTls) -> ssl.SSLContext:
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  context.load_verify_locations(cadata=tls.authority)
  return context


def _check_dates(
  served: ssl.SSLContext, chain: str, path: str | os.PathLike[str]
) -> None:
  """Raises ConfigError for a certificate that no client could accept now.

  The two ends of one handshake in memory: a client that trusts exactly this
  certificate still objects to its dates.
  """
  believing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  believing.check_hostname = False
  believing.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
  believing.load_verify_locations(cadata=chain)
  here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
  ends = (
    believing.wrap_bio(here, there),
    served.wrap_bio(there, here, server_side=True),
  )
  try:
    for _ in range(4):
      for end in ends:
        with contextlib.suppress(ssl.SSLWantReadError):
          end.do_handshake()
  except ssl.SSLCertVerificationError as error:
    when = {_EXPIRED: "has expired", _NOT_YET: "is not valid yet"}
    what = when.get(error.verify_code, f"is no good ({error.verify_message})")
    raise ConfigError(f"--tls_cert: {path} {what}: {_MAKE}") from None


def _read(
  path: str | os.PathLike[str], flag: str, private: bool = False
) -> str:
  try:
    with Path(path).open("rb") as file:
      mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
      text = file.read(1 << 20).decode("ascii", "replace")
  except OSError as error:
    raise ConfigError(
      f"{flag}: {path} cannot be read: {error.strerror}"
    ) from None
  if private and mode & 0o077:
    raise ConfigError(
      f"{flag}: {path} has mode {mode:04o}, so that others can use it: chmod "
      f"600 {path}"
    )
  return text
