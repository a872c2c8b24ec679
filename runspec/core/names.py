"""Addresses of servers by name, looked up where nobody need wait for the end of it.

A resolver may keep a thread for half a minute. Threads of an executor are waited for when an event
loop or the process ends; these are not.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

_Found = Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]]


async def look_up(host: str, port: int, family: socket.AddressFamily = socket.AF_UNSPEC) -> _Found:
    """As `socket.getaddrinfo` for streams.

    Raises:
        OSError, UnicodeError: there is no such name, or nobody to ask.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_Found] = loop.create_future()

    def settle(found: _Found, error: Exception | None) -> None:
        if answer.done():  # nobody waits any more
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(found)

    def work() -> None:
        found: _Found = []
        failure = None
        try:
            found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, found, failure)

    threading.Thread(target=work, name="look-up", daemon=True).start()
    return await answer


class Resolver(AbstractResolver):
    """The same for aiohttp."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address[0],
                port=address[1],
                family=found,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for found, _, protocol, _, address in await look_up(host, port, family)
        ]

    async def close(self) -> None:
        """Nothing is kept."""
