"""Authenticates requests and applies the limits, before anything of a body is read.

The limits of unregistered keys count by the client's address. `X-Forwarded-For` counts only from a
proxy that `verify.proxies` lists, because anybody can send it. Each proxy appends the address of
its own client, so the client is the last entry that is not a proxy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_network

from aiohttp import web

from runspec.core.http_server import Network, client_address
from runspec.core.roles import Roles
from verify.coordinator.edge.limits import AT_ONCE, Limiter, Name
from verify.coordinator.edge.requests import Refusal
from verify.coordinator.journal import Journal
from verify.coordinator.machine.state import Rank
from verify.coordinator_http import RequestChecker, SignedRequest, Unauthorised

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
