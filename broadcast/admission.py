"""Limits of one client of a server: authentication, requests at once, bytes per second."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from broadcast.credentials import Reloaded, Tokens
from broadcast.metrics import Metrics
from runspec.core.http_server import TokenBuckets, at_once, client_address


@dataclass(eq=False)
class Admission:
    """Decides for each request which client sends it, and whether it is served now."""

    tokens: Reloaded[Tokens] | None
    """Clients that may read; None: everyone, identified by address."""
    bytes_per_s: int | None
    """Rate of each client; None: no limit. A client that is more than a second of its rate in debt
    must wait, so one answer may be larger than that, and the average still holds."""
    requests_per_client: int
    """Requests of one client at once: waiting polls and files being sent."""
    metrics: Metrics
    """Counts refused requests."""
    _under_way: Counter[Hashable] = field(default_factory=Counter, init=False)
    _taken: TokenBuckets = field(default_factory=TokenBuckets, init=False)

    def client(self, request: web.Request) -> str:
        """Return the client that limits count: the name of its token, else its address.

        Raises:
            HTTPUnauthorized: a token is needed, and the request has no valid one.
        """
        if self.tokens is None:
            return client_address(request.remote)
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
        most = self.requests_per_client
        with at_once(self._under_way, {client: most}) as allowed:
            if not allowed:
                raise self._later(1.0, f"{most} requests at once are answered\n")
            yield

    def pay(self, client: str, size: int) -> None:
        """Charge the bytes of an answer to the client.

        Raises:
            HTTPTooManyRequests: the client must wait; `Retry-After` says how long.
        """
        if self.bytes_per_s is None:
            return
        now = time.monotonic()
        wait_s = self._taken.wait_s(client, 1.0, now)
        if wait_s > 0:
            raise self._later(wait_s, "more than your bytes per second\n")
        self._taken.take(client, size / self.bytes_per_s, now)

    def _later(self, wait_s: float, text: str) -> web.HTTPTooManyRequests:
        self.metrics.rate_limited.inc()
        return web.HTTPTooManyRequests(headers={"Retry-After": f"{math.ceil(wait_s)}"}, text=text)
