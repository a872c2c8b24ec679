"""Authenticates requests, and limits requests, new keys and connections.

The signature and the limits are checked before anything of a body is read. A `Refusal` (429 with
`Retry-After`, 403 or 503) answers what is over a limit, so the handlers neither count nor time
clients. `docs/public-runs.md` lists the limits.

A limit has a scope (each key, each address, all clients together) and a kind of request. `RATES`
limits requests a second, `AT_ONCE` what goes on at the same time. Unregistered keys cost nothing to
make, so their requests count by address, and for all addresses together. Registered workers count
by key and are under no limit of all, so a flood of strangers does not keep them out.

The ledger remembers a registered key as long as the run lasts. So keys without an invite are
limited twice: those of one address in a day, and all that never had a submission accepted.

`X-Forwarded-For` counts only from a proxy that `verify.proxies` lists, because anybody can send it.
Each proxy appends the address of its own client, so the client is the last entry that is not a
proxy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_network

from aiohttp import web

from runspec.core.connection_limits import (
    ConnectionLimiter,
    ConnectionLimits,
    Observer,
    possible_connections,
)
from runspec.core.http_server import Network, TokenBuckets, at_once, client_address, serving
from runspec.core.roles import Roles
from verify.coordinator.journal import Journal
from verify.coordinator.machine.leases import Rank
from verify.coordinator.machine.state import State
from verify.coordinator.requests import Refusal
from verify.coordinator_http import RequestChecker, SignedRequest, Unauthorised

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
    ("key", "relay"): Rate(1.0, 10),
    ("key", "finding"): Rate(1.0, 10),
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
    ("address", "newcomer poll"): 256,
    ("all", "newcomer poll"): 2048,
    ("address", "download"): 32,
    ("all", "download"): 256,
}
"""Limits by scope and kind. "poll": waiting requests for a lease. An event that brings work looks
at all of them, so polls of new workers (`Rank`) have a limit together.
"download": files and large answers that are being sent."""


class Limiter:
    """Counts requests against `RATES` and `AT_ONCE`.

    Args:
        crowd: by how much the limits of one address are multiplied.
    """

    def __init__(self, crowd: float = 1.0) -> None:
        self._crowd = crowd
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
            rate = self._rate(name)
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
                cost_s = 1.0 / self._rate(name).per_s
                self._buckets[name.scope].take(name, cost_s, now)
        return wait_s

    def at_once(self, *names: Name) -> AbstractContextManager[bool]:
        """Count something for all names within a block; gives whether each of them allows it."""
        most = {name: AT_ONCE[name.scope, name.kind] * self._times(name) for name in names}
        return at_once(self._at_once, {name: int(limit) for name, limit in most.items()})

    def _rate(self, name: Name) -> Rate:
        rate, times = RATES[name.scope, name.kind], self._times(name)
        return Rate(rate.per_s * times, int(rate.burst * times))

    def _times(self, name: Name) -> float:
        return self._crowd if name.scope == "address" else 1.0


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


FORWARDED = "X-Forwarded-For"


def networks(ranges: Iterable[str]) -> tuple[Network, ...]:
    """Parse the address ranges of `verify.proxies`, such as 10.0.0.7 or 10.0.0.0/24."""
    return tuple(ip_network(each) for each in ranges)


class Authentication:
    """Identifies callers, and refuses clients that make too many requests.

    Args:
        journal: has the workers and the bans.
        checker: checks signatures.
        limiter: counts requests.
        roles: its keys have no limits.
        proxies: address ranges whose `X-Forwarded-For` is trusted.
    """

    def __init__(
        self,
        journal: Journal,
        checker: RequestChecker,
        limiter: Limiter,
        roles: Roles,
        proxies: Sequence[Network],
    ) -> None:
        self._journal, self._checker, self._limiter = journal, checker, limiter
        self._staff = roles.keys
        self._proxies = proxies

    def address(self, request: web.Request) -> str:
        """Return the address that a request comes from (`client_address`)."""
        forwarded = request.headers.getall(FORWARDED, [])
        return client_address(request.remote, forwarded, self._proxies)

    def public(self, request: web.Request) -> None:
        """Count a request that needs no signature.

        Raises:
            Refusal: 429.
        """
        self._take("public", self.address(request), "from your address")

    def caller(self, request: web.Request, kind: str | None = None) -> SignedRequest:
        """Return who signed a request.

        Args:
            request: a signed request.
            kind: kind in `RATES` of a worker's request; None: only keys of roles.json may make it.

        Raises:
            Refusal: 429, or 403 for a banned key.
            Unauthorised: the signature or its time is wrong.
        """
        address, now = self.address(request), time.monotonic()
        unbelieved = Name("address", "unbelieved", address)
        _wait(self._limiter.wait_s(unbelieved, now=now), "from your address with wrong signatures")
        try:
            caller = self._checker.check(
                request.headers,
                method=request.method,
                path=request.raw_path,
                now=self._journal.clock(),
                admit=partial(self._admit, kind, address),
            )
        except Unauthorised:
            self._limiter.take(unbelieved, now=now)
            raise
        reason = self._journal.state.bans.get(caller.key)
        if reason is not None:
            raise Refusal(
                403,
                f"this key is banned: {reason}. To appeal, send this message and the key "
                f"{caller.key} to whoever invited you: a person can lift a ban",
            )
        return caller

    @contextmanager
    def download(self, request: web.Request) -> Iterator[None]:
        """Count a file or a large answer while it is sent.

        Raises:
            Refusal: 503, too many are being sent to this address, or to all addresses.
        """
        names = Name("address", "download", self.address(request)), Name("all", "download")
        with self._limiter.at_once(*names) as allowed:
            if not allowed:
                raise Refusal(503, "too many downloads at once: try again later", retry_after_s=5.0)
            yield

    @contextmanager
    def poll(self, key: str, request: web.Request) -> Iterator[None]:
        """Count a request for a lease while it waits.

        Raises:
            Refusal: 429, too many of this key are waiting, or of keys without accepted work.
        """
        with self._limiter.at_once(Name("key", "poll", key)) as allowed:
            if not allowed:
                most = AT_ONCE["key", "poll"]
                words = f"{most} requests of this key are waiting for a lease already"
                raise Refusal(429, words, retry_after_s=1.0)
            state, names = self._journal.state, tuple[Name, ...]()
            if key not in state.workers or state.workers[key].rank is Rank.NEW:
                kind = "newcomer poll"
                names = Name("address", kind, self.address(request)), Name("all", kind)
            with self._limiter.at_once(*names) as allowed:
                if not allowed:
                    words = "too many new keys are waiting for a lease already: try again later"
                    raise Refusal(429, words, retry_after_s=5.0)
                yield

    def _admit(self, kind: str | None, address: str, key: str) -> None:
        if key in self._staff:
            return
        if kind is not None and key in self._journal.state.workers:
            _wait(self._limiter.take(Name("key", kind, key), now=time.monotonic()), f"({kind})")
        else:
            of = "registration" if kind == "registration" else "stranger"
            self._take(of, address, f"of unregistered keys ({kind or 'other'})")

    def _take(self, kind: str, address: str, which: str) -> None:
        names = Name("address", kind, address), Name("all", kind)
        _wait(self._limiter.take(*names, now=time.monotonic()), which)


def _wait(wait_s: float, which: str) -> None:
    """Refuse a request that must wait; 0.0 passes."""
    if wait_s > 0.0:
        words = f"too many requests {which}: try again in {wait_s:.1f} s"
        raise Refusal(429, words, retry_after_s=wait_s)
