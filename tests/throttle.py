"""Links of a stated rate: TCP proxies that pass on so many bits a second each way, and no more.

    python -m tests.throttle 200e6 127.0.0.1:8080 127.0.0.1:8080 --round-trip 0.1

carries a link of its own to each server named and prints their URLs, one a line. All connections
of a link share its rate, each direction for itself, as on a machine with one network card. What is
sent arrives half a round trip later, and a new connection costs a round trip; TCP's slow start is
not imitated.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Sequence
from contextlib import closing, suppress

BURST_S = 0.1
"""A link that was idle may first pass what it carries in this time; on a busy machine, a loop
that wakes late by less than this loses nothing."""
_READ_BYTES = 128 * 1024
_FLYING = 8
"""Reads that may be under way at a time in one direction of a connection."""
_SOCKET_BUFFER_BYTES = 512 * 1024
"""Small, so that a sender learns soon that the link is full: a longer queue would be a faster
link to whoever gives up halfway."""


class Bucket:
    """A token bucket: within any t seconds at most `burst_bytes + rate * t` bytes pass.

    Args:
        rate: bytes a second.
        burst_bytes: what may pass at once after an idle time.
        now: seconds of the clock that `wait` is asked with.
    """

    def __init__(self, rate: float, burst_bytes: float, now: float) -> None:
        self._rate = rate
        self._burst_s = burst_bytes / rate
        self._paid_until = now - self._burst_s

    def wait(self, size: int, now: float) -> float:
        """Takes `size` bytes, after all that were taken before; seconds until they may pass."""
        self._paid_until = max(self._paid_until, now - self._burst_s) + size / self._rate
        return max(0.0, self._paid_until - now)


class Link:
    """A listening port whose connections lead to one server; made inside an event loop.

    Args:
        host, port: the server behind it.
        bits_per_s: rate of each direction.
        burst_s: see `BURST_S`.
        round_trip_s: of a byte and its answer.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        bits_per_s: float,
        burst_s: float = BURST_S,
        round_trip_s: float = 0.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        rate = bits_per_s / 8
        self._up = Bucket(rate, rate * burst_s, self._loop.time())
        self._down = Bucket(rate, rate * burst_s, self._loop.time())
        self._behind, self._round_trip_s = (host, port), round_trip_s
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    async def run(self) -> None:
        """Carries until it is cancelled."""
        with closing(self._listener):
            async with asyncio.TaskGroup() as group:
                while True:
                    connection, _ = await self._loop.sock_accept(self._listener)
                    group.create_task(self._connect(connection))

    async def _connect(self, near: socket.socket) -> None:
        with closing(near), closing(socket.socket()) as far:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            for end in (near, far):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # An end that breaks off takes the other with it, as a broken link does.
            with suppress(OSError, ExceptionGroup):
                await asyncio.sleep(self._round_trip_s)
                await self._loop.sock_connect(far, self._behind)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._carry(near, far, self._up))
                    both.create_task(self._carry(far, near, self._down))

    async def _carry(self, source: socket.socket, sink: socket.socket, bucket: Bucket) -> None:
        flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_FLYING)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._land(flying, sink))
            data = None
            while data != b"":
                data = await self._loop.sock_recv(source, _READ_BYTES)
                wait_s = bucket.wait(len(data), self._loop.time())
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                await flying.put((self._loop.time() + self._round_trip_s / 2, data))

    async def _land(self, flying: asyncio.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        """Passes on what has left when it is due; nothing more after the empty bytes."""
        while True:
            due, data = await flying.get()
            wait_s = due - self._loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            await self._loop.sock_sendall(sink, data)


async def carry(addresses: Sequence[str], bits_per_s: float, round_trip_s: float) -> None:
    """A link to each `HOST:PORT`, until it is cancelled."""
    links = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        link = Link(host, int(port), bits_per_s=bits_per_s, round_trip_s=round_trip_s)
        links.append(link)
    print(*(link.url for link in links), sep="\n", flush=True)
    await asyncio.gather(*(link.run() for link in links))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bits_per_s", type=float)
    parser.add_argument("addresses", nargs="+", metavar="HOST:PORT")
    parser.add_argument("--round-trip", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run(carry(options.addresses, options.bits_per_s, options.round_trip))


if __name__ == "__main__":
    main()
