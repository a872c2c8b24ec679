"""Servers that waste time, and attempts that are given up: both end when they should."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from broadcast.transport import Fault, TooSlow
from tests.broadcast.chunks.fetching import BODY, fetch, honest, silent
from tests.broadcast.scripted import Peer, Serve
from tests.waiting import eventually


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
    session: aiohttp.ClientSession, serve: Serve, file: Path, script: Callable[[Peer], None]
) -> None:
    server = serve(script)

    with pytest.raises(Fault, match=f"of {len(BODY)} bytes within 0.3 s"):
        await fetch(session, server.url, file, timeout_s=0.3)

    eventually(lambda: server.ended == 1, "the connection ends")


@pytest.mark.parametrize("script", WASTERS)
async def test_who_wastes_time_is_left_when_others_are_better(
    session: aiohttp.ClientSession, serve: Serve, file: Path, script: Callable[[Peer], None]
) -> None:
    server = serve(script)

    with pytest.raises(TooSlow, match=f"of {len(BODY)} bytes so far"):
        await fetch(session, server.url, file, is_hopeless=lambda elapsed_s: elapsed_s > 0.1)

    eventually(lambda: server.ended == 1, "the connection ends")


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
