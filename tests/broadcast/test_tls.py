"""TLS: a server's certificate, as clients check it, and how it is renewed."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

from broadcast.admission import server_context
from broadcast.relay import run_origin
from broadcast.server import Limits, ServerOptions
from broadcast.transport import Access, Fault, get, new_session
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from tests.waiting import eventually

from .conftest import LOG, PATIENCE_S, Run, Served, fetched, warnings, weights
from .scripted import Peer, Scripted

DAY = timedelta(days=1)


class Authority:
    """Signs certificates of 127.0.0.1; `ca_file` is what its clients trust."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self.ca_file = folder / "ca.pem"
        basic = x509.BasicConstraints(ca=True, path_length=None)
        certificate = self._certify("test CA", self._key.public_key(), basic)
        self.ca_file.write_bytes(certificate)

    def issue(self, name: str = "server", passphrase: bytes | None = None) -> tuple[Path, Path]:
        """Writes a new certificate and its key, in place of any before; returns their paths."""
        key = ec.generate_private_key(ec.SECP256R1())
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        certificate = self._certify(name, key.public_key(), x509.SubjectAlternativeName([address]))
        encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
        cert_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        write_atomic(cert_file, certificate)
        write_atomic(key_file, pem, mode=0o600)
        return cert_file, key_file

    def _certify(
        self, name: str, key: ec.EllipticCurvePublicKey, extension: x509.ExtensionType
    ) -> bytes:
        subject, issuer = (
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, "test CA")
        )
        now, serial = datetime.now(UTC), x509.random_serial_number()
        builder = x509.CertificateBuilder(issuer, subject, key, serial, now - DAY, now + DAY)
        signed = builder.add_extension(extension, critical=False).sign(self._key, hashes.SHA256())
        return signed.public_bytes(Encoding.PEM)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


def options(authority: Authority, **more: object) -> ServerOptions:
    cert, key = authority.issue()
    return ServerOptions(tls_cert=cert, tls_key=key, **more)


@pytest.fixture
def origin(run: Run, authority: Authority) -> Served:
    run.publish(0, weights())
    return run.origin(options(authority))


def https(served: Served) -> str:
    return f"https://127.0.0.1:{served.port}"


def connected(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.ca_file)


def presented(served: Served, authority: Authority) -> bytes:
    """The certificate that a server shows, checked."""
    with (
        connected(served) as plain,
        trusting(authority).wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        return secure.getpeercert(binary_form=True) or b""


def test_publisher_to_client_over_tls_with_tokens(run, authority, tmp_path):
    # given an origin and a relay that both want a token, with certificates of our own authority
    run.publish(0, weights())
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"relay {'r' * 32}\nsampler {'s' * 32}\n")
    secured = options(authority, tokens_file=tokens)
    origin = run.origin(secured)
    relay = run.relay(https(origin), options=secured, access=Access("r" * 32, authority.ca_file))
    # when a client with a token of its own fetches from the relay, then it has the version
    client = run.client(https(relay), access=Access("s" * 32, authority.ca_file))
    assert fetched(client) == weights()


def test_only_tls_from_1_2_on_is_spoken(origin: Served, authority: Authority) -> None:
    old = trusting(authority)
    with pytest.warns(DeprecationWarning):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with connected(origin) as plain, pytest.raises(ssl.SSLError):
        old.wrap_socket(plain, server_hostname="127.0.0.1")
    with connected(origin) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in plain.recv(1000)


def test_a_handshake_that_does_not_come_is_not_waited_for(run: Run, authority: Authority) -> None:
    with connected(run.origin(options(authority, limits=Limits(head_s=0.2)))) as silent:
        assert silent.recv(1) == b""


def test_a_new_certificate_is_taken_up_and_a_bad_one_is_not(origin, authority, caplog):
    first = presented(origin, authority)
    cert, _ = authority.issue()
    second = presented(origin, authority)
    assert second != first
    cert.write_text("nothing of the kind")
    assert presented(origin, authority) == second
    eventually(lambda: any("stays in use" in line for line in warnings(caplog)), "the log says so")


def test_files_that_are_no_pair_are_named(run: Run, authority: Authority, tmp_path: Path) -> None:
    (cert, key), (_, other) = authority.issue("one"), authority.issue("two")
    secret_cert, secret_key = authority.issue("secret", passphrase=b"unknown")
    gone, empty = tmp_path / "gone", tmp_path / "empty"
    empty.touch()
    for pair, words in (
        ((cert, other), r"two\.key: is not the key of .*one\.pem"),
        ((cert, gone), "gone: cannot read: No such file"),
        ((gone, key), "gone: cannot read: No such file"),
        ((empty, key), r"empty, .*one\.key: no certificate chain and key"),
        ((secret_cert, secret_key), "without a passphrase"),  # and nobody is asked for it
    ):
        with pytest.raises(UserError, match=words):
            server_context(*pair, LOG)
    for half in (ServerOptions(tls_cert=cert), ServerOptions(tls_key=key)):
        with pytest.raises(UserError, match="--tls-cert and --tls-key belong together"):
            asyncio.run(run_origin(run.store, log=LOG, options=half))


def honest(peer: Peer) -> None:
    while peer.read_request():
        peer.answer(b"here")


async def test_a_server_is_believed_by_its_authority_and_its_name(authority, tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue())
    limits = {"max_bytes": 100, "timeout_s": PATIENCE_S}
    known, unknown = Access(ca_file=authority.ca_file), Access()
    with (
        Scripted(honest, tls=context) as server,
        Scripted(honest, host="127.0.0.2", tls=context) as elsewhere,
    ):
        async with new_session(known) as session, new_session(unknown) as other:
            assert await get(session, server.url, **limits) == b"here"
            with pytest.raises(Fault, match=r"127\.0\.0\.2"):
                await get(session, elsewhere.url, **limits)
            with pytest.raises(Fault, match=r"CertificateError|CERTIFICATE_VERIFY_FAILED"):
                await get(other, server.url, **limits)
    (tmp_path / "ca.pem").write_text("nothing")
    for file in (tmp_path / "ca.pem", tmp_path / "none"):
        with pytest.raises(UserError, match=str(file)):
            _ = Access(ca_file=file).ssl_context
