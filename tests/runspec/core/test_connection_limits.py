"""Limits of connections: which is closed for a new one, which is refused, what is reported."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing

from aiohttp import web

from runspec.core.connection_limits import (
    ConnectionLimiter,
    ConnectionLimits,
    answering,
    connection_of,
)

LOG = logging.getLogger(__name__)
ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
DEADLINE_S = 30.0
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """A server whose answers wait until they are let go."""

    def __init__(self) -> None:
        self.go, self.asked = asyncio.Event(), 0
        self.dropped_for: list[str] = []
        self.malformed_as: list[int] = []
        self.limiter: ConnectionLimiter
        self.port = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        with connection_of(request).receiving():
            body = await request.text()
        await self.go.wait()
        return web.Response(text=body or "done")

    def dropped(self, why: str) -> None:
        self.dropped_for.append(why)

    def malformed(self, status: int) -> None:
        self.malformed_as.append(status)

    async def connect(self, say: bytes = b"") -> Stream:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(say)
        return reader, writer


@asynccontextmanager
async def served(
    *, connections: int = 8, idle_s: float = DEADLINE_S, head_s: float = DEADLINE_S
) -> AsyncIterator[Served]:
    it = Served()
    application = web.Application(middlewares=[answering])
    application.router.add_route("*", "/", it.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    assert runner.server is not None
    limits = ConnectionLimits(connections, idle_s, head_s, header_bytes=4096)
    it.limiter = ConnectionLimiter(runner.server, limits, it, LOG)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.setblocking(False)
        it.port = listener.getsockname()[1]
        it.limiter.open(listener)
        async with asyncio.timeout(DEADLINE_S):
            try:
                yield it
            finally:
                await it.limiter.close()
                await runner.cleanup()
                await it.limiter.abandon()


async def rest(stream: Stream) -> bytes:
    try:
        return await stream[0].read()
    except ConnectionResetError:
        return b""
    finally:
        stream[1].close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def test_the_longest_idle_makes_room_and_who_is_answered_is_not_cut_off() -> None:
    async with served(connections=2) as it:
        # given a server that is full, of one that is being answered and one that does nothing
        busy = await it.connect(ASK)
        await until(lambda: it.asked == 1)
        idle = await it.connect()
        await until(lambda: len(it.limiter) == 2)
        # when another comes, then the idle one makes room
        second = await it.connect(ASK)
        assert await rest(idle) == b""
        await until(lambda: it.asked == 2)
        # and when all are being answered, the next is told to come again
        assert (await rest(await it.connect(ASK))).startswith(b"HTTP/1.1 503 ")
        it.go.set()
        for each in (busy, second):
            assert (await each[0].readline()).startswith(b"HTTP/1.1 200 ")
            each[1].close()
        assert it.dropped_for == ["room", "full"]


async def test_a_connection_whose_body_is_due_makes_room_and_one_that_is_answered_does_not() -> (
    None
):
    async with served(connections=2) as it:
        slow = await it.connect(ASK[:-2] + b"Content-Length: 4\r\n\r\nhal")
        busy = await it.connect(ASK[:-2] + b"Content-Length: 4\r\n\r\nhalf")
        await until(lambda: it.asked == 2)
        other = await it.connect(ASK)
        assert await rest(slow) == b""
        await until(lambda: it.asked == 3)
        it.go.set()
        for each in (busy, other):
            assert (await each[0].readline()).startswith(b"HTTP/1.1 200 ")
            each[1].close()
        assert it.dropped_for == ["room"]


async def test_half_a_head_and_an_idle_connection_end() -> None:
    async with served(head_s=0.2, idle_s=0.4) as it:
        assert await rest(await it.connect(ASK[:10])) == b""
        it.go.set()
        assert (await rest(await it.connect(ASK))).startswith(b"HTTP/1.1 200 ")
        assert it.dropped_for == ["late head", "idle"]
        assert len(it.limiter) == 0


async def test_malformed_requests_are_answered_and_witnessed() -> None:
    async with served() as it:
        chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
        for malformed in (b"\x00\x01\r\n\r\n", chunked):
            assert (await rest(await it.connect(malformed))).startswith(b"HTTP/1.0 400 ")
        assert it.malformed_as == [400, 400]
