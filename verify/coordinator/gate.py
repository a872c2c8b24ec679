"""Who asks, and whether not too often: before anything of a request's body is read."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from aiohttp import web

from runspec.core.roles import Roles
from verify.coordinator.addresses import FORWARDED, Network, place_of
from verify.coordinator.intake import Refusal
from verify.coordinator.journal import Journal
from verify.coordinator.rates import MAX_BODIES, MAX_POLLS, RateLimits
from verify.request_auth import RequestChecker, SignedRequest, TooManyRequests, Unauthorised


class Gate:
    """Lets requests in, or refuses them.

    Args:
        journal: knows the workers and the bans.
        checker: of signatures.
        roles: whose keys are not counted.
        own: public keys of the run's own workers.
        proxies: address ranges that are believed of whom they ask for.
        connections: that may be open at once.
    """

    def __init__(
        self,
        journal: Journal,
        checker: RequestChecker,
        roles: Roles,
        own: Collection[str],
        proxies: Sequence[Network],
        connections: int,
    ) -> None:
        self._journal, self._checker, self._roles = journal, checker, roles
        self._own = frozenset(own)
        self._proxies = proxies
        self._rates = RateLimits(max_bodies=min(MAX_BODIES, connections // 4))

    def anybody(self, request: web.Request) -> None:
        """Lets in what need not be signed.

        Raises:
            Refusal: 429.
        """
        wait_s = self._rates.of_stranger(self.place(request), "public", time.monotonic())
        _come_again_after(wait_s, "from your address")

    def caller(self, request: web.Request, kind: str | None = None) -> SignedRequest:
        """Who asks.

        Args:
            request: a signed one.
            kind: of `WORKER_RATES`; None: roles.json says who may ask.

        Raises:
            Refusal: 429, or 403 of a banned key.
            Unauthorised: the signature is not believed.
        """
        place, now = self.place(request), time.monotonic()
        _come_again_after(
            self._rates.of_unbelieved(place, now), "from your address that are not believed"
        )
        try:
            caller = self._checker.check(
                request.headers,
                method=request.method,
                path=request.raw_path,
                now=self._journal.clock(),
                admit=partial(self._admit, kind, place),
            )
        except Unauthorised:
            self._rates.unbelieved(place, now)
            raise
        except TooManyRequests as error:
            raise Refusal(429, str(error), retry_after_s=error.retry_after_s) from error
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
        """Counts a file that is being sent.

        Raises:
            Refusal: 503, as many are being sent there, or in all, as may.
        """
        with self._rates.download(self.place(request)) as allowed:
            if not allowed:
                raise Refusal(503, "too many downloads at once: come again", retry_after_s=5.0)
            yield

    @contextmanager
    def poll(self, key: str, request: web.Request) -> Iterator[None]:
        """Counts a request of a key that is kept waiting.

        Raises:
            Refusal: 429, as many of the key's are waiting as may, or of newcomers'.
        """
        with self._rates.poll(key) as allowed:
            if not allowed:
                words = f"{MAX_POLLS} requests of this key are waiting for a lease already"
                raise Refusal(429, words, retry_after_s=1.0)
            if self._has_a_name(key):
                yield
                return
            worker = self._journal.state.workers.get(key)
            invited = worker is not None and worker.invite is not None
            with self._rates.newcomer_poll(self.place(request), invited=invited) as allowed:
                if not allowed:
                    words = "too many new keys are waiting for a lease already: come again"
                    raise Refusal(429, words, retry_after_s=5.0)
                yield

    @contextmanager
    def body(self, key: str, request: web.Request) -> Iterator[bool]:
        """Counts a body that is on its way; yields whether it may take its time."""
        if self._has_a_role(key):
            yield True
            return
        named = key if self._has_a_name(key) else None
        with self._rates.body(named, self.place(request)) as room:
            yield room

    def _has_a_role(self, key: str) -> bool:
        return key in self._roles.coordinator or key in self._roles.validator

    def _has_a_name(self, key: str) -> bool:
        """Whether it is the run's own, or one that has had work accepted."""
        worker = self._journal.state.workers.get(key)
        return key in self._own or (worker is not None and not worker.standing.newcomer)

    def _admit(self, kind: str | None, place: str, key: str) -> None:
        if self._has_a_role(key):
            return
        now = time.monotonic()
        if kind is not None and key in self._journal.state.workers:
            _come_again_after(self._rates.of_worker(key, kind, now), f"({kind})")
        else:
            of = "registration" if kind == "registration" else "stranger"
            wait_s = self._rates.of_stranger(place, of, now)
            _come_again_after(wait_s, f"of keys that are no worker's ({kind or 'other'})")

    def place(self, request: web.Request) -> str:
        """Where a request comes from (`addresses`)."""
        return place_of(request.remote, request.headers.getall(FORWARDED, []), self._proxies)


def _come_again_after(wait_s: float, which: str) -> None:
    """Refuses what is asked too often; 0.0 passes."""
    if wait_s > 0.0:
        words = f"too many requests {which}: come again in {wait_s:.1f} s"
        raise Refusal(429, words, retry_after_s=wait_s)
