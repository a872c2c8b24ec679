"""Relays of volunteers: who may register one, and the probe by which it is listed for workers.

Clients check every chunk, so a relay that lies costs them time only. A relay registers every
minute, and is probed then: one that lies is refused, one that sleeps leaves the list. All of it is
in memory, as a restart of the coordinator is over within a minute.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from runspec.core.address import is_server_url, parse_url
from runspec.core.canonical import MalformedJson, digest_bytes, parse_object
from runspec.core.errors import one_line
from runspec.core.http_client import NoAnswer, fetch, new_session
from runspec.core.signed import BadSignature
from verify.coordinator.authentication import Limiter, count_new_key
from verify.coordinator.handlers import RunContext, Signed
from verify.coordinator.machine.events import VersionPublished
from verify.coordinator.requests import Refusal
from verify.formats.documents import MAX_RELAYS

_log = logging.getLogger(__name__)

MOST = 256
"""Relays that may be registered."""
MOST_REFUSED = 8192
"""Keys and servers that are remembered because they sent something wrong."""
LISTED_S = 150.0
"""Seconds for which a probe counts: a relay registers every minute."""
PROBE_EVERY_S = 30.0
"""Least number of seconds between two probes of a relay; each failure in a row doubles it, so that
those that sleep leave the others their turn."""
LONGEST_S = 900.0
AT_ONCE = 8
_DEADLINE_S = 15.0
"""Seconds for the manifest, and for the chunk. A relay that needs more helps nobody."""
_MAX_MANIFEST_BYTES = 16 * 1024 * 1024
_MAX_CHUNK_BYTES = 64 * 1024 * 1024
_LONGEST_ERROR = 64 * 1024
"""Bytes of an error page, which is no lie."""


@dataclass(eq=False)
class _Relay:
    key: str
    url: str
    server: str
    """Host and port."""
    rate: float = 0.0
    """Bytes per second at the last good probe."""
    good: float = 0.0
    """Time of the last good probe; 0: none."""
    due: float = 0.0
    """Time from which it is probed again."""
    failures: int = 0
    """In a row."""
    reason: str = "not probed yet"
    """Why the last probe was not good."""


class Relays:
    """The run's relays of volunteers.

    Args:
        run: the run.
        limiter: limits new keys.
    """

    def __init__(self, run: RunContext, limiter: Limiter) -> None:
        self._run, self._limiter = run, limiter
        self._relays: dict[str, _Relay] = {}
        """By key."""
        self._refused: dict[str, str] = {}
        """What keys and servers sent that was wrong."""
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._chunks: tuple[str, dict[str, int]] = ("", {})
        """Digest of the newest manifest, and the sizes of its chunks."""

    def routes(self) -> list[web.RouteDef]:
        return [self._run.post("/v1/relays", self._register, "url", by="relay")]

    def listed(self) -> list[str]:
        """Return the URLs for workers, the fastest first."""
        oldest, bans = time.monotonic() - LISTED_S, self._run.journal.state.bans
        good = [r for r in self._relays.values() if r.good > oldest and r.key not in bans]
        return [r.url for r in sorted(good, key=lambda each: -each.rate)][:MAX_RELAYS]

    def report(self) -> dict[str, int]:
        """Return the `relays` part of `GET /v1/status`."""
        refused = sum(":" not in name for name in self._refused)
        return {"joined": len(self._relays), "listed": len(self.listed()), "refused": refused}

    async def _register(self, asked: Signed) -> dict[str, Any]:
        """Probe a relay, and tell its owner what was found."""
        if self._run.spec.broadcast.volunteers == "none":
            raise Refusal(404, "this run takes no relays of volunteers")
        if asked.key in self._run.roles.keys:
            raise Refusal(403, "a key with a role cannot be a relay's")
        relay = self._relay_of(asked)
        async with self._turn:
            if time.monotonic() >= relay.due:
                relay.due = math.inf
                try:
                    await self._probe(relay)
                finally:
                    pause_s = min(PROBE_EVERY_S * 2.0 ** min(relay.failures, 20), LONGEST_S)
                    relay.due = time.monotonic() + pause_s
        listed = relay.url in self.listed()
        return {"listed": listed, "reason": relay.reason, "bytes_per_s": relay.rate}

    def _relay_of(self, asked: Signed) -> _Relay:
        key, url = asked.key, asked.body["url"]
        found = parse_url(url) if isinstance(url, str) and is_server_url(url) else None
        if found is None or "@" in url or len(url) > 400:
            raise Refusal(400, "url must be http(s)://host[:port][/prefix], without a user")
        url, server = url.rstrip("/"), f"{found.host}:{found.port}".lower()
        if fault := self._refused.get(key) or self._refused.get(server):
            raise Refusal(403, f"this relay sent something wrong and is not asked again: {fault}")
        known = self._relays.get(key)
        if known is not None and known.url == url:
            return known
        if any(each.server == server and each.key != key for each in self._relays.values()):
            raise Refusal(409, f"{server} is registered under another key")
        if known is None and key not in self._run.journal.state.workers:
            address = self._run.authentication.address(asked.http)
            count_new_key(self._limiter, self._run.journal.state, address, now=time.monotonic())
        self._relays.pop(key, None)
        if len(self._relays) >= MOST:  # one that does not serve makes room
            worst = min(self._relays.values(), key=lambda each: each.good)
            if worst.good > time.monotonic() - LISTED_S:
                raise Refusal(429, f"{MOST} relays serve, enough", retry_after_s=60.0)
            del self._relays[worst.key]
        relay = self._relays[key] = _Relay(key, url, server)
        _log.info("relay %s of %s joins", url, key[:16])
        return relay

    async def _probe(self, relay: _Relay) -> None:
        """Compare a relay's newest manifest and one of its chunks with what was published."""
        newest = self._run.journal.state.newest
        if newest is None:
            relay.reason = "no version is published yet"
            return
        # No token, no redirects; and what it connects to is checked, not what a name says before.
        public_only = self._run.spec.broadcast.volunteers == "public"
        try:
            async with new_session(public_only=public_only) as session:
                relay.rate = await self._measured(session, relay, newest)
            relay.good, relay.reason, relay.failures = time.monotonic(), "", 0
        except (NoAnswer, MalformedJson) as error:
            relay.reason, relay.failures = one_line(str(error), 200), relay.failures + 1
        except BadSignature as error:
            relay.reason, relay.good = str(error), 0.0
            _log.warning("relay %s of %s is refused: %s", relay.url, relay.key[:16], error)
            for name in (relay.key, relay.server):
                self._refused[name] = relay.reason
            while len(self._refused) > MOST_REFUSED:
                del self._refused[next(iter(self._refused))]

    async def _measured(
        self, session: aiohttp.ClientSession, relay: _Relay, newest: VersionPublished
    ) -> float:
        """Return the bytes per second of a random chunk of the newest version.

        Raises:
            NoAnswer: it does not answer in time, or with an error.
            BadSignature: it answers with something else than was published, or redirects.
        """
        base, wanted = f"{relay.url}/{self._run.spec.name}", newest.manifest_digest
        manifest = f"{base}/versions/{newest.version}/manifest.json"
        data = await _get(session, manifest, _MAX_MANIFEST_BYTES)
        if digest_bytes(data) != wanted:
            raise BadSignature(f"another manifest of version {newest.version} than was published")
        if self._chunks[0] != wanted:  # the publisher signed this digest: its form needs no check
            found = await asyncio.to_thread(parse_object, data, max_bytes=_MAX_MANIFEST_BYTES)
            objects = {**found["payload"]["objects"], **found["payload"]["delta"]}.values()
            chunks = [chunk for each in objects for chunk in each["chunks"]]
            self._chunks = wanted, {chunk["blake3"]: chunk["size"] for chunk in chunks}
        sizes = self._chunks[1]
        (digest,) = random.SystemRandom().choices([*sizes], [*sizes.values()])
        began = time.monotonic()
        data = await _get(session, f"{base}/chunks/{digest}", min(sizes[digest], _MAX_CHUNK_BYTES))
        took_s = time.monotonic() - began
        if await asyncio.to_thread(digest_bytes, data) != digest:
            raise BadSignature(f"{len(data)} bytes that are no chunk of version {newest.version}")
        return len(data) / max(took_s, 1e-6)


async def _get(session: aiohttp.ClientSession, url: str, size: int) -> bytes:
    most = max(size, _LONGEST_ERROR)
    answer = await fetch(session, "GET", url, max_bytes=most, timeout_s=_DEADLINE_S)
    if 300 <= answer.status < 400:
        raise BadSignature(f"a redirect ({answer.status})")
    if answer.status != 200:
        raise NoAnswer(f"status {answer.status} for {url.rpartition('/')[2][:80]}")
    return answer.content
