"""Which server to ask next: the one from which the fewest seconds are expected, with healing.

All of it is plain data and a clock passed in: times are seconds of one monotonic clock, sizes are
bytes.

A server's rate is what it delivers to us over all requests under way. Each request is charged its
share of the seconds in which the server was busy for us (a second in which four were under way
costs each a quarter), and the rate is bytes by seconds charged, newest first.

What was learnt fades while a server is not asked: each `HEAL_S` doubles what is hoped of it. So a
server that was slow or broken is tried again in the end, and rarely where the others are good.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from broadcast.transport import Busy, Fault, Lie, NotThere, TooSlow

RETRY_S = (0.1, 2.0)
"""First and longest pause after consecutive failures of a server; each doubles the last."""
RECENT_S = 5.0
"""For so long a fault is the better message than a late answer to the same question."""
DISTRUST_S = 60.0
"""For how long a server that sent something wrong is asked only where no other is left."""
HEAL_S = 5.0
"""An idle while in which twice as much is hoped of a server as before."""
BUSY_S = (1.0, 30.0)
"""Pause after a 429 that names none, and the longest that is obeyed."""
AHEAD_S = 0.5
"""So much data may be under way from one server, in seconds at its rate, ..."""
AHEAD = (2, 8)
"""... but not fewer and not more requests than these: a thin link brings the first chunks first,
and has the next request waiting when one is done."""
SLOW_AFTER_S = 2.0
"""Seconds after which a request that is still under way may count as slow."""
_MEMORY_S = 3.0
"""Busy seconds after which a measurement counts a third."""
_SLOWEST = 1024 * 1024
_LEAST_SUCCESS = 1 / 64
"""Nobody is thought worse of than this, in bytes a second and in successes: so that hope can mend
it within about a minute."""


@dataclass(frozen=True)
class Ticket:
    """A request under way, as the server's books have it."""

    size: int
    charged_s: float


@dataclass(eq=False)
class Upstream:
    """One server and what is known of it."""

    url: str
    failures: int = 0
    """In a row; those that come during the pause after one count as that one."""
    retry_at: float = 0.0
    distrusted_until: float = 0.0
    last_fault: str = "not asked yet"
    in_flight: int = 0
    in_flight_bytes: int = 0
    received: int = 0
    """Bytes that came from it, over all requests that ended."""
    success: float = 1.0
    """Share of the requests that brought what was asked for, the last one counting a half."""
    _bytes: float = 0.0
    _seconds: float = 0.0
    _charged_s: float = 0.0
    _at: float = 0.0
    _fault_at: float = -math.inf

    @property
    def rate(self) -> float | None:
        """Bytes a second, all requests together; None where nothing ever came."""
        return self._bytes / self._seconds if self._seconds else None

    def started(self, now: float, size: int) -> Ticket:
        """Books a request for `size` bytes."""
        self._charge(now)
        self.in_flight += 1
        self.in_flight_bytes += size
        return Ticket(size, self._charged_s)

    def ended(self, now: float, ticket: Ticket, received: int) -> None:
        """Its end, whatever came of it; `received` are the bytes that came.

        A refusal says nothing of the rate, nor does a small answer. Silence does.
        """
        self._charge(now)
        self.in_flight -= 1
        self.in_flight_bytes -= ticket.size
        self.received += received
        share_s = self._charged_s - ticket.charged_s
        if ticket.size and (received or share_s > SLOW_AFTER_S / 2):
            fade = math.exp(-share_s / _MEMORY_S)
            # The early seconds of a long request have faded by its end, too.
            weight = (1 - fade) * _MEMORY_S / share_s if share_s else 0.0
            self._bytes = self._bytes * fade + received * weight
            self._seconds = self._seconds * fade + share_s * weight

    def succeeded(self) -> None:
        self.failures = 0
        self.success = (1 + self.success) / 2

    def failed(self, now: float, fault: Fault, what: str, log: logging.Logger) -> None:
        """Draws the consequences of a fault; one that is the server's own makes it pause."""
        self.noted(now, fault, what, log)
        if isinstance(fault, NotThere):
            return
        pausing = now < self.retry_at  # requests that were under way together fail together
        if isinstance(fault, Busy) or not (pausing or isinstance(fault, TooSlow)):
            self.retry_at = max(self.retry_at, now + pause_after(fault, self.failures))
        if not isinstance(fault, Busy):
            self.failures += not pausing
            self.success = max(self.success / 2, _LEAST_SUCCESS)

    def noted(self, now: float, fault: Fault, what: str, log: logging.Logger) -> None:
        """Remembers a fault for messages; a lie is logged at once, the rest when new.

        An attempt that a deadline cuts short does not replace what was wrong just before.
        """
        text = f"{what}: {fault}"
        just_before = now - self._fault_at < RECENT_S and self.last_fault.startswith(f"{what}: ")
        if isinstance(fault, TooSlow) and just_before:
            return
        if isinstance(fault, Lie):
            self.distrusted_until = now + DISTRUST_S
            log.warning("%s sent something wrong: %s; avoiding it", self.url, text)
        elif text != self.last_fault and not isinstance(fault, NotThere | Busy):
            log.warning("%s: %s", self.url, text)
        self.last_fault, self._fault_at = text, now

    def expected_s(self, now: float, size: int) -> float:
        """Seconds until `size` more bytes are here, behind what is under way."""
        if self.rate is None and self.success == 1.0:  # to be tried, by one request at first
            return math.inf if self.in_flight else 0.0
        rate = max(self.rate or 0.0, _SLOWEST)
        # What is small comes from the best, too, not from whoever is idle.
        return (self.in_flight_bytes + max(size, 1)) / (rate * self.success * self._hope(now))

    def has_room(self, size: int) -> bool:
        """Whether another chunk should be asked for before one of those under way is here."""
        fewest, most = AHEAD
        ahead = (self.rate or 0.0) * AHEAD_S
        return self.in_flight < fewest or (
            self.in_flight < most and self.in_flight_bytes + size <= ahead
        )

    def _charge(self, now: float) -> None:
        if self.in_flight:
            self._charged_s += (now - self._at) / self.in_flight
        else:  # the longer ago, the less it counts beside what comes now
            hope = self._hope(now)
            self._bytes /= hope
            self._seconds /= hope
        self._at = now

    def _hope(self, now: float) -> float:
        """How many times better than before it may be now; grows while it is not asked."""
        idle_s = 0.0 if self.in_flight else now - self._at
        return 2 ** min(idle_s / HEAL_S, 100.0)


@dataclass
class Wanted:
    """Something asked for until it is had, and its own experience with the servers."""

    size: int = 0
    """Bytes; 0 for what is so small that it need not wait for room."""
    shunned: set[Upstream] = field(default_factory=set)
    """Lied about it or were too slow with it: asked only where no other is left."""
    missing: dict[Upstream, int] = field(default_factory=dict)
    """How often each said that it has no such thing."""
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
    """The server to ask now; or, where `upstream` is None, what to wait for."""

    upstream: Upstream | None
    pause_s: float = 0.0
    """Until a server may be asked again; 0 where all that lacks is room."""


class Upstreams:
    """The servers that one client or relay knows.

    Args:
        urls: their base URLs.
        most: requests for chunks under way at a time, over all servers.
    """

    def __init__(self, urls: Sequence[str], most: int) -> None:
        self.all = [Upstream(url) for url in dict.fromkeys(urls)]
        self._most = most

    def choose(self, now: float, wanted: Wanted) -> Choice:
        """Of the servers that need no pause, the one that is expected to be done first.

        One shunned for this or distrusted is asked only where no other is ready. Where the best
        has no room it is waited for: the others are expected to take longer.
        """
        ready = [u for u in self.all if wanted.ready_at(u) <= now]
        if not ready:
            return Choice(None, min(wanted.ready_at(u) for u in self.all) - now)
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
        """Whether all of it should be had elsewhere long before the rest has come from here."""
        if elapsed_s < SLOW_AFTER_S:
            return False
        here_s = (wanted.size - received) * elapsed_s / max(received, 1)
        others = [
            u.expected_s(now, wanted.size)
            for u in self.all
            if u is not upstream and _is_a_way_out(now, wanted, u)
        ]
        return here_s > SLOW_AFTER_S + 3 * min(others, default=math.inf)

    def faults(self) -> str:
        """What was last wrong with each, for a message."""
        return "; ".join(f"{u.url}: {u.last_fault}" for u in self.all)


def _is_a_way_out(now: float, wanted: Wanted, upstream: Upstream) -> bool:
    return (
        upstream.rate is not None
        and wanted.ready_at(upstream) <= now
        and upstream.distrusted_until <= now
        and upstream not in wanted.shunned
    )


def pause_after(fault: Fault, before: int) -> float:
    """Seconds in which to ask nothing again after a fault that came so many times before."""
    first, longest = RETRY_S
    if isinstance(fault, Busy):
        usual, most = BUSY_S
        return usual if fault.retry_after_s is None else min(max(fault.retry_after_s, first), most)
    return min(longest, first * 2 ** min(before, 10))
