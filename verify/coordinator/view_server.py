"""HTTP handlers for a page of the run: every request is signed with the coordinator's own key."""

from __future__ import annotations

import asyncio

from aiohttp import web

from runspec.core.roles import Roles
from verify.coordinator.edge.authentication import Authentication
from verify.coordinator.intake import Refusal
from verify.coordinator.services.data import send_file
from verify.coordinator.services.view import View

_NUMBER = "[0-9]{1,15}"


class ViewApi:
    """The endpoints below `/v1/view` (docs/coordinator.md).

    Args:
        view: service that the endpoints call.
        roles: names the coordinator's key.
        authentication: identifies callers.
    """

    def __init__(self, view: View, roles: Roles, authentication: Authentication) -> None:
        self._view, self._roles, self._authentication = view, roles, authentication

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(f"/v1/view/ledger/{{after:{_NUMBER}}}", self._ledger),
            web.get(f"/v1/view/metrics/{{offset:{_NUMBER}}}", self._metrics),
            web.get("/v1/view/tokenizer", self._tokenizer),
            web.get(
                "/v1/view/{kind:submission|verdict}/{step:[0-9]{1,9}}/{digest:[0-9a-f]{64}}",
                self._table,
            ),
        ]

    async def _ledger(self, request: web.Request) -> web.StreamResponse:
        self._operator(request)
        after = int(request.match_info["after"])
        return web.Response(body=await asyncio.to_thread(self._view.ledger, after))

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        self._operator(request)
        offset = int(request.match_info["offset"])
        return web.Response(body=await asyncio.to_thread(self._view.metrics, offset))

    async def _tokenizer(self, request: web.Request) -> web.StreamResponse:
        self._operator(request)
        return await send_file(request, self._view.tokenizer())

    async def _table(self, request: web.Request) -> web.StreamResponse:
        self._operator(request)
        asked = request.match_info
        return await send_file(
            request, self._view.table(asked["kind"], int(asked["step"]), asked["digest"])
        )

    def _operator(self, request: web.Request) -> None:
        if self._authentication.caller(request).key not in self._roles.coordinator:
            raise Refusal(403, "only the coordinator's own key may do this")
