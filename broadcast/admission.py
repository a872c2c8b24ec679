"""What one client may have: a place among those served, and bytes at a rate."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from broadcast.access import Tokens, address_of
from broadcast.metrics import Metrics
from broadcast.rate_limit import RateLimit
from broadcast.reloaded import Reloaded


class Admission:
    """Decides for each request who asks, and whether it is served now.

    Args:
        tokens: who may read; None: everyone, each by the address.
        rate: bytes for each client; None: no limit.
        requests_per_client: answered for one client at once: polls that wait, files being sent.
        metrics: counts who is turned away.
    """

    def __init__(
        self,
        tokens: Reloaded[Tokens] | None,
        rate: RateLimit | None,
        *,
        requests_per_client: int,
        metrics: Metrics,
    ) -> None:
        self._tokens = tokens
        self._rate = rate
        self._requests_per_client = requests_per_client
        self._metrics = metrics
        self._under_way: Counter[str] = Counter()

    def client(self, request: web.Request) -> str:
        """The name that limits go by.

        Raises:
            HTTPUnauthorized: a token is needed, and this is none.
        """
        if self._tokens is None:
            transport = request.transport
            return address_of(transport.get_extra_info("peername") if transport else None)
        name = self._tokens.get().name_of(request.headers.get("Authorization"))
        if name is None:
            self._metrics.auth_failures.inc()
            raise web.HTTPUnauthorized(
                headers={"WWW-Authenticate": "Bearer"}, text="a bearer token is needed\n"
            )
        return name

    @contextmanager
    def place(self, client: str) -> Iterator[None]:
        """Held while a request is answered.

        Raises:
            HTTPTooManyRequests: so many of this client are answered already.
        """
        if self._under_way[client] >= self._requests_per_client:
            raise self._later(1.0, f"{self._requests_per_client} requests at once are answered\n")
        self._under_way[client] += 1
        try:
            yield
        finally:
            self._under_way[client] -= 1
            if not self._under_way[client]:
                del self._under_way[client]

    def pay(self, client: str, size: int) -> None:
        """Takes the bytes of an answer from what the client may have.

        Raises:
            HTTPTooManyRequests: it must wait first; the answer says how long.
        """
        if self._rate is None:
            return
        wait_s = self._rate.take(client, size, time.monotonic())
        if wait_s > 0:
            raise self._later(wait_s, "more than your bytes per second\n")

    def _later(self, wait_s: float, text: str) -> web.HTTPTooManyRequests:
        self._metrics.rate_limited.inc()
        return web.HTTPTooManyRequests(headers={"Retry-After": f"{math.ceil(wait_s)}"}, text=text)
