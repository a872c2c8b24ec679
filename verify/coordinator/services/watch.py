"""Watches the publisher's latest.json at an origin or relay, by long poll."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NoReturn

import aiohttp

from runspec.core.errors import NotNow
from runspec.core.latest import MAX_BYTES, Latest, open_latest
from runspec.core.roles import Roles
from runspec.core.signed import BadSignature

_log = logging.getLogger(__name__)
_WAIT_S = 10
_TIMEOUT = aiohttp.ClientTimeout(total=_WAIT_S + 20.0, connect=5.0)
_LEAST_PERIOD_S = 0.2
"""Seconds between polls of a server that answers at once without news (a plain file server)."""
_LONGEST_PAUSE_S = 2.0
_REMIND_EVERY_S = 60.0


async def watch_latest(
    url: str,
    *,
    run: str,
    roles: Roles,
    newest: Callable[[], int | None],
    published: Callable[[Latest], None],
) -> NoReturn:
    """Calls `published` with each latest.json that names another version, until cancelled.

    Args:
        url: of the origin or relay.
        run: the run's name.
        roles: names the publishers.
        newest: the newest version known so far.
        published: told of what is new.
    """
    pause, trouble_since, reminded, said = _LEAST_PERIOD_S, 0.0, -_REMIND_EVERY_S, False
    async with aiohttp.ClientSession(timeout=_TIMEOUT, trust_env=False) as session:
        while True:
            asked, known = time.monotonic(), newest()
            try:
                latest = await _ask(session, url, run, roles, known)
                if latest is not None:
                    published(latest)
            except (aiohttp.ClientError, TimeoutError, BadSignature, NotNow) as error:
                trouble_since = trouble_since or asked
                if time.monotonic() - reminded > _REMIND_EVERY_S:
                    reminded, said = time.monotonic(), True
                    _log.warning(
                        "waiting for latest.json at %s for %.0f s: %s",
                        *(url, reminded - trouble_since, error or type(error).__name__),
                    )
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            if said:
                _log.info("latest.json at %s can be read again", url)
            pause, trouble_since, said = _LEAST_PERIOD_S, 0.0, False
            if latest is None or (known is not None and latest.version <= known):
                await asyncio.sleep(max(0.0, asked + _LEAST_PERIOD_S - time.monotonic()))


async def _ask(
    session: aiohttp.ClientSession, url: str, run: str, roles: Roles, known: int | None
) -> Latest | None:
    """Fetch latest.json; None if nothing is published yet."""
    query = {} if known is None else {"after": str(known), "wait": str(_WAIT_S)}
    address = f"{url.rstrip('/')}/{run}/latest.json"
    # Relays do not redirect, as in `broadcast`; some redirects name no valid address.
    async with session.get(address, params=query, allow_redirects=False) as answer:
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise BadSignature(f"latest: HTTP {answer.status}")
        data = b""
        async for piece in answer.content.iter_chunked(MAX_BYTES):
            data += piece
            if len(data) > MAX_BYTES:
                raise BadSignature(f"latest: more than {MAX_BYTES} bytes")
        return open_latest(data, run=run, publishers=roles.publisher)
