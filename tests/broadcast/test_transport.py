"""Requests to one server: small answers and chunks, in full or as a fault with a name; and TLS, how
certificates are checked and renewed."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
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
from broadcast.manifest import Chunk
from broadcast.relay import run_origin
from broadcast.server import ServerOptions
from broadcast.transport import (
    Access,
    Attempt,
    Busy,
    Fault,
    Lie,
    NotThere,
    TooSlow,
    base_url,
    fetch_chunk,
    get,
    new_session,
)
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from tests.broadcast.conftest import LOG, PATIENCE_S, Run, Served, fetched, warnings, weights
from tests.broadcast.fake_relay import Peer, Scripted
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("patient")

TOKEN = "open-sesame"
BODY = bytes(range(256)) * 12_000
"""Three megabytes: several buffers full, and more than a socket holds."""
CHUNK = Chunk(digest_bytes(BODY), len(BODY))
URLS = ["http://a", "https://a.b:8443", "http://127.0.0.1:80/some/prefix", "http://[::1]:9"]
NO_URLS = [
    *("", "a:80", "ftp://a", "http://", "http://:80", "http://a:x", "http://a:99999", "http://a:0"),
    *("http://a/?q=1", "http://a/#f", "http://a b/", "http://a/\r\nX: y", "http://[::1"),
    *("http://ä.example", "http://me:secret@a"),
]


def test_the_url_of_a_server_names_a_host_and_no_user() -> None:
    for url in URLS:
        assert base_url(url) == base_url(f"{url}/") == url
    for url in NO_URLS:
        with pytest.raises(UserError, match=r"is not the URL of|token in a file") as no:
            base_url(url)
        assert "secret" not in str(no.value)


@pytest.mark.parametrize("content", [b"", b"two words", b"a\nb", b"\xff", b"x" * 5000, None])
def test_a_file_without_a_token_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="holds no token") as raised:
        Access.read(path, None)
    assert str(path) in str(raised.value) and "two words" not in str(raised.value)
    path.write_text(f" {TOKEN}\n")
    access = Access.read(path, None)
    assert access.headers() == {"Authorization": f"Bearer {TOKEN}"} and TOKEN not in repr(access)
    assert Access.read(None, path) == Access(None, path) and Access().headers() == {}


class Client:
    """Both ways to a server: small answers, and chunks into a file."""

    def __init__(self, folder: Path) -> None:
        self.session = new_session(Access(token=TOKEN))
        self.file = folder / "file"
        self.file.touch()

    async def small(self, url: str, *, max_bytes: int = len(BODY)) -> bytes:
        return await get(self.session, f"{url}/x", max_bytes=max_bytes, timeout_s=PATIENCE_S)

    async def chunk(
        self,
        url: str,
        offset: int = 0,
        into: Path | None = None,
        timeout_s: float = PATIENCE_S,
        is_hopeless: Callable[[float], bool] = lambda elapsed_s: False,
    ) -> bytes:
        attempt = Attempt(len(BODY))
        limits = {"timeout_s": timeout_s, "is_hopeless": is_hopeless}
        place = (into or self.file, offset)
        await fetch_chunk(self.session, f"{url}/x", CHUNK, *place, attempt, **limits)
        assert attempt.received == len(BODY)
        return self.file.read_bytes()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    made = Client(tmp_path)
    yield made
    await made.session.close()


def honest(peer: Peer) -> None:
    while peer.read_request():
        peer.answer(BODY)


def silent(peer: Peer) -> None:
    peer.wait_for_the_end()


def saying(head: str, body: bytes = b"") -> Callable[[Peer], None]:
    def answer(peer: Peer) -> None:
        peer.read_request()
        peer.send(f"HTTP/1.1 {head}\n\n".replace("\n", "\r\n").encode() + body)
        peer.wait_for_the_end()

    return answer


async def test_an_answer_is_read_as_it_is(client, serve, monkeypatch):
    # given a proxy in the environment, and a disk that takes a part of each write
    proxy, server, pwrite = serve(silent), serve(honest), os.pwrite
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:100_000], at))
    # when an answer is fetched, then all of it arrives, at its place and nowhere else
    assert await client.small(server.url) == BODY
    client.file.write_bytes(b"a" * 7 + b"?" * len(BODY) + b"z" * 5)
    assert await client.chunk(server.url, offset=7) == b"a" * 7 + BODY + b"z" * 5
    assert (server.connections, proxy.connections) == (1, 0)
    with pytest.raises(Fault, match=f"{len(BODY)} bytes, at most {len(BODY) - 1} expected"):
        await client.small(server.url, max_bytes=len(BODY) - 1)


async def test_a_file_that_cannot_be_written_is_not_blamed_on_the_server(client, serve, tmp_path):
    server = serve(honest)
    with pytest.raises(FileNotFoundError):
        await client.chunk(server.url, into=tmp_path / "none")
    with pytest.raises(OSError, match=os.strerror(28)):
        await client.chunk(server.url, into=Path("/dev/full"))


OK = f"200 OK\nContent-Length: {len(BODY)}"


@pytest.mark.parametrize(
    ("script", "kind", "said"),
    [
        (saying(OK, BODY[:-1] + b"?"), Lie, "bytes that are not the chunk's"),
        (saying("200 OK\nContent-Length: 9"), Lie, "9 bytes that are not"),
        (saying("200 OK", BODY), Fault, "no Content-Length"),
        (saying(f"{OK}\nTransfer-Encoding: chunked"), Fault, "Transfer-Encoding can't be"),
        (saying(OK + "".join(f"\nX-{i}: y" for i in range(5000))), Fault, "many headers"),
        (saying("404 Not Found\nContent-Length: 0"), NotThere, "404"),
        (saying("429 Busy\nContent-Length: 0\nRetry-After: 7"), Busy, "429"),
        (saying("429 Busy\nContent-Length: 0\nRetry-After: Fri, 1 Jan"), Busy, "429"),
        (saying("403 Forbidden\nContent-Length: 0"), Fault, "status 403: not for this token"),
        (saying("500 Oh\nContent-Length: 0"), Fault, "^status 500$"),
    ],
)
async def test_a_bad_answer_is_a_fault_with_a_name(client, serve, script, kind, said):
    server = serve(script)
    with pytest.raises(Fault, match=said) as raised:
        await client.chunk(server.url)
    assert type(raised.value) is kind
    if isinstance(raised.value, Busy):
        assert raised.value.retry_after_s in (7.0, None)
    await client.session.close()
    eventually(lambda: server.ended == 1, "the connection ends")


async def test_a_token_goes_to_no_other_server_and_into_no_message(client, serve, caplog):
    heads, messages, elsewhere = [], [], serve(honest)

    def refuse(peer: Peer) -> None:
        heads.append(peer.read_request())
        peer.answer(b"", lines[0], f"Location: {elsewhere.url}/x")

    server = serve(refuse)
    with caplog.at_level(logging.DEBUG):
        for line in ("401 Unauthorized", "302 Found", "307 Temporary", "308 Permanent"):
            lines = [line]
            for ask in (client.small, client.chunk):
                with pytest.raises(Fault, match=f"status {line[:3]}") as raised:
                    await ask(server.url)
                messages.append(repr(raised.value))
    assert len(heads) == 8 and elsewhere.connections == 0
    assert all(f"Authorization: Bearer {TOKEN}\r\n".encode() in head for head in heads)
    assert "no token, or not one of its own" in messages[0]
    assert TOKEN not in caplog.text + "".join(messages)


async def test_an_attempt_that_is_given_up_writes_no_more(client, serve, caplog):
    """The bytes of the file are another attempt's then, even where the rest was under way."""
    started, loop = asyncio.Event(), asyncio.get_running_loop()
    gc.collect()  # what other tests left
    caplog.clear()

    def slow_half(peer: Peer) -> None:
        peer.read_request()
        peer.send(f"HTTP/1.1 {OK}\n\n".replace("\n", "\r\n").encode() + BODY[: len(BODY) // 2])
        loop.call_soon_threadsafe(started.set)
        peer.wait_for_the_end()

    slow, good = serve(slow_half), serve(honest)
    first = asyncio.create_task(client.chunk(slow.url))
    await started.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    client.file.write_bytes(b"")
    assert client.file.read_bytes() == b""
    assert await client.chunk(good.url) == BODY
    eventually(lambda: slow.ended == 1, "the first connection ends")
    assert client.file.read_bytes() == BODY
    gc.collect()
    assert not caplog.records  # nothing was left that nobody looked at


async def test_an_attempt_ends_at_its_deadline_or_once_it_is_hopeless(client, serve, monkeypatch):
    server = serve(silent)
    with pytest.raises(Fault, match=f"^0 of {len(BODY)} bytes within 0.1 s$"):
        await client.chunk(server.url, timeout_s=0.1)
    monkeypatch.setattr("broadcast.transport._LOOK_EVERY_S", 0.01)
    with pytest.raises(TooSlow, match=f"^0 of {len(BODY)} bytes so far$"):
        await client.chunk(server.url, is_hopeless=lambda elapsed_s: elapsed_s > 0.05)

    def cancel_too(elapsed_s: float) -> bool:
        asyncio.get_running_loop().call_soon(task.cancel)
        return True

    # a cancellation in that very moment is not lost
    task = asyncio.create_task(client.chunk(server.url, is_hopeless=cancel_too))
    with pytest.raises(asyncio.CancelledError):
        await task
    eventually(lambda: server.ended == 3, "the connections end")


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
    with connected(run.origin(options(authority), head_s=0.2)) as silent:
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


async def test_a_server_is_believed_by_its_authority_and_its_name(authority, tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue())
    limits = {"max_bytes": len(BODY), "timeout_s": PATIENCE_S}
    known, unknown = Access(ca_file=authority.ca_file), Access()
    with (
        Scripted(honest, tls=context) as server,
        Scripted(honest, host="127.0.0.2", tls=context) as elsewhere,
    ):
        async with new_session(known) as session, new_session(unknown) as other:
            assert await get(session, server.url, **limits) == BODY
            with pytest.raises(Fault, match=r"127\.0\.0\.2"):
                await get(session, elsewhere.url, **limits)
            with pytest.raises(Fault, match=r"CertificateError|CERTIFICATE_VERIFY_FAILED"):
                await get(other, server.url, **limits)
    (tmp_path / "ca.pem").write_text("nothing")
    for file in (tmp_path / "ca.pem", tmp_path / "none"):
        with pytest.raises(UserError, match=str(file)):
            _ = Access(ca_file=file).ssl_context
