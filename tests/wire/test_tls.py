"""TLS between a learner and its syncer, over real sockets on loopback."""

import datetime
import stat
import time

import pytest

from decoupled.errors import ConfigError, Refused, Unreachable
from decoupled.launch import certs
from decoupled.launch.options import CertsOptions
from decoupled.types import NO_VERSION, Phase
from decoupled.wire import tls
from decoupled.wire.address import Address
from decoupled.wire.client import AdminClient, GrpcLearnerWire
from tests.wire import fakes
from tests.wire.fakes import TOKEN, Server

# A wait for the connection would take this long; a verdict comes before.
CONNECT_S = 60.0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """Folders with certificates: for this machine, another name, the past."""
  folder = tmp_path_factory.mktemp("certs")
  certs.make(folder / "good", ["localhost", "127.0.0.1", "::1"], 7)
  certs.make(folder / "stranger", ["localhost", "127.0.0.1", "::1"], 7)
  certs.make(folder / "elsewhere", ["node7", "10.1.2.3"], 7)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(certs, "_CLOCK_SKEW", datetime.timedelta(days=10))
    for name, text in certs._texts(["127.0.0.1"], -1).items():
      (folder / "expired").mkdir(exist_ok=True)
      (folder / "expired" / name).write_bytes(text)
      (folder / "expired" / name).chmod(0o600)
  return folder


def shown(folder):
  return tls.server(folder / certs.SERVER, folder / certs.SERVER_KEY)


def believed(folder):
  return tls.client(folder / certs.AUTHORITY)


def connect(address, authority):
  return GrpcLearnerWire(address, TOKEN, tls=authority, connect_s=CONNECT_S)


def said_by(address, authority):
  """What a learner is told that joins, and how long that took."""
  wire = connect(address, authority)
  began = time.monotonic()
  with pytest.raises(Unreachable) as caught:
    wire.hello(fakes.hello())
  wire.close()
  assert "\n" not in str(caught.value)
  assert time.monotonic() - began < CONNECT_S / 2
  return str(caught.value)


# --- what works ------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_both_connections_and_the_operator_are_encrypted(made, host):
  with Server(bind=host, tls=shown(made / "good")) as server:
    authority = believed(made / "good")
    wire = connect(server.address, authority)
    assert wire.hello(fakes.hello()).run_id == "run"
    merged = wire.fetch(0, NO_VERSION, None)
    assert [a.shape for a in merged.arrays] == [(500, 1000), ()]
    wire.close()
    with AdminClient(server.address, TOKEN, tls=authority) as admin:
      assert admin.status().phase is Phase.TRAINING


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_only_with_tls(made, host):
  with pytest.raises(ConfigError, match="`decoupled certs --out") as caught:
    Server(bind=host).__enter__()
  assert "\n" not in str(caught.value)
  with Server(bind=host, tls=shown(made / "good")) as server:
    own = "127.0.0.1" if host == "0.0.0.0" else "::1"
    wire = connect(Address(own, server.address.port), believed(made / "good"))
    assert wire.hello(fakes.hello()).run_id == "run"
    wire.close()


def test_tls_does_not_replace_the_token(made):
  with Server(tls=shown(made / "good")) as server:
    wire = GrpcLearnerWire(
      server.address, "another-token-0123456789", tls=believed(made / "good")
    )
    with pytest.raises(Refused, match="run token"):
      wire.hello(fakes.hello())
    wire.close()


# --- what does not, in one line and at once ----------------------------------


def test_a_certificate_of_another_authority(made):
  with Server(tls=shown(made / "good")) as server:
    said = said_by(server.address, believed(made / "stranger"))
    assert f"is not signed by {made / 'stranger' / 'ca.pem'}" in said
    assert str(server.address) in said
    with (
      AdminClient(
        server.address, TOKEN, tls=believed(made / "stranger")
      ) as admin,
      pytest.raises(Unreachable, match="is not signed by"),
    ):
      admin.status()


def test_a_certificate_for_another_name(made):
  with Server(tls=shown(made / "elsewhere")) as server:
    said = said_by(server.address, believed(made / "elsewhere"))
    assert "not made out to 127.0.0.1" in said
    assert "--hosts 127.0.0.1" in said
    by_name = Address("localhost", server.address.port)
    assert "localhost" in said_by(by_name, believed(made / "elsewhere"))


def test_a_certificate_that_has_expired(made, monkeypatch):
  with pytest.raises(ConfigError, match=r"server\.pem has expired"):
    shown(made / "expired")
  monkeypatch.setattr(tls, "_check_dates", lambda *_: None)
  with Server(tls=shown(made / "expired")) as server:
    assert "has expired" in said_by(server.address, believed(made / "expired"))


def test_one_end_with_and_the_other_without(made):
  with Server() as plain:
    said = said_by(plain.address, believed(made / "good"))
    assert "does not speak TLS" in said
  with Server(tls=shown(made / "good")) as server:
    said = said_by(server.address, None)
    assert "speaks TLS only" in said
    assert "--tls_ca" in said


def test_a_syncer_that_is_not_there_yet_is_waited_for(made):
  with Server(tls=shown(made / "good")) as first:
    address = first.address
  assert not tls.fault(address, believed(made / "good"))
  assert not tls.fault(address, None)


# --- files -------------------------------------------------------------------


def test_files_that_are_none_are_named(made, tmp_path):
  odd = tmp_path / "odd.pem"
  odd.write_text("nothing of the kind")
  odd.chmod(0o600)
  good = made / "good"
  with pytest.raises(ConfigError, match=r"--tls_ca: .*odd\.pem holds no"):
    tls.client(odd)
  with pytest.raises(ConfigError, match=r"nowhere cannot be read"):
    tls.client(tmp_path / "nowhere")
  with pytest.raises(ConfigError, match="do not belong together"):
    tls.server(good / certs.SERVER, made / "stranger" / certs.SERVER_KEY)
  with pytest.raises(ConfigError, match="do not belong together"):
    tls.server(odd, good / certs.SERVER_KEY)
  (good / certs.SERVER_KEY).chmod(0o640)
  with pytest.raises(ConfigError, match=r"mode 0640.*chmod 600"):
    shown(good)
  (good / certs.SERVER_KEY).chmod(0o600)


def test_keys_are_for_their_owner_and_nothing_is_overwritten(tmp_path, capsys):
  out = tmp_path / "certs"
  assert certs.main(CertsOptions(out, ("node7", "10.0.0.1"), 3)) == 0
  said = capsys.readouterr().out
  modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in out.iterdir()}
  assert modes["ca.key"] == modes["server.key"] == 0o600
  assert set(modes) == {"ca.pem", "ca.key", "server.pem", "server.key"}
  for name in modes:
    assert str(out / name) in said
  before = {p.name: p.read_bytes() for p in out.iterdir()}
  (out / "ca.pem").unlink()
  with pytest.raises(ConfigError, match=r"ca\.key exists"):
    certs.main(CertsOptions(out, ("node7",), 3))
  del before["ca.pem"]
  assert {p.name: p.read_bytes() for p in out.iterdir()} == before


@pytest.mark.parametrize("host", ["node7:7077", "a b", "http://node7", "ü"])
def test_what_is_no_host_is_named(tmp_path, host):
  with pytest.raises(ConfigError, match="neither a host name") as caught:
    certs.make(tmp_path / "x", ["node7", host], 3)
  assert repr(host) in str(caught.value)
  assert not (tmp_path / "x").exists()


def test_without_the_package_that_makes_them_it_says_which(
  tmp_path, monkeypatch
):
  def missing(name):
    raise ImportError(name)

  monkeypatch.setattr(certs.importlib, "import_module", missing)
  with pytest.raises(Exception, match=r"pip install.*certs") as caught:
    certs.make(tmp_path / "x", ["node7"], 3)
  assert "\n" not in str(caught.value)
