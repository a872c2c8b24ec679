"""Limits of one client of a server: authentication, requests at once, bytes per second."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from broadcast.credentials import Reloaded, Tokens
from broadcast.metrics import Metrics


class RateLimit:
    """Token bucket of bytes for each client; it holds one second of the rate.

    A client that is not in debt may take a piece of any size, and is then in debt until the rate
    has paid for it. So a piece may be larger than the bucket, and the average still holds. One
    number is stored for each client: the time at which its bucket is full again.

    Args:
        bytes_per_s: the rate of each client, at least 1.
        max_clients: clients remembered at once; beyond it the least recent one is forgotten,
            together with its debt.
    """

    def __init__(self, bytes_per_s: int, *, max_clients: int = 10_000) -> None:
        assert bytes_per_s >= 1
        self._bytes_per_s = bytes_per_s
        self._max_clients = max_clients
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def take(self, client: str, size: int, now: float) -> float:
        """Take `size` bytes for a client, or return in how many seconds it may ask again.

        Args:
            client: its name.
            size: bytes, 0 or more.
            now: seconds of a monotonic clock.

        Returns:
            0.0 if the bytes were taken; else the seconds to wait, and nothing was taken.
        """
        full_at = max(self._full_at.get(client, now), now)
        in_debt_s = full_at - now - 1.0
        if in_debt_s > 0:
            return in_debt_s
        self._full_at[client] = full_at + size / self._bytes_per_s
        self._full_at.move_to_end(client)
        if len(self._full_at) > self._max_clients:
            self._full_at.popitem(last=False)
        return 0.0


@dataclass(eq=False)
class Admission:
    """Decides for each request which client sends it, and whether it is served now."""

    tokens: Reloaded[Tokens] | None
    """Clients that may read; None: everyone, identified by address."""
    rate: RateLimit | None
    """Limit on the bytes of each client; None: no limit."""
    requests_per_client: int
    """Requests of one client at once: waiting polls and files being sent."""
    metrics: Metrics
    """Counts refused requests."""
    _under_way: Counter[str] = field(default_factory=Counter, init=False)

    def client(self, request: web.Request) -> str:
        """Return the client that limits count: the name of its token, else its address.

        Raises:
            HTTPUnauthorized: a token is needed, and the request has no valid one.
        """
        if self.tokens is None:
            transport = request.transport
            return address_of(transport.get_extra_info("peername") if transport else None)
        name = self.tokens.get().name_of(request.headers.get("Authorization"))
        if name is None:
            self.metrics.auth_failures.inc()
            raise web.HTTPUnauthorized(
                headers={"WWW-Authenticate": "Bearer"}, text="a bearer token is needed\n"
            )
        return name

    @contextmanager
    def slot(self, client: str) -> Iterator[None]:
        """Hold one of the client's request slots.

        Raises:
            HTTPTooManyRequests: all slots of the client are taken.
        """
        if self._under_way[client] >= self.requests_per_client:
            raise self._later(1.0, f"{self.requests_per_client} requests at once are answered\n")
        self._under_way[client] += 1
        try:
            yield
        finally:
            self._under_way[client] -= 1
            if not self._under_way[client]:
                del self._under_way[client]

    def pay(self, client: str, size: int) -> None:
        """Charge the bytes of an answer to the client.

        Raises:
            HTTPTooManyRequests: the client must wait; `Retry-After` says how long.
        """
        if self.rate is None:
            return
        wait_s = self.rate.take(client, size, time.monotonic())
        if wait_s > 0:
            raise self._later(wait_s, "more than your bytes per second\n")

    def _later(self, wait_s: float, text: str) -> web.HTTPTooManyRequests:
        self.metrics.rate_limited.inc()
        return web.HTTPTooManyRequests(headers={"Retry-After": f"{math.ceil(wait_s)}"}, text=text)


def address_of(peer: object) -> str:
    """Return the address that limits count: all of IPv4, the first 64 bits of IPv6 (one customer).

    Args:
        peer: the peer name of a socket.
    """
    if not isinstance(peer, tuple) or not peer:
        return "unknown"
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{ipaddress.ip_network((address, 64), strict=False).network_address}/64"
