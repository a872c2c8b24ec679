"""Small answers, what a URL may be, and how a token and certificates are kept and used."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broadcast.chunk_transfer import Transfer, fetch_chunk
from broadcast.manifest import Chunk
from broadcast.transport import Access, Fault, base_url, get, new_session
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes

from .certificates import Authority
from .scripted import Peer, Scripted

TOKEN = "open-sesame"
BODY = bytes(100_000)


@pytest.mark.parametrize(
    "url",
    ["http://a", "https://a.example:8443", "http://127.0.0.1:80/some/prefix", "http://[::1]:9"],
)
def test_urls_of_servers(url: str) -> None:
    assert base_url(url) == url
    assert base_url(f"{url}/") == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a:80",
        "ftp://a",
        "http://",
        "http://:80",
        "http://a:x",
        "http://a:99999",
        "http://a:0",
        "http://a/?q=1",
        "http://a/#f",
        "http://a b/",
        "http://a/\r\nX: y",
        "http://[::1",
        "http://ä.example",
    ],
)
def test_what_is_no_url_of_a_server(url: str) -> None:
    with pytest.raises(UserError, match="is not the URL of an origin or relay"):
        base_url(url)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(UserError, match="token in a file") as raised:
        base_url("http://me:secret@a")

    assert "secret" not in str(raised.value)


def test_a_token_is_read_from_a_file_and_shown_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")

    access = Access.read(path, None)

    assert access.headers()["Authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in repr(access)
    assert "Authorization" not in Access.read(None, None).headers()


@pytest.mark.parametrize("content", [b"", b"two words", b"a\nb", b"\xff", b"x" * 5000])
def test_what_is_no_token(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)

    with pytest.raises(UserError, match="holds no token") as raised:
        Access.read(path, None)

    assert str(path) in str(raised.value)
    assert "two words" not in str(raised.value)


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path / "none")):
        Access.read(tmp_path / "none", None)


def test_certificates_that_are_none_are_named(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("nothing")

    for file in (path, tmp_path / "none"):
        with pytest.raises(UserError, match=str(file)):
            _ = Access(ca_file=file).ssl_context


class Client:
    """Both ways to a server: small answers and chunks."""

    def __init__(self, access: Access, folder: Path) -> None:
        self._session = new_session(access)
        self._file = folder / "file"
        self._file.touch()

    async def small(self, url: str, *, max_bytes: int = len(BODY), timeout_s: float = 20) -> bytes:
        return await get(self._session, f"{url}/x", max_bytes=max_bytes, timeout_s=timeout_s)

    async def chunk(self, url: str, *, timeout_s: float = 20) -> bytes:
        transfer = Transfer(Chunk(digest_bytes(BODY), len(BODY)), self._file, 0)
        await fetch_chunk(self._session, f"{url}/x", transfer, timeout_s=timeout_s)
        return self._file.read_bytes()

    async def close(self) -> None:
        await self._session.close()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    made = Client(Access(token=TOKEN), tmp_path)
    yield made
    await made.close()


def honest(peer: Peer) -> None:
    while peer.read_request():
        peer.answer(BODY)


def status(line: str, *fields: str) -> Scripted:
    def answer(peer: Peer) -> None:
        peer.read_request()
        peer.answer(b"", line, *fields)

    return Scripted(answer)


async def test_small_answers(client: Client) -> None:
    with Scripted(honest) as server:
        assert await client.small(server.url) == BODY
        with pytest.raises(Fault, match="100000 bytes, at most 99999 expected"):
            await client.small(server.url, max_bytes=len(BODY) - 1)


async def test_nobody_is_sent_elsewhere_with_our_token(client: Client) -> None:
    with Scripted(honest) as elsewhere:
        for line in ("302 Found", "307 Temporary", "308 Permanent"):
            with status(line, f"Location: {elsewhere.url}/x") as server:
                for ask in (client.small, client.chunk):
                    with pytest.raises(Fault, match=f"status {line[:3]}"):
                        await ask(server.url)
        assert elsewhere.connections == 0


async def test_the_token_goes_with_every_request_and_into_no_message(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    heads = []

    def refuse(peer: Peer) -> None:
        heads.append(peer.read_request())
        peer.answer(b"", "401 Unauthorized")

    messages = []
    with caplog.at_level(logging.DEBUG), Scripted(refuse) as server:
        for ask in (client.small, client.chunk):
            with pytest.raises(Fault, match="status 401") as raised:
                await ask(server.url)
            messages.append(repr(raised.value))

    assert len(heads) == 2
    assert all(f"Authorization: Bearer {TOKEN}\r\n".encode() in head for head in heads)
    assert TOKEN not in caplog.text + "".join(messages)


def tls(authority: Authority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue())
    return context


async def test_https_by_the_authority_that_was_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    client = Client(Access(TOKEN, authority.ca_file), tmp_path)

    with Scripted(honest, tls=tls(authority)) as server:
        assert await client.small(server.url) == BODY
        for _ in range(3):
            assert await client.chunk(server.url) == BODY
        assert server.connections == 1

    await client.close()


async def test_https_by_nobody_whom_we_know_is_refused(client: Client, tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    with Scripted(honest, tls=tls(authority)) as server:
        for ask in (client.small, client.chunk):
            with pytest.raises(Fault, match=r"CertificateError|CERTIFICATE_VERIFY_FAILED"):
                await ask(server.url)


async def test_https_by_another_than_was_asked_for_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)  # speaks for 127.0.0.1
    client = Client(Access(TOKEN, authority.ca_file), tmp_path)

    with Scripted(honest, host="127.0.0.2", tls=tls(authority)) as server:
        for ask in (client.small, client.chunk):
            with pytest.raises(Fault, match=r"127\.0\.0\.2"):
                await ask(server.url)

    await client.close()
