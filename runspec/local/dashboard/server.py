"""Serves the page of one or more runs over HTTP, and what it asks for.

On loopback everybody on this machine may read. Elsewhere every request for data needs a token,
which the page takes from its own address (`#token=...`), so that it never stands in a log.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from runspec.core.address import is_loopback
from runspec.core.connection_limits import ConnectionLimits, Observer, answering
from runspec.core.errors import UserError
from runspec.core.http_server import serving, until
from runspec.core.process import stop_event_of_loop
from runspec.local.dashboard.page import SECTIONS, PageData, live_page

REFRESH_S = 2.0
TOKEN = "Runspec-Token"  # noqa: S105 - a header's name
MAX_QUERY = 400
"""Largest number of characters of a search."""
_NUMBER = "[0-9]{1,9}"
_HOSTS = {"localhost", "127.0.0.1", "[::1]"}
_LIMITS = ConnectionLimits(connections=256, idle_s=75.0, head_s=30.0, header_bytes=8190)
_log = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def names_this_machine(host: str) -> bool:
    """Return whether a request's Host is this machine; a foreign name may be a foreign page's."""
    return host in _HOSTS or host.rpartition(":")[0] in _HOSTS


def not_kept(answer: web.StreamResponse) -> web.StreamResponse:
    """Return an answer with headers by which browsers neither store it nor guess what it is."""
    answer.headers["Cache-Control"] = "no-store"
    answer.headers["X-Content-Type-Options"] = "nosniff"
    answer.headers["Referrer-Policy"] = "no-referrer"
    return answer


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
        if self._token is None and not names_this_machine(request.host):
            raise web.HTTPForbidden(text="ask for localhost\n")
        given = request.headers.get(TOKEN, "").encode(errors="surrogateescape")
        allowed = self._token is None or hmac.compare_digest(given, self._token.encode())
        if request.path != "/" and not allowed:
            raise web.HTTPUnauthorized(text="a token is needed\n")
        return not_kept(await handler(request))

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
    application = Dashboard(views, token).application()
    application.middlewares.insert(0, answering)
    stop = stop_event_of_loop()
    async with serving(application, (host, port), _LIMITS, Observer(), _log) as (bound, _):
        shown = f"[{host}]" if ":" in host else host
        tell(f"http://{shown}:{bound}/" + (f"#token={token}" if token else ""))
        await until(stop, _follow(views))


async def _follow(views: Sequence[PageData]) -> None:
    """Bring the runs up to date, one after another, again and again."""
    while True:
        for view in views:
            await asyncio.to_thread(view.refresh)
        if not any(view.rollouts.is_behind for view in views):
            await asyncio.sleep(REFRESH_S)
