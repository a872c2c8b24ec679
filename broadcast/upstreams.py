"""Choice of the server for the next request: the one expected to answer first.

Strangers' servers are asked for chunks only, and never again after a lie.

Only `Requester` does IO. To all else the caller passes the time, in seconds of a monotonic clock.
Sizes are bytes.

A server's rate is measured over all its concurrent requests. Each request is charged its share of
the seconds in which the server worked for us: with four requests under way, a second costs each of
them a quarter. The rate is received bytes divided by charged seconds; recent ones weigh most.

Measurements lose weight while a server is idle: the expected speed doubles every `HEAL_S`. So a
server that was slow or broken is tried again after some time, but rarely if the others are good.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from broadcast.transport import Attempt, Busy, Fault, Lie, NotThere, TooSlow
from runspec.core.errors import UserError
from runspec.core.http_client import pause_s

RETRY_S = (0.1, 2.0)
"""First and longest pause after consecutive failures of a server; each doubles the last."""
RECENT_S = 5.0
"""Seconds for which a fault is kept for messages if the same request then times out."""
DISTRUST_S = 60.0
"""Seconds for which a server that sent wrong data is used only if no other one is left."""
HEAL_S = 5.0
"""Idle seconds after which the expected speed of a server doubles."""
BUSY_S = (1.0, 30.0)
"""Pause after a 429 without Retry-After, and the longest pause that is obeyed."""
AHEAD_S = 0.5
"""Data that may be under way from one server, in seconds at its rate."""
AHEAD = (2, 8)
"""Fewest and most requests under way from one server, whatever its rate is.

With few requests a slow link delivers the first chunks first. With two, the next one is always
waiting when one ends.
"""
SLOW_AFTER_S = 2.0
"""Seconds after which an unfinished request may count as slow."""
_MEMORY_S = 3.0
"""Busy seconds after which the weight of a measurement falls to about a third."""
_SLOWEST = 1024 * 1024
"""Lowest rate that is assumed of a server, in bytes per second."""
MOST_STRANGERS = 8
"""Strangers' servers of one client; each client draws its own, so that load is spread."""
_LEAST_SUCCESS = 1 / 64
"""Lowest share of successes that is assumed; from it a server recovers within about a minute."""
T = TypeVar("T")
_LOOK_AGAIN_S = 1.0
_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Upstream:
    """One server and its measured quality."""

    url: str
    stranger: bool = False
    """It serves nothing but chunks, without a token; see `Upstreams.set_strangers`."""
    failures: int = 0
    """Consecutive failures. Failures during the pause after a failure are not counted."""
    retry_at: float = 0.0
    distrusted_until: float = 0.0
    last_fault: str = "not asked yet"
    under_way: list[Attempt] = field(default_factory=list)
    """Requests that have not ended."""
    success: float = 1.0
    """Share of successful requests; the last request has weight one half."""
    _ended_bytes: int = 0
    """Bytes received by all requests that ended."""
    _bytes: float = 0.0
    _seconds: float = 0.0
    _charged_s: float = 0.0
    _at: float = 0.0
    _fault_at: float = -math.inf

    @property
    def rate(self) -> float | None:
        """Bytes per second of all requests together; None if nothing was ever received."""
        return self._bytes / self._seconds if self._seconds else None

    @property
    def in_flight(self) -> int:
        return len(self.under_way)

    @property
    def in_flight_bytes(self) -> int:
        return sum(attempt.size for attempt in self.under_way)

    @property
    def received(self) -> int:
        """Bytes of chunks received from it so far; any thread may ask."""
        return self._ended_bytes + sum(attempt.received for attempt in tuple(self.under_way))

    def started(self, now: float, size: int) -> Attempt:
        """Note the start of a request for `size` bytes."""
        self._charge(now)
        self.under_way.append(Attempt(size, self._charged_s))
        return self.under_way[-1]

    def ended(self, now: float, attempt: Attempt) -> None:
        """Note the end of a request, successful or not.

        The rate is updated if bytes of a chunk were received, or none for a long time. Refusals and
        small answers do not change it.
        """
        self._charge(now)
        received = attempt.received
        self._ended_bytes += received
        self.under_way.remove(attempt)
        share_s = self._charged_s - attempt.charged_s
        if attempt.size and (received or share_s > SLOW_AFTER_S / 2):
            fade = math.exp(-share_s / _MEMORY_S)
            # In a long request the early seconds weigh less than the late ones.
            weight = (1 - fade) * _MEMORY_S / share_s if share_s else 0.0
            self._bytes = self._bytes * fade + received * weight
            self._seconds = self._seconds * fade + share_s * weight

    def succeeded(self) -> None:
        self.failures = 0
        self.success = (1 + self.success) / 2

    def failed(self, now: float, fault: Fault, what: str, log: logging.Logger) -> None:
        """Note a failed request; the server pauses unless the fault is NotThere or TooSlow.

        A stranger pauses after NotThere too, and no fault is excused: else it could delay every
        chunk by a refusal.
        """
        self.noted(now, fault, what, log)
        if isinstance(fault, NotThere) and not self.stranger:
            return
        pausing = now < self.retry_at  # concurrent requests fail together: they count once
        if isinstance(fault, Busy) or not (pausing or isinstance(fault, TooSlow)):
            self.retry_at = max(self.retry_at, now + pause_after(fault, self.failures))
        if self.stranger or not isinstance(fault, Busy):
            self.failures += not pausing
            self.success = max(self.success / 2, _LEAST_SUCCESS)

    def noted(self, now: float, fault: Fault, what: str, log: logging.Logger) -> None:
        """Store a fault for messages; log every lie, and other faults when they are new.

        A timeout does not replace a recent fault of the same request.
        """
        text = f"{what}: {fault}"
        just_before = now - self._fault_at < RECENT_S and self.last_fault.startswith(f"{what}: ")
        if isinstance(fault, TooSlow) and just_before:
            return
        if isinstance(fault, Lie):
            self.distrusted_until = math.inf if self.stranger else now + DISTRUST_S
            log.warning("%s sent something wrong: %s; avoiding it", self.url, text)
        elif text != self.last_fault and not isinstance(fault, NotThere | Busy):
            log.warning("%s: %s", self.url, text)
        self.last_fault, self._fault_at = text, now

    def expected_s(self, now: float, size: int) -> float:
        """Return the seconds until `size` more bytes are here, after all that is under way."""
        if self.rate is None and self.success == 1.0:  # unknown: try it with one request first
            return math.inf if self.in_flight else 0.0
        rate = max(self.rate or 0.0, _SLOWEST)
        # At least one byte, so that small requests go to the best server and not to any idle one.
        return (self.in_flight_bytes + max(size, 1)) / (rate * self.success * self._hope(now))

    def has_room(self, size: int) -> bool:
        """Return whether the server may get another request for a chunk now."""
        fewest, most = AHEAD
        ahead = (self.rate or 0.0) * AHEAD_S
        return self.in_flight < fewest or (
            self.in_flight < most and self.in_flight_bytes + size <= ahead
        )

    def _charge(self, now: float) -> None:
        if self.in_flight:
            self._charged_s += (now - self._at) / self.in_flight
        else:  # the longer the server was idle, the less its old measurements weigh
            hope = self._hope(now)
            self._bytes /= hope
            self._seconds /= hope
        self._at = now

    def _hope(self, now: float) -> float:
        """Return the factor by which the server may have become faster while it was idle."""
        idle_s = 0.0 if self.in_flight else now - self._at
        return 2 ** min(idle_s / HEAL_S, 100.0)


@dataclass
class Wanted:
    """Something that is requested until it arrives, with the results of its requests so far."""

    size: int = 0
    """Bytes of a chunk; 0 for small things, which need not wait for room."""
    shunned: set[Upstream] = field(default_factory=set)
    """Servers that sent wrong data or were too slow; used only if no other one is left."""
    missing: dict[Upstream, int] = field(default_factory=dict)
    """Number of 404 answers of each server."""
    _not_before: dict[Upstream, float] = field(default_factory=dict)

    def failed(self, now: float, upstream: Upstream, fault: Fault) -> None:
        if isinstance(fault, Lie | TooSlow):
            self.shunned.add(upstream)
        if isinstance(fault, NotThere):
            times = self.missing.get(upstream, 0)
            self._not_before[upstream] = now + pause_after(fault, times)
            self.missing[upstream] = times + 1

    def ready_at(self, upstream: Upstream) -> float:
        return max(upstream.retry_at, self._not_before.get(upstream, 0.0))


@dataclass(frozen=True)
class Choice:
    """The server for a request; if `upstream` is None, the request must wait."""

    upstream: Upstream | None
    pause_s: float = 0.0
    """Seconds until a server may be asked again; 0 if the best server has no room."""


class Upstreams:
    """The servers of one client or relay.

    Args:
        urls: their base URLs.
        most: requests for chunks under way at a time, over all servers.
    """

    def __init__(self, urls: Sequence[str], most: int) -> None:
        self.all = [Upstream(url) for url in dict.fromkeys(urls)]
        self.own = tuple(self.all)
        """The servers that are no strangers."""
        self.removed_bytes = 0
        """Bytes of chunks received from servers that were removed."""
        self._most = most

    def set_strangers(self, urls: Collection[str]) -> None:
        """Replace the strangers: keep those in use that are listed, and draw others by lot.

        Those that lied stay, because they are not asked again; so do those that serve just now.
        """
        kept = [
            u
            for u in self.all
            if not u.stranger or u.url in urls or u.in_flight or u.distrusted_until
        ]
        self.removed_bytes += sum(u.received for u in self.all if u not in kept)
        new = [*set(urls) - {u.url for u in kept}]
        used = sum(u.stranger and not u.distrusted_until for u in kept)
        drawn = random.sample(new, min(len(new), max(0, MOST_STRANGERS - used)))
        self.all = [*kept, *(Upstream(url, stranger=True) for url in drawn)]

    def choose(self, now: float, wanted: Wanted) -> Choice:
        """Choose the server that is expected to answer first, among those that need no pause.

        A shunned or distrusted server is chosen only if no other one is ready. If the best server
        has no room, the request waits for it, because the others are expected to take longer.
        """
        able = self._able(now, wanted)
        ready = [u for u in able if wanted.ready_at(u) <= now]
        if not ready:
            return Choice(None, min(wanted.ready_at(u) for u in able) - now)
        best = min(
            ready,
            key=lambda u: (
                u in wanted.shunned,
                u.distrusted_until > now,
                u.expected_s(now, wanted.size),
                u.in_flight,
            ),
        )
        full = sum(u.in_flight for u in self.all) >= self._most or not best.has_room(wanted.size)
        return Choice(None if wanted.size and full else best)

    def is_hopeless(
        self, now: float, wanted: Wanted, upstream: Upstream, received: int, elapsed_s: float
    ) -> bool:
        """Return whether another server would send all long before this one sends the rest."""
        if elapsed_s < SLOW_AFTER_S:
            return False
        here_s = (wanted.size - received) * elapsed_s / max(received, 1)
        others = [
            u.expected_s(now, wanted.size)
            for u in self._able(now, wanted)
            if u is not upstream
            and u.rate is not None
            and wanted.ready_at(u) <= now
            and u.distrusted_until <= now
            and u not in wanted.shunned
        ]
        return here_s > SLOW_AFTER_S + 3 * min(others, default=math.inf)

    def _able(self, now: float, wanted: Wanted) -> list[Upstream]:
        """Return the servers that may be asked for it at all."""
        return [u for u in self.all if not u.stranger or (wanted.size and not u.distrusted_until)]

    def faults(self) -> str:
        """Return the last fault of each server, for a message."""
        return "; ".join(f"{u.url}: {u.last_fault}" for u in self.all)


def pause_after(fault: Fault, before: int) -> float:
    """Return the seconds to pause after a fault, which occurred `before` times before."""
    first, longest = RETRY_S
    if isinstance(fault, Busy):
        usual, most = BUSY_S
        return usual if fault.retry_after_s is None else min(max(fault.retry_after_s, first), most)
    return pause_s(before, first, longest)


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
        make: Callable[[Upstream, Wanted, Attempt], Awaitable[T]],
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
        servers = set(self.upstreams.own)
        while (upstream := await self._next(wanted, deadline)) is not None:
            attempt = upstream.started(time.monotonic(), size)
            try:
                result = await make(upstream, wanted, attempt)
            except Fault as fault:
                upstream.failed(time.monotonic(), fault, what, _LOG)
                wanted.failed(time.monotonic(), upstream, fault)
                if not keep_asking and wanted.missing.keys() >= servers:
                    break
            else:
                upstream.succeeded()
                return result
            finally:
                upstream.ended(time.monotonic(), attempt)
                self._ended.set()
                self._ended = asyncio.Event()
        raise UserError(
            f"no {what} after {time.monotonic() - started:.1f} s",
            place=self.upstreams.faults(),
            remedy="check that these servers are up and have the version, or name others",
        )

    async def _next(self, wanted: Wanted, deadline: float) -> Upstream | None:
        """Choose a server; None if none is free before the deadline."""
        if time.monotonic() >= deadline:  # the timeout below ends only waits
            return None
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):  # the loop's clock is the monotonic one
                while True:
                    async with self._turn if wanted.size else nullcontext():
                        choice = await self._choice(wanted)
                    now = time.monotonic()
                    if choice.upstream is not None:
                        return choice.upstream
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
