"""Asks server after server until an answer holds or the time is up."""

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
    """Bytes that came; kept by who makes the request."""


class Asker:
    """Turns to the best of several servers for everything that is wanted.

    Args:
        urls: their base URLs.
        most: requests for chunks under way at a time, over all servers.
    """

    def __init__(self, urls: Sequence[str], most: int) -> None:
        self.upstreams = Upstreams(urls, most)
        self._turn = asyncio.Lock()
        """Who wants a chunk is served in the order of coming: the first chunks come first."""
        self._ended = asyncio.Event()
        """Set, and replaced, whenever a request ends: there may be room now."""

    async def ask(
        self,
        what: str,
        make: Callable[[Attempt], Awaitable[T]],
        deadline: float,
        *,
        size: int = 0,
        patient: bool = True,
    ) -> T:
        """The first result of `make` that is no Fault.

        Args:
            what: is wanted, for messages.
            make: asks one server; must end by itself soon after the deadline.
            deadline: of the monotonic clock.
            size: bytes of a chunk; 0 for what is small and waits for no room.
            patient: False ends the search as soon as no server has it.

        Raises:
            UserError: not to be had in time; names every server and its fault.
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
                if not patient and len(wanted.missing) == len(servers):
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
        """A server to ask now, in the books already; None where none is before the deadline."""
        if time.monotonic() >= deadline:  # the time-out below ends waits, and there may be none
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
