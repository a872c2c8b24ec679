"""Serves the page of one or more runs over HTTP, and what it asks for.

On loopback everybody on this machine may read. Elsewhere every request for data needs a token,
which the page takes from its own address (`#token=...`), so that it never stands in a log.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address

from aiohttp import web

from runspec.core.errors import UserError
from runspec.local.dashboard.page import SECTIONS, PageData, live_page
from runspec.local.formatting import reported

REFRESH_S = 2.0
TOKEN = "Runspec-Token"  # noqa: S105 - a header's name
MAX_QUERY = 400
"""Largest number of characters of a search."""
_NUMBER = "[0-9]{1,9}"
_HOSTS = {"localhost", "127.0.0.1", "[::1]"}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


class Dashboard:
    """The page's endpoints.

    Args:
        views: runs that the page shows.
        token: that requests for data must bring; None: none, and only requests that name this
            machine as their host are answered, so that no other site's page can read.
    """

    def __init__(self, views: Sequence[PageData], token: str | None) -> None:
        self._views, self._token = views, token

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard])
        run = f"/api/{{run:{_NUMBER}}}"
        application.add_routes(
            [
                web.get("/", self._page),
                web.get(run, self._changes),
                web.get(f"{run}/search", self._search),
                web.get(f"{run}/rollout/{{id:{_NUMBER}}}", self._rollout),
            ]
        )
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        host = request.host.rpartition(":")[0] or request.host
        if self._token is None and host not in _HOSTS and request.host not in _HOSTS:
            raise web.HTTPForbidden(text="ask for localhost\n")
        given = request.headers.get(TOKEN, "").encode(errors="surrogateescape")
        allowed = self._token is None or hmac.compare_digest(given, self._token.encode())
        if request.path != "/" and not allowed:
            raise web.HTTPUnauthorized(text="a token is needed\n")
        answer = await handler(request)
        answer.headers["Cache-Control"] = "no-store"
        answer.headers["X-Content-Type-Options"] = "nosniff"
        answer.headers["Referrer-Policy"] = "no-referrer"
        return answer

    async def _page(self, request: web.Request) -> web.StreamResponse:
        page = live_page([view.name for view in self._views])
        return web.Response(text=page, content_type="text/html")

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        names = (*SECTIONS, "rollouts")
        known = {name: request.query.get(name, "") for name in names}
        numbers = {n: int(text) for n, text in known.items() if re.fullmatch(_NUMBER, text)}
        text = await asyncio.to_thread(self._run(request).answer, numbers)
        answer = web.Response(text=text, content_type="application/json")
        answer.enable_compression()
        return answer

    async def _search(self, request: web.Request) -> web.StreamResponse:
        words = request.query.get("q", "")[:MAX_QUERY]
        return web.json_response(await asyncio.to_thread(self._run(request).rollouts.search, words))

    async def _rollout(self, request: web.Request) -> web.StreamResponse:
        rollouts, each = self._run(request).rollouts, int(request.match_info["id"])
        try:
            found = await asyncio.to_thread(rollouts.detail, each)
        except UserError as error:
            raise web.HTTPGone(text=f"{error.place}: {error.thing}\n") from error
        if found is None:
            raise web.HTTPNotFound(text="no such rollout\n")
        answer = web.json_response(found)
        answer.enable_compression()
        return answer

    def _run(self, request: web.Request) -> PageData:
        number = int(request.match_info["run"])
        if number >= len(self._views):
            raise web.HTTPNotFound(text="no such run\n")
        return self._views[number]


async def serve(
    views: Sequence[PageData], host: str, port: int, tell: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        views: runs that the page shows.
        host, port: where to listen; 0 takes a free port.
        tell: called with the page's address once it is served.

    Raises:
        UserError: nothing can listen there.
    """
    token = None if is_loopback(host) else secrets.token_urlsafe(16)
    runner = web.AppRunner(Dashboard(views, token).application(), access_log=None)
    await runner.setup()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    following = asyncio.ensure_future(_follow(views))
    try:
        site = web.TCPSite(runner, host, port)
        remedy = "choose another address with --listen HOST:PORT"
        with reported("cannot listen", f"{host}:{port}", remedy, OSError):
            await site.start()
        (address, *_) = runner.addresses
        shown = f"[{host}]" if ":" in host else host
        tell(f"http://{shown}:{address[1]}/" + (f"#token={token}" if token else ""))
        ended = asyncio.ensure_future(stop.wait())
        await asyncio.wait([ended, following], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if following.done():
            following.result()
    finally:
        following.cancel()
        await runner.cleanup()


async def _follow(views: Sequence[PageData]) -> None:
    """Bring the runs up to date, one after another, again and again."""
    while True:
        for view in views:
            await asyncio.to_thread(view.refresh)
        if not any(view.rollouts.is_behind for view in views):
            await asyncio.sleep(REFRESH_S)
