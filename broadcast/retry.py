"""Requests to several servers: the best one first, then others, until an answer is valid."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

from broadcast.transport import Fault
from broadcast.upstreams import Choice, Ticket, Upstream, Upstreams, Wanted
from runspec.core.errors import UserError

T = TypeVar("T")
_LOOK_AGAIN_S = 1.0
_LOG = logging.getLogger(__name__)


@dataclass
class Attempt:
    """One request to one server."""

    upstream: Upstream
    wanted: Wanted
    ticket: Ticket
    received: int = 0
    """Bytes received; updated by the one who makes the request."""


class Requester:
    """Sends each request to the best of several servers, and to another one after a fault.

    Args:
        urls: their base URLs.
        most: requests for chunks under way at a time, over all servers.
    """

    def __init__(self, urls: Sequence[str], most: int) -> None:
        self.upstreams = Upstreams(urls, most)
        self._turn = asyncio.Lock()
        """Serves requests for chunks in order of arrival: the first chunks come first."""
        self._ended = asyncio.Event()
        """Set, and replaced, whenever a request ends: a server may have room now."""

    async def request(
        self,
        what: str,
        make: Callable[[Attempt], Awaitable[T]],
        deadline: float,
        *,
        size: int = 0,
        keep_asking: bool = True,
    ) -> T:
        """Return the first result of `make` that is no Fault.

        Args:
            what: name of what is requested, for messages.
            make: sends one request; must end by itself soon after the deadline.
            deadline: of the monotonic clock.
            size: bytes of a chunk; 0 for small things, which do not wait for room.
            keep_asking: False ends the search once every server answered 404.

        Raises:
            UserError: no valid answer in time; names every server and its fault.
        """
        started = time.monotonic()
        wanted = Wanted(size)
        servers = self.upstreams.all
        while (attempt := await self._next(wanted, deadline)) is not None:
            try:
                result = await make(attempt)
            except Fault as fault:
                attempt.upstream.failed(time.monotonic(), fault, what, _LOG)
                wanted.failed(time.monotonic(), attempt.upstream, fault)
                if not keep_asking and len(wanted.missing) == len(servers):
                    break
            else:
                attempt.upstream.succeeded()
                return result
            finally:
                attempt.upstream.ended(time.monotonic(), attempt.ticket, attempt.received)
                self._ended.set()
                self._ended = asyncio.Event()
        raise UserError(
            f"no {what} after {time.monotonic() - started:.1f} s",
            place=self.upstreams.faults(),
            remedy="check that these servers are up and have the version, or name others",
        )

    async def _next(self, wanted: Wanted, deadline: float) -> Attempt | None:
        """Choose a server and note the request; None if none is free before the deadline."""
        if time.monotonic() >= deadline:  # the timeout below ends only waits
            return None
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):  # the loop's clock is the monotonic one
                while True:
                    async with self._turn if wanted.size else nullcontext():
                        choice = await self._choice(wanted)
                    now = time.monotonic()
                    if choice.upstream is not None:
                        ticket = choice.upstream.started(now, wanted.size)
                        return Attempt(choice.upstream, wanted, ticket)
                    if now + choice.pause_s > deadline:
                        return None
                    await asyncio.sleep(choice.pause_s)
        return None

    async def _choice(self, wanted: Wanted) -> Choice:
        while True:
            choice = self.upstreams.choose(time.monotonic(), wanted)
            if choice.upstream is not None or choice.pause_s > 0:
                return choice
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    await self._ended.wait()
