"""One chunk over one connection, from servers that do nothing wrong."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from broadcast.chunk_transfer import Transfer, fetch_chunk
from broadcast.fetcher import MOST_CHUNKS
from broadcast.manifest import Chunk
from broadcast.transport import Access, new_session
from runspec.core.hashing import digest_bytes
from tests.broadcast.chunks.fetching import BODY, fetch, honest, silent
from tests.broadcast.scripted import Peer, Serve
from tests.waiting import eventually


async def test_a_chunk_lands_at_its_place_and_nowhere_else(
    session: aiohttp.ClientSession, serve: Serve, file: Path
) -> None:
    file.write_bytes(b"a" * 7 + b"?" * len(BODY) + b"z" * 5)

    await fetch(session, serve(honest).url, file, offset=7)

    assert file.read_bytes() == b"a" * 7 + BODY + b"z" * 5


async def test_chunks_that_follow_one_another_share_a_connection(
    session: aiohttp.ClientSession, serve: Serve, file: Path
) -> None:
    server = serve(honest)

    for _ in range(3):
        await fetch(session, server.url, file)

    assert server.connections == 1


async def test_as_many_chunks_as_are_allowed_come_at_a_time(
    session: aiohttp.ClientSession, serve: Serve, tmp_path: Path
) -> None:
    everyone = asyncio.Event()
    loop = asyncio.get_running_loop()
    waiting = []

    def all_at_once(peer: Peer) -> None:
        peer.read_request()
        waiting.append(peer)
        if len(waiting) == MOST_CHUNKS:
            loop.call_soon_threadsafe(everyone.set)
        peer.wait_for_the_end()

    server = serve(all_at_once)
    files = [tmp_path / str(i) for i in range(MOST_CHUNKS)]
    for path in files:
        path.touch()
    tasks = [asyncio.create_task(fetch(session, server.url, path)) for path in files]
    async with asyncio.timeout(20):
        await everyone.wait()  # and the loop is free to see it

    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(error, asyncio.CancelledError) for error in ended)
    eventually(lambda: server.ended == MOST_CHUNKS, "every connection ends")


async def test_the_request_asks_below_the_prefix_and_for_the_bytes_as_they_are(
    serve: Serve, file: Path
) -> None:
    heads = []

    def listen(peer: Peer) -> None:
        heads.append(peer.read_request())
        peer.answer(BODY)

    server = serve(listen)
    async with new_session(Access(token="open-sesame")) as session:
        await fetch(session, f"{server.url}/some/prefix", file)

    first, *lines = heads[0].decode().split("\r\n")
    assert first == "GET /some/prefix/demo/chunks/x HTTP/1.1"
    assert f"Host: 127.0.0.1:{server.port}" in lines
    assert "Accept-Encoding: identity" in lines
    assert "Authorization: Bearer open-sesame" in lines


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
    session: aiohttp.ClientSession, serve: Serve, file: Path, script: Callable[[Peer], None]
) -> None:
    server = serve(script)

    for _ in range(3):
        file.write_bytes(b"")
        await fetch(session, server.url, file)
        assert file.read_bytes() == BODY

    assert server.connections == 3


async def test_a_small_chunk_may_come_in_one_piece_with_its_head(
    session: aiohttp.ClientSession, serve: Serve, file: Path
) -> None:
    def answer(peer: Peer) -> None:
        while peer.read_request():
            peer.answer(b"small")

    server = serve(answer)
    for _ in range(2):
        transfer = Transfer(Chunk(digest_bytes(b"small"), 5), file, 0)
        await fetch_chunk(session, f"{server.url}/x", transfer, timeout_s=20)

    assert file.read_bytes() == b"small"
    assert server.connections == 1
