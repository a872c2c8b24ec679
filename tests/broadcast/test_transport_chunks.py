"""One chunk over one connection: from honest servers, and from every kind of other."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from broadcast.chunk_pool import THREADS, ChunkPool
from broadcast.connection import Transfer
from broadcast.manifest import Chunk
from broadcast.transport import Access, Busy, Fault, Lie, NotThere, TooSlow
from runspec.common.hashing import digest_bytes
from tests.waiting import eventually

from .scripted import Peer, Scripted

BODY = bytes(range(256)) * 12_000
"""Three megabytes: several buffers full, and more than a socket holds."""
CHUNK = Chunk(digest_bytes(BODY), len(BODY))
Serve = Callable[[Callable[[Peer], None]], Scripted]


@pytest.fixture
async def pool() -> AsyncIterator[ChunkPool]:
    made = ChunkPool(Access())
    yield made
    made.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[Scripted] = []

    def start(script: Callable[[Peer], None]) -> Scripted:
        started.append(Scripted(script))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"")
    return path


async def fetch(
    pool: ChunkPool,
    url: str,
    file: Path,
    *,
    offset: int = 0,
    timeout_s: float = 20.0,
    is_hopeless: Callable[[float], bool] = lambda elapsed_s: False,
) -> None:
    transfer = Transfer(CHUNK, file, offset)
    await pool.fetch(url, "demo/chunks/x", transfer, timeout_s=timeout_s, is_hopeless=is_hopeless)
    assert transfer.received == len(BODY)


def honest(peer: Peer) -> None:
    while peer.read_request():
        peer.answer(BODY)


async def test_a_chunk_lands_at_its_place_and_nowhere_else(
    pool: ChunkPool, serve: Serve, file: Path
) -> None:
    file.write_bytes(b"a" * 7 + b"?" * len(BODY) + b"z" * 5)

    await fetch(pool, serve(honest).url, file, offset=7)

    assert file.read_bytes() == b"a" * 7 + BODY + b"z" * 5


async def test_chunks_that_follow_one_another_share_a_connection(
    pool: ChunkPool, serve: Serve, file: Path
) -> None:
    server = serve(honest)

    for _ in range(3):
        await fetch(pool, server.url, file)

    assert server.connections == 1


async def test_as_many_chunks_as_threads_come_at_a_time(
    pool: ChunkPool, serve: Serve, tmp_path: Path
) -> None:
    everyone = asyncio.Event()
    loop = asyncio.get_running_loop()
    waiting = []

    def all_at_once(peer: Peer) -> None:
        peer.read_request()
        waiting.append(peer)
        if len(waiting) == THREADS:
            loop.call_soon_threadsafe(everyone.set)
        peer.wait_for_the_end()

    server = serve(all_at_once)
    files = [tmp_path / str(i) for i in range(THREADS)]
    for path in files:
        path.touch()
    tasks = [asyncio.create_task(fetch(pool, server.url, path)) for path in files]
    async with asyncio.timeout(20):
        await everyone.wait()  # and the loop is free to see it

    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(error, asyncio.CancelledError) for error in ended)
    eventually(lambda: server.ended == THREADS, "every connection ends")


async def test_the_request_asks_below_the_prefix_and_for_the_bytes_as_they_are(
    serve: Serve, file: Path
) -> None:
    heads = []

    def listen(peer: Peer) -> None:
        heads.append(peer.read_request())
        peer.answer(BODY)

    server = serve(listen)
    pool = ChunkPool(Access(token="open-sesame"))
    await fetch(pool, f"{server.url}/some/prefix", file)
    pool.close()

    first, *lines = heads[0].decode().split("\r\n")
    assert first == "GET /some/prefix/demo/chunks/x HTTP/1.1"
    assert f"Host: 127.0.0.1:{server.port}" in lines
    assert "Accept-Encoding: identity" in lines
    assert "Authorization: Bearer open-sesame" in lines


# --- what servers may do that is no fault of theirs


def one_answer_then_gone(peer: Peer) -> None:
    peer.read_request()
    peer.answer(BODY)


def one_answer_then_deaf(peer: Peer) -> None:
    """Closes when the second request is there already."""
    one_answer_then_gone(peer)
    peer.read_request()


def one_answer_then_a_reset(peer: Peer) -> None:
    one_answer_then_gone(peer)
    peer.read_request()
    peer.reset()


def one_answer_that_ends_the_connection(peer: Peer) -> None:
    peer.read_request()
    peer.answer(BODY, "200 OK", "Connection: close")


def an_old_servers_answer(peer: Peer) -> None:
    peer.read_request()
    peer.send(f"HTTP/1.0 200 OK\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY)


@pytest.mark.parametrize(
    "script",
    [
        one_answer_then_gone,
        one_answer_then_deaf,
        one_answer_then_a_reset,
        one_answer_that_ends_the_connection,
        an_old_servers_answer,
    ],
)
async def test_a_connection_that_cannot_be_used_again_is_replaced_in_silence(
    pool: ChunkPool, serve: Serve, file: Path, script: Callable[[Peer], None]
) -> None:
    server = serve(script)

    for _ in range(3):
        file.write_bytes(b"")
        await fetch(pool, server.url, file)
        assert file.read_bytes() == BODY

    assert server.connections == 3


@pytest.mark.parametrize(("surplus", "connections"), [(b"", 1), (b"and more", 2)])
async def test_a_small_chunk_may_come_in_one_piece_with_its_head(
    pool: ChunkPool, serve: Serve, file: Path, surplus: bytes, connections: int
) -> None:
    body = b"small"

    def answer(peer: Peer) -> None:
        while peer.read_request():
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + body + surplus)

    server = serve(answer)
    for _ in range(2):
        transfer = Transfer(Chunk(digest_bytes(body), len(body)), file, 0)
        await pool.fetch(server.url, "x", transfer, timeout_s=20)

    assert file.read_bytes() == body
    assert server.connections == connections


# --- what servers do to waste time: it ends with the timeout


def silent(peer: Peer) -> None:
    peer.wait_for_the_end()


def dripping_head(peer: Peer) -> None:
    peer.read_request()
    peer.send(b"HTTP/1.1 200 OK\r\nX-Patience: ")
    peer.drip(b"m")


def dripping_body(peer: Peer) -> None:
    peer.read_request()
    peer.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\n\r\n".encode())
    peer.drip(BODY)


def stuck_in_the_body(peer: Peer) -> None:
    peer.read_request()
    peer.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY[:-1])
    peer.wait_for_the_end()


WASTERS = [silent, dripping_head, dripping_body, stuck_in_the_body]


@pytest.mark.parametrize("script", WASTERS)
async def test_who_wastes_time_is_left_at_the_timeout(
    pool: ChunkPool, serve: Serve, file: Path, script: Callable[[Peer], None]
) -> None:
    server = serve(script)

    with pytest.raises(Fault, match=f"of {len(BODY)} bytes within 0.3 s"):
        await fetch(pool, server.url, file, timeout_s=0.3)

    eventually(lambda: server.ended == 1, "the connection ends")


@pytest.mark.parametrize("script", WASTERS)
async def test_who_wastes_time_is_left_when_others_are_better(
    pool: ChunkPool, serve: Serve, file: Path, script: Callable[[Peer], None]
) -> None:
    server = serve(script)

    with pytest.raises(TooSlow, match=f"of {len(BODY)} bytes so far"):
        await fetch(pool, server.url, file, is_hopeless=lambda elapsed_s: elapsed_s > 0.1)

    eventually(lambda: server.ended == 1, "the connection ends")


async def test_what_was_given_up_writes_no_more(
    pool: ChunkPool, serve: Serve, file: Path, caplog: pytest.LogCaptureFixture
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
    first = asyncio.create_task(fetch(pool, slow.url, file))
    async with asyncio.timeout(20):
        await started.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first

    file.write_bytes(b"")
    assert file.read_bytes() == b""
    await fetch(pool, good.url, file)

    eventually(lambda: slow.ended == 1, "the first connection ends")
    assert file.read_bytes() == BODY
    gc.collect()
    assert not caplog.records  # nothing was left that nobody looked at


# --- answers that are refused


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
        (saying(f"HTTP/1.1 200 OK\nContent-Length: {10**14}\n\n"), Lie, "bytes that are not"),
        (saying("HTTP/1.1 200 OK\n\n", BODY), Fault, "does not tell the length"),
        (saying("HTTP/1.1 404 Not Found\nContent-Length: 0\n\n"), NotThere, "404"),
        (saying("HTTP/1.1 500 Oh\nContent-Length: 0\n\n"), Fault, "status 500"),
        (saying("HTTP/1.1 302 Found\nLocation: http://127.0.0.1/\n\n"), Fault, "status 302"),
        (saying("HTTP/1.1 100 Continue\n\n"), Fault, "status 100"),
        (saying(f"{OK}Content-Encoding: gzip\n\n"), Fault, "content-encoding"),
        (saying(f"{OK}Transfer-Encoding: chunked\n\n"), Fault, "transfer-encoding"),
        (saying(f"{OK}X: {'y' * 20_000}\n\n"), Fault, "bytes of headers"),
        (saying(OK + "".join(f"X-{i}: y\n" for i in range(5000)) + "\n"), Fault, "of headers"),
        (saying("SSH-2.0-OpenSSH_9.9\n\n"), Fault, "does not speak HTTP/1.1"),
    ],
)
async def test_a_bad_answer_is_refused(
    pool: ChunkPool,
    serve: Serve,
    file: Path,
    script: Callable[[Peer], None],
    kind: type[Fault],
    said: str,
) -> None:
    server = serve(script)

    with pytest.raises(Fault, match=said) as raised:
        await fetch(pool, server.url, file)

    assert type(raised.value) is kind
    eventually(lambda: server.ended == 1, "the connection ends")


@pytest.mark.parametrize("length", [len(BODY) - 1, len(BODY) + 1])
async def test_a_body_of_the_wrong_length_is_not_even_read(
    pool: ChunkPool, serve: Serve, file: Path, length: int
) -> None:
    server = serve(saying(f"HTTP/1.1 200 OK\nContent-Length: {length}\n\n", BODY))

    with pytest.raises(Lie):
        await fetch(pool, server.url, file)

    assert file.read_bytes() == b""


async def test_a_server_may_ask_for_patience(pool: ChunkPool, serve: Serve, file: Path) -> None:
    server = serve(saying("HTTP/1.1 429 Slow down\nRetry-After: 7\n\n"))

    with pytest.raises(Busy) as raised:
        await fetch(pool, server.url, file)

    assert raised.value.retry_after_s == 7


def reset_in_the_body(peer: Peer) -> None:
    peer.read_request()
    peer.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY[:1000])
    peer.reset()


def closed_in_the_head(peer: Peer) -> None:
    peer.read_request()
    peer.send(b"HTTP/1.1 200 OK\r\nContent-")


def closed_in_the_body(peer: Peer) -> None:
    peer.read_request()
    peer.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY[:1000])


def closed_at_once(peer: Peer) -> None:
    return


def reset_at_once(peer: Peer) -> None:
    peer.read_request()
    peer.reset()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (reset_in_the_body, r"byte|ConnectionReset"),
        (closed_in_the_body, f"at byte 1000 of {len(BODY)}"),
        (closed_in_the_head, "at the headers"),
        (closed_at_once, r"closed the connection|ConnectionReset|BrokenPipe"),
        (reset_at_once, "ConnectionReset"),
    ],
)
async def test_an_answer_that_breaks_off_is_a_fault(
    pool: ChunkPool, serve: Serve, file: Path, script: Callable[[Peer], None], said: str
) -> None:
    server = serve(script)

    with pytest.raises(Fault, match=said):
        await fetch(pool, server.url, file)

    assert server.connections == 1


async def test_nobody_there_is_a_fault(pool: ChunkPool, serve: Serve, file: Path) -> None:
    server = serve(honest)
    server.stop()

    with pytest.raises(Fault, match="cannot connect: ConnectionRefused"):
        await fetch(pool, server.url, file)


async def test_a_name_that_is_nobodys_is_a_fault(pool: ChunkPool, file: Path) -> None:
    with pytest.raises(Fault, match=r"gaierror|UnicodeError"):
        await fetch(pool, f"http://{'a' * 70}.invalid", file)


async def test_a_file_that_cannot_be_written_is_not_blamed_on_the_server(
    pool: ChunkPool, serve: Serve, tmp_path: Path
) -> None:
    server = serve(honest)

    with pytest.raises(FileNotFoundError):
        await fetch(pool, server.url, tmp_path / "none")
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match=os.strerror(28)):
            await fetch(pool, server.url, Path("/dev/full"))


async def test_no_proxy_of_the_environment_is_used(
    pool: ChunkPool, serve: Serve, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, server = serve(silent), serve(honest)
    monkeypatch.setenv("http_proxy", proxy.url)

    await fetch(pool, server.url, file)

    assert proxy.connections == 0


async def test_a_cancellation_is_not_lost_while_a_thread_ends(
    pool: ChunkPool, serve: Serve, file: Path
) -> None:
    """It comes in the moment in which the attempt is given up for another reason."""
    server = serve(silent)

    def cancel_too(elapsed_s: float) -> bool:
        asyncio.get_running_loop().call_soon(task.cancel)
        return True

    task = asyncio.create_task(fetch(pool, server.url, file, is_hopeless=cancel_too))

    with pytest.raises(asyncio.CancelledError):
        await task

    eventually(lambda: server.ended == 1, "the connection ends")
