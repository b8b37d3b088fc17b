"""`decoupled certs`: a small certificate authority, and one for a syncer.

Whoever has `ca.pem` believes the syncer that shows `server.pem`; learners
prove themselves with the run token. Made anew for every run or site, never
shipped, never overwritten.
"""

import datetime
import importlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decoupled.errors import ConfigError, DecoupledError
from decoupled.launch.options import CertsOptions

AUTHORITY, AUTHORITY_KEY = "ca.pem", "ca.key"
SERVER, SERVER_KEY = "server.pem", "server.key"
_FILES = (AUTHORITY, AUTHORITY_KEY, SERVER, SERVER_KEY)
_CLOCK_SKEW = datetime.timedelta(hours=1)
_MAX_DAYS = 36500


def main(options: CertsOptions) -> int:
  """Makes the files and says what goes where.

  Raises:
    ConfigError: a file is there already, or a host is no name and no address.
    DecoupledError: the package that makes them is missing, or the disk fails.
  """
  hosts = options.hosts or own_names()
  make(options.out, hosts, options.days)
  print("\n".join(_advice(options.out, hosts, options.days)))
  return 0


def make(out: Path, hosts: Sequence[str], days: int) -> None:
  """Writes the four files; raises as `main` does.

  Args:
    out: folder; is made.
    hosts: names and IP addresses by which learners dial the syncer.
    days: how long they are good for.
  """
  if not 1 <= days <= _MAX_DAYS:
    raise ConfigError(f"--days={days} must be from 1 to {_MAX_DAYS}")
  there = [out / name for name in _FILES if (out / name).exists()]
  if there:
    raise ConfigError(
      f"{there[0]} exists, and is not overwritten: choose another --out, or "
      "remove the files of that folder first"
    )
  texts = _texts(list(dict.fromkeys(hosts)), days)
  try:
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in _FILES:
      _write(out / name, texts[name])
  except OSError as error:
    raise DecoupledError(
      f"the certificates cannot be written to {out}: {error.strerror}"
    ) from None


def own_names() -> tuple[str, ...]:
  """What this machine is dialled by: itself, its name, its full name."""
  names = ("localhost", "127.0.0.1", "::1", socket.gethostname())
  return tuple(dict.fromkeys((*names, socket.getfqdn())))


def _advice(out: Path, hosts: Sequence[str], days: int) -> list[str]:
  return [
    f"made for {', '.join(hosts)}; good for {days} days",
    f"  {out / SERVER}, {out / SERVER_KEY}: to the syncer's machine only",
    f"    decoupled syncer --tls_cert {out / SERVER} --tls_key "
    f"{out / SERVER_KEY}",
    f"  {out / AUTHORITY}: to every machine that joins; it is no secret",
    f"    decoupled learner --tls_ca {AUTHORITY}",
    f"  {out / AUTHORITY_KEY}: stays here, or goes; only whoever makes further "
    "certificates needs it",
  ]


def _write(path: Path, content: bytes) -> None:
  mode = 0o600 if path.suffix == ".key" else 0o644
  flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
  with os.fdopen(os.open(path, flags, mode), "wb") as file:
    file.write(content)


def _library(name: str) -> Any:
  try:
    return importlib.import_module(f"cryptography.{name}")
  except ImportError:
    raise DecoupledError(
      "`decoupled certs` needs the package cryptography: pip install "
      "'decoupled-diloco[certs]' (or bring certificates of your own: PEM "
      "files for --tls_cert, --tls_key and --tls_ca)"
    ) from None


def _texts(hosts: Sequence[str], days: int) -> dict[str, bytes]:
  """The content of each file."""
  x509 = _library("x509")
  ec = _library("hazmat.primitives.asymmetric.ec")
  serialization = _library("hazmat.primitives.serialization")
  names = [_name(x509, host) for host in hosts]
  authority_key = ec.generate_private_key(ec.SECP256R1())
  server_key = ec.generate_private_key(ec.SECP256R1())
  authority = _called(x509, "decoupled certificate authority")
  server = _called(x509, "decoupled syncer")
  key_id = x509.SubjectKeyIdentifier.from_public_key
  root = _signed(
    _unsigned(x509, authority, authority, authority_key, days)
    .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    .add_extension(_usage(x509, key_cert_sign=True), critical=True)
    .add_extension(key_id(authority_key.public_key()), critical=False),
    authority_key,
  )
  issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(
    authority_key.public_key()
  )
  serving = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH])
  shown = _signed(
    _unsigned(x509, server, authority, server_key, days)
    .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    .add_extension(_usage(x509, digital_signature=True), critical=True)
    .add_extension(serving, critical=False)
    .add_extension(x509.SubjectAlternativeName(names), critical=False)
    .add_extension(key_id(server_key.public_key()), critical=False)
    .add_extension(issuer, critical=False),
    authority_key,
  )
  pem = serialization.Encoding.PEM

  def secret(key: Any) -> bytes:
    text: bytes = key.private_bytes(
      pem,
      serialization.PrivateFormat.PKCS8,
      serialization.NoEncryption(),
    )
    return text

  return {
    AUTHORITY: root.public_bytes(pem),
    AUTHORITY_KEY: secret(authority_key),
    SERVER: shown.public_bytes(pem),
    SERVER_KEY: secret(server_key),
  }


def _name(x509: Any, host: str) -> Any:
  try:
    return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
  except ValueError:
    pass
  try:
    if not host or any(c.isspace() or c in ":/,@" for c in host):
      raise ValueError
    return x509.DNSName(host)
  except ValueError:
    raise ConfigError(
      f"--hosts: {host!r} is neither a host name nor an IP address; leave the "
      "port out, and separate several with commas"
    ) from None


def _called(x509: Any, name: str) -> Any:
  return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _unsigned(x509: Any, subject: Any, issuer: Any, key: Any, days: int) -> Any:
  now = datetime.datetime.now(datetime.UTC)
  return (
    x509.CertificateBuilder()
    .subject_name(subject)
    .issuer_name(issuer)
    .public_key(key.public_key())
    .serial_number(x509.random_serial_number())
    .not_valid_before(now - _CLOCK_SKEW)
    .not_valid_after(now + datetime.timedelta(days=days))
  )


def _usage(x509: Any, **granted: bool) -> Any:
  kinds = (
    *("digital_signature", "content_commitment", "key_encipherment"),
    *("data_encipherment", "key_agreement", "key_cert_sign", "crl_sign"),
    *("encipher_only", "decipher_only"),
  )
  return x509.KeyUsage(**{**dict.fromkeys(kinds, False), **granted})


def _signed(builder: Any, key: Any) -> Any:
  hashes = _library("hazmat.primitives.hashes")
  return builder.sign(key, hashes.SHA256())
