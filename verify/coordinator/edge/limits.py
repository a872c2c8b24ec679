"""Limits of requests, new keys and connections, and the objects that count them.

A limit has a scope (each key, each address, all clients together) and a kind of request. `RATES`
limits requests a second, `AT_ONCE` what goes on at the same time. Unregistered keys cost nothing to
make, so their requests count by address, and for all addresses together. Registered workers count
by key and are under no limit of all, so a flood of strangers does not keep them out.

The ledger remembers a registered key as long as the run lasts. So keys without an invite are
limited twice: those of one address in a day, and all that never had a submission accepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Hashable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass

from aiohttp import web

from runspec.core.connection_limits import (
    ConnectionLimiter,
    ConnectionLimits,
    Observer,
    possible_connections,
)
from runspec.core.http_server import TokenBuckets, at_once, serving
from verify.coordinator.edge.requests import Refusal
from verify.coordinator.machine.state import State

_log = logging.getLogger(__name__)

_DAY_S = 86400.0
MAX_UNPROVEN = 10_000
"""Registered keys without an invite and without an accepted submission."""
MAX_CONNECTIONS = 8192
IDLE_S = 75.0
"""Longer than a reverse proxy (60 s) keeps a connection for its next request."""
HEAD_S = 30.0
LINGER_S = 10.0
MAX_HEADER_BYTES = 32 * 1024
"""The largest header is a verdict's envelope, at most 16 KiB before base64."""
_FILES_BESIDE = 1024
"""Open files beside the connections: ledger, uploads, connections about to be closed."""
_WARN_EVERY_S = 10.0


@dataclass(frozen=True)
class Rate:
    """`per_s` requests a second in the long run, and `burst` at once."""

    per_s: float
    burst: int


@dataclass(frozen=True)
class Name:
    """Name of a counter: requests of a kind by one key, one address, or all."""

    scope: str
    """key, address or all."""
    kind: str
    of: str = ""
    """The key or the address."""


RATES = {
    ("key", "lease"): Rate(20.0, 100),
    ("key", "submission"): Rate(20.0, 100),
    ("key", "heartbeat"): Rate(1.0, 10),
    ("key", "release"): Rate(1.0, 10),
    ("key", "registration"): Rate(1.0, 10),
    ("address", "registration"): Rate(0.2, 64),
    ("all", "registration"): Rate(10.0, 1000),
    ("address", "new key"): Rate(256 / _DAY_S, 256),
    ("address", "stranger"): Rate(5.0, 50),
    ("all", "stranger"): Rate(100.0, 1000),
    ("address", "public"): Rate(50.0, 500),
    ("all", "public"): Rate(200.0, 2000),
    ("address", "unbelieved"): Rate(20.0, 200),
}
"""Rates by scope and kind. "key" is for registered workers, with a limit for each kind of request.
"registration" by address: keys that are new. "new key": keys that register without an invite.
"stranger": other signed requests of unregistered keys. "public": requests without a signature.
"unbelieved": wrong signatures; a limit for all addresses together would refuse honest callers."""

AT_ONCE = {
    ("key", "poll"): 4,
    ("address", "newcomer poll"): 64,
    ("all", "newcomer poll"): 256,
    ("address", "download"): 32,
    ("all", "download"): 256,
}
"""Limits by scope and kind. "poll": waiting requests for a lease. An event wakes all of them, so
polls of new workers (`Rank`) have a limit together.
"download": files and large answers that are being sent."""


class Limiter:
    """Counts requests against `RATES` and `AT_ONCE`."""

    def __init__(self) -> None:
        self._buckets = {scope: TokenBuckets() for scope in ("key", "address", "all")}
        """By scope, so that many addresses do not crowd out keys."""
        self._at_once: Counter[Hashable] = Counter()

    def wait_s(self, *names: Name, now: float) -> float:
        """Return the seconds until one more request may come; 0.0: now.

        Args:
            names: counters of the request.
            now: seconds of a clock that never goes back.
        """
        waits = [0.0]
        for name in names:
            rate = RATES[name.scope, name.kind]
            longest_s = (rate.burst - 1) / rate.per_s
            waits.append(self._buckets[name.scope].wait_s(name, longest_s, now))
        return max(waits)

    def take(self, *names: Name, now: float) -> float:
        """Count a request for all names, if each of them allows it.

        Returns:
            0.0 when it is counted; else the seconds until it may come, and nothing is counted.
        """
        wait_s = self.wait_s(*names, now=now)
        if wait_s == 0.0:
            for name in names:
                cost_s = 1.0 / RATES[name.scope, name.kind].per_s
                self._buckets[name.scope].take(name, cost_s, now)
        return wait_s

    def at_once(self, *names: Name) -> AbstractContextManager[bool]:
        """Count something for all names within a block; gives whether each of them allows it."""
        return at_once(self._at_once, {name: AT_ONCE[name.scope, name.kind] for name in names})


def count_new_key(limiter: Limiter, state: State, address: str, *, now: float) -> None:
    """Count a key that registers without an invite.

    Args:
        limiter: counts the keys of each address.
        state: state of the run.
        address: address of the client.
        now: seconds of a clock that never goes back.

    Raises:
        Refusal: 403, `MAX_UNPROVEN` is reached; 429, the address has registered too many.
    """
    if state.unproven >= MAX_UNPROVEN:
        raise Refusal(
            403,
            f"{MAX_UNPROVEN} keys without accepted work are registered, as many as may be: ask for "
            "a link with an invite",
        )
    wait_s = limiter.take(Name("address", "new key", address), now=now)
    if wait_s > 0.0:
        raise Refusal(
            429,
            f"{RATES['address', 'new key'].burst} new keys of your address have registered, as "
            f"many as may in a day: try again in {wait_s:.0f} s, or ask for a link with an invite",
            retry_after_s=wait_s,
        )


class Connections(Observer):
    """Limits the connections of one server, whose outermost middleware is `answering`."""

    def __init__(self) -> None:
        self._most = possible_connections(
            MAX_CONNECTIONS, _log, files_each=1, files_beside=_FILES_BESIDE
        )
        self._warned = -_WARN_EVERY_S

    def serving(
        self, application: web.Application, host: str, port: int
    ) -> AbstractAsyncContextManager[tuple[int, ConnectionLimiter]]:
        """Answer requests within a block (`runspec.core.http_server.serving`)."""
        limits = ConnectionLimits(self._most, IDLE_S, HEAD_S, MAX_HEADER_BYTES, linger_s=LINGER_S)
        return serving(application, (host, port), limits, self, _log)

    def dropped(self, why: str) -> None:
        """Warn when the limit is reached, at most every `_WARN_EVERY_S`."""
        now = asyncio.get_running_loop().time()
        if why in ("room", "full") and now >= self._warned + _WARN_EVERY_S:
            self._warned = now
            _log.warning("%d connections are open: closing those idle for longest", self._most)
