"""What the handlers of a run share: its journal and keys, and how a request reaches a handler."""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from runspec.core.roles import Roles
from runspec.core.schema import RunSpec
from runspec.core.signed import SigningKey
from verify.coordinator.edge.authentication import Authentication
from verify.coordinator.edge.backlog import Backlog
from verify.coordinator.edge.requests import Refusal, read_json, send
from verify.coordinator.handlers.workers import Activity
from verify.coordinator.journal import Journal
from verify.coordinator.machine.claims import Claims
from verify.coordinator_http import SignedRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answer = web.StreamResponse | dict[str, Any] | None
"""An answer, or what is sent as JSON; None: an empty map."""
_SMALL_BYTES = 64 * 1024
"""Larger answers count as downloads, and few downloads may be sent at once."""


@dataclass(frozen=True)
class Signed:
    """A signed request with a JSON body."""

    key: str
    """Public key of the caller."""
    body: dict[str, Any]
    http: web.Request


@dataclass(frozen=True)
class RunContext:
    """One run as its handlers see it."""

    journal: Journal
    spec: RunSpec
    """The resolved spec."""
    key: SigningKey
    """Signs what the coordinator grants."""
    roles: Roles
    authentication: Authentication
    """Identifies and limits callers."""
    backlog: Backlog
    """Limits the waiting submissions."""
    workers: Activity = field(default_factory=Activity)
    validators: Activity = field(default_factory=Activity)
    islands: Activity = field(default_factory=Activity)
    """Activity of learner islands, by name instead of key."""
    claims: Claims = field(default_factory=Claims)
    """Which validator works on which submission."""

    def operator(self, request: web.Request) -> SignedRequest:
        """Return who signed a request that only the coordinator's key may make.

        Raises:
            Refusal: 403, it is another key.
        """
        caller = self.authentication.caller(request)
        if caller.key not in self.roles.coordinator:
            raise Refusal(403, "only the coordinator's own key may do this")
        return caller

    def get(
        self, path: str, handler: Handler, by: Callable[[web.Request], SignedRequest | None]
    ) -> web.RouteDef:
        """Let a handler answer requests without a body.

        Args:
            path: path of the requests.
            handler: answers a request.
            by: identifies the caller or, if anybody may ask, limits unsigned requests.
        """

        async def answer(request: web.Request) -> web.StreamResponse:
            by(request)
            return await handler(request)

        return web.get(path, answer)

    def post(
        self,
        path: str,
        handler: Callable[[Signed], Awaitable[Answer]],
        *fields: str,
        by: Callable[[web.Request], SignedRequest] | str,
    ) -> web.RouteDef:
        """Let a handler answer signed requests that have a JSON body.

        Args:
            path: path of the requests.
            handler: answers a request.
            fields: fields that the body must have; it may have those with a question mark.
            by: identifies the caller, or is the kind of a worker's request (`RATES`).
        """

        needed = {name for name in fields if not name.startswith("?")}
        optional = {name[1:] for name in fields if name.startswith("?")}

        async def answer(request: web.Request) -> web.StreamResponse:
            caller = by(request) if callable(by) else self.authentication.caller(request, by)
            body = await read_json(request, caller, needed, optional)
            found = await handler(Signed(caller.key, body, request))
            if isinstance(found, web.StreamResponse):
                return found
            return web.json_response(found or {})

        return web.post(path, answer)

    async def send_json(
        self, request: web.Request, document: bytes, headers: Mapping[str, str] | None = None
    ) -> web.StreamResponse:
        """Answer with a JSON document that may be large.

        Raises:
            Refusal: 503, too many large answers are being sent.
        """
        if len(document) <= _SMALL_BYTES:
            return web.Response(body=document, content_type="application/json", headers=headers)
        with self.authentication.download(request):
            headers = {"Content-Type": "application/json", **(headers or {})}
            return await send(request, io.BytesIO(document), len(document), headers)
