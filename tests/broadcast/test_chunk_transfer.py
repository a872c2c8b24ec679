"""A chunk of some megabytes, how a test fetches it, and servers that a test writes."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from broadcast.chunk_transfer import Transfer, fetch_chunk
from broadcast.manifest import Chunk
from broadcast.transport import Access, Fault, Lie, NotThere, new_session
from runspec.core.hashing import digest_bytes
from tests.broadcast.scripted import Peer, Serve
from tests.waiting import eventually

BODY = bytes(range(256)) * 12_000
"""Three megabytes: several buffers full, and more than a socket holds."""
CHUNK = Chunk(digest_bytes(BODY), len(BODY))


async def fetch(
    session: aiohttp.ClientSession,
    url: str,
    file: Path,
    *,
    offset: int = 0,
    timeout_s: float = 20.0,
    is_hopeless: Callable[[float], bool] = lambda elapsed_s: False,
) -> None:
    transfer = Transfer(CHUNK, file, offset)
    await fetch_chunk(
        session, f"{url}/demo/chunks/x", transfer, timeout_s=timeout_s, is_hopeless=is_hopeless
    )
    assert transfer.received == len(BODY)


def honest(peer: Peer) -> None:
    while peer.read_request():
        peer.answer(BODY)


def silent(peer: Peer) -> None:
    peer.wait_for_the_end()


# -- A session for chunks, and a file that they go into --------------------------------------------


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with new_session(Access()) as made:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"")
    return path


# -- One chunk over one connection, from servers that do nothing wrong -----------------------------


async def test_a_chunk_lands_at_its_place_and_nowhere_else(
    session: aiohttp.ClientSession, serve: Serve, file: Path
) -> None:
    file.write_bytes(b"a" * 7 + b"?" * len(BODY) + b"z" * 5)

    await fetch(session, serve(honest).url, file, offset=7)

    assert file.read_bytes() == b"a" * 7 + BODY + b"z" * 5


async def test_no_proxy_of_the_environment_is_used(
    session: aiohttp.ClientSession, serve: Serve, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, server = serve(silent), serve(honest)
    monkeypatch.setenv("http_proxy", proxy.url)

    await fetch(session, server.url, file)

    assert proxy.connections == 0


async def test_a_file_that_cannot_be_written_is_not_blamed_on_the_server(
    session: aiohttp.ClientSession, serve: Serve, tmp_path: Path
) -> None:
    server = serve(honest)

    with pytest.raises(FileNotFoundError):
        await fetch(session, server.url, tmp_path / "none")
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match=os.strerror(28)):
            await fetch(session, server.url, Path("/dev/full"))


def one_answer_then_gone(peer: Peer) -> None:
    peer.read_request()
    peer.answer(BODY)


def one_answer_then_a_reset(peer: Peer) -> None:
    one_answer_then_gone(peer)
    peer.read_request()
    peer.reset()


@pytest.mark.parametrize("script", [one_answer_then_gone, one_answer_then_a_reset])
async def test_a_connection_that_cannot_be_used_again_is_replaced_in_silence(
    session: aiohttp.ClientSession, serve: Serve, file: Path, script: Callable[[Peer], None]
) -> None:
    server = serve(script)

    for _ in range(3):
        file.write_bytes(b"")
        await fetch(session, server.url, file)
        assert file.read_bytes() == BODY

    assert server.connections == 3


# -- Answers that are refused, or break off: each is a fault with a name, and whose it is ----------


def saying(head: str, body: bytes = b"") -> Callable[[Peer], None]:
    def answer(peer: Peer) -> None:
        peer.read_request()
        peer.send(head.replace("\n", "\r\n").encode() + body)
        peer.wait_for_the_end()

    return answer


OK = f"HTTP/1.1 200 OK\nContent-Length: {len(BODY)}\n"


@pytest.mark.parametrize(
    ("script", "kind", "said"),
    [
        (saying(f"{OK}\n", BODY[:-1] + b"?"), Lie, "not the chunk's"),
        (saying("HTTP/1.1 200 OK\nContent-Length: 9\n\n"), Lie, "9 bytes that are not"),
        (saying("HTTP/1.1 200 OK\n\n", BODY), Fault, "no Content-Length"),
        (saying("HTTP/1.1 404 Not Found\nContent-Length: 0\n\n"), NotThere, "404"),
        (saying(f"{OK}Transfer-Encoding: chunked\n\n"), Fault, "Transfer-Encoding can't be"),
        (saying(OK + "".join(f"X-{i}: y\n" for i in range(5000)) + "\n"), Fault, "many headers"),
    ],
)
async def test_a_bad_answer_is_refused(
    session: aiohttp.ClientSession,
    serve: Serve,
    file: Path,
    script: Callable[[Peer], None],
    kind: type[Fault],
    said: str,
) -> None:
    server = serve(script)

    with pytest.raises(Fault, match=said) as raised:
        await fetch(session, server.url, file)

    assert type(raised.value) is kind
    await session.close()
    eventually(lambda: server.ended == 1, "the connection ends")


# -- Servers that waste time, and attempts that are given up: both end when they should ------------


async def test_what_was_given_up_writes_no_more(
    session: aiohttp.ClientSession, serve: Serve, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes of the file are another attempt's then, even where the rest was under way."""
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow_half(peer: Peer) -> None:
        peer.read_request()
        peer.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\n\r\n".encode())
        peer.send(BODY[: len(BODY) // 2])
        loop.call_soon_threadsafe(started.set)
        peer.wait_for_the_end()

    slow, good = serve(slow_half), serve(honest)
    first = asyncio.create_task(fetch(session, slow.url, file))
    async with asyncio.timeout(20):
        await started.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first

    file.write_bytes(b"")
    assert file.read_bytes() == b""
    await fetch(session, good.url, file)

    eventually(lambda: slow.ended == 1, "the first connection ends")
    assert file.read_bytes() == BODY
    gc.collect()
    assert not caplog.records  # nothing was left that nobody looked at


async def test_a_cancellation_is_not_lost_while_a_thread_ends(
    session: aiohttp.ClientSession, serve: Serve, file: Path
) -> None:
    """It comes in the moment in which the attempt is given up for another reason."""
    server = serve(silent)

    def cancel_too(elapsed_s: float) -> bool:
        asyncio.get_running_loop().call_soon(task.cancel)
        return True

    task = asyncio.create_task(fetch(session, server.url, file, is_hopeless=cancel_too))

    with pytest.raises(asyncio.CancelledError):
        await task

    eventually(lambda: server.ended == 1, "the connection ends")
