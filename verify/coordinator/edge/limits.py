"""Authenticates requests and limits them, new keys and connections, before a body is read.

A limit has a scope (each key, each address, all clients together) and a kind of request. `RATES`
limits requests a second, `AT_ONCE` what goes on at the same time. Unregistered keys cost nothing to
make, so their requests count by address, and for all addresses together. Registered workers count
by key and are under no limit of all, so a flood of strangers does not keep them out.

The ledger remembers a registered key as long as the run lasts. So keys without an invite are
limited twice: those of one address in a day, and all that never had a submission accepted.

A rate is kept as one number, the time at which the bucket is full again (the generic cell rate
algorithm, ITU-T I.371). A full bucket is forgotten, so only names that asked lately use memory.

The limits of unregistered keys count by the client's address. `X-Forwarded-For` counts only from a
proxy that `verify.proxies` lists, because anybody can send it. Each proxy appends the address of
its own client, so the client is the last entry that is not a proxy. An IPv6 /64 counts as one
address, because a customer gets at least a /64.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from aiohttp import web

from runspec.core.connection_limits import ConnectionLimiter, ConnectionLimits, possible_connections
from runspec.core.roles import Roles
from verify.coordinator.edge.requests import Refusal
from verify.coordinator.journal import Journal
from verify.coordinator.machine.state import Rank, State
from verify.request_auth import RequestChecker, SignedRequest, Unauthorised

_log = logging.getLogger(__name__)

MAX_BUCKETS = 100_000
"""Names remembered in each scope; beyond them a new name is refused."""
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
    """Counts requests against `RATES` and `AT_ONCE`.

    Args:
        max_buckets: names remembered in each scope.
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self._max = max_buckets
        self._full_at: dict[str, dict[Name, float]] = {"key": {}, "address": {}, "all": {}}
        """Tables by scope, so that many addresses do not crowd out keys."""
        self._at_once: Counter[Name] = Counter()

    def wait_s(self, *names: Name, now: float) -> float:
        """Return the seconds until one more request may come; 0.0: now.

        Args:
            names: counters of the request.
            now: seconds of a clock that never goes back.
        """
        return max(self._wait_s(name, now) for name in names)

    def take(self, *names: Name, now: float) -> float:
        """Count a request for all names, if each of them allows it.

        Returns:
            0.0 when it is counted; else the seconds until it may come, and nothing is counted.
        """
        wait_s = self.wait_s(*names, now=now)
        if wait_s == 0.0:
            for name in names:
                buckets, rate = self._full_at[name.scope], RATES[name.scope, name.kind]
                buckets[name] = max(buckets.get(name, now), now) + 1.0 / rate.per_s
        return wait_s

    @contextmanager
    def at_once(self, *names: Name) -> Iterator[bool]:
        """Count something for all names within the block; yields whether each of them allows it."""
        self._at_once.update(names)
        try:
            yield all(self._at_once[name] <= AT_ONCE[name.scope, name.kind] for name in names)
        finally:
            for name in names:
                self._at_once[name] -= 1
                if not self._at_once[name]:
                    del self._at_once[name]

    def _wait_s(self, name: Name, now: float) -> float:
        buckets, rate = self._full_at[name.scope], RATES[name.scope, name.kind]
        if name not in buckets and len(buckets) >= self._max:
            buckets = {n: at for n, at in buckets.items() if at > now}
            self._full_at[name.scope] = buckets
            if len(buckets) >= self._max:
                return min(buckets.values()) - now
        ahead_s = max(buckets.get(name, now), now) + 1.0 / rate.per_s - now
        longest_s = rate.burst / rate.per_s
        return ahead_s - longest_s if ahead_s > longest_s * (1.0 + 1e-9) else 0.0


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


class Connections:
    """Listening sockets and connections of one server (`runspec.core.connection_limits`).

    The server's outermost middleware is `answering`.
    """

    def __init__(self) -> None:
        self._limiter: ConnectionLimiter | None = None
        self._listeners: list[socket.socket] = []
        self._warned = -_WARN_EVERY_S

    def __len__(self) -> int:
        return 0 if self._limiter is None else len(self._limiter)

    def listen(self, server: web.Server, host: str, port: int) -> int:
        """Accept connections from now on; returns the port.

        Args:
            server: server of aiohttp.
            host, port: where to listen, at every address of the host; port 0 picks a free one.

        Raises:
            OSError: the address cannot be used.
        """
        most = possible_connections(MAX_CONNECTIONS, _log, files_each=1, files_beside=_FILES_BESIDE)
        limits = ConnectionLimits(most, IDLE_S, HEAD_S, MAX_HEADER_BYTES, linger_s=LINGER_S)
        self._listeners = _listeners(host, port)
        self._limiter = ConnectionLimiter(server, limits, self, _log)
        for listener in self._listeners:
            self._limiter.open(listener)
        bound: int = self._listeners[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop accepting."""
        if self._limiter is not None:
            await self._limiter.close()
        for listener in self._listeners:
            listener.close()

    def dropped(self, why: str) -> None:
        """Warn when the limit is reached, at most every `_WARN_EVERY_S`."""
        now = asyncio.get_running_loop().time()
        if why in ("room", "full") and now >= self._warned + _WARN_EVERY_S:
            self._warned = now
            _log.warning("%d connections are open: closing those idle for longest", len(self))

    def malformed(self, status: int) -> None:
        """Log nothing, because anybody can cause any number of malformed requests."""


def _listeners(host: str, port: int) -> list[socket.socket]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listeners: list[socket.socket] = []
    with ExitStack() as on_error:
        for family, address in dict.fromkeys((each[0], each[4][0]) for each in found):
            listener = socket.create_server((str(address), port), family=family, backlog=128)
            on_error.callback(listener.close)
            listener.setblocking(False)
            listeners.append(listener)
            port = listener.getsockname()[1]
        on_error.pop_all()
    return listeners


# -- Authentication --------------------------------------------------------------------------------

FORWARDED = "X-Forwarded-For"
UNKNOWN = "unknown"
"""Stands for requests without an address, such as through a Unix socket."""
_MAX_HOPS = 8
_IPV6_PREFIX = 64

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def networks(ranges: Iterable[str]) -> tuple[Network, ...]:
    """Parse the address ranges of `verify.proxies`, such as 10.0.0.7 or 10.0.0.0/24."""
    return tuple(ip_network(each) for each in ranges)


def client_address(remote: str | None, forwarded: Sequence[str], proxies: Sequence[Network]) -> str:
    """Return the client's IPv4 address or IPv6 network, or `UNKNOWN`.

    Args:
        remote: address at the other end of the connection.
        forwarded: the request's `X-Forwarded-For` headers, in order.
        proxies: addresses whose header is trusted.
    """
    address = _parse(remote or "")
    hops = ",".join(forwarded).rsplit(",", _MAX_HOPS)[-_MAX_HOPS:] if forwarded else []
    while hops and address is not None and any(address in proxy for proxy in proxies):
        before = _parse(hops.pop())
        if before is None:  # the proxy sent no address: the request counts as its own
            break
        address = before
    if isinstance(address, IPv6Address):
        return str(IPv6Network((int(address), _IPV6_PREFIX), strict=False))
    return UNKNOWN if address is None else str(address)


def _parse(text: str) -> Address | None:
    """Parse an address with or without a port; IPv4 written as IPv6 becomes IPv4."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


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
            with self._limiter.at_once(*self._newcomer(key, request)) as allowed:
                if not allowed:
                    words = "too many new keys are waiting for a lease already: try again later"
                    raise Refusal(429, words, retry_after_s=5.0)
                yield

    def _newcomer(self, key: str, request: web.Request) -> tuple[Name, ...]:
        """Names that a poll counts for; none if the key is known or recorded (`Rank`)."""
        state = self._journal.state
        if key in state.workers and state.workers[key].rank is not Rank.NEW:
            return ()
        kind = "newcomer poll"
        return Name("address", kind, self.address(request)), Name("all", kind)

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
