"""HTTP handlers for learner islands; every request is signed with an island's key."""

from __future__ import annotations

import math
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from aiohttp import web

from runspec.core.hashing import is_digest
from runspec.core.signed import BadSignature
from verify.coordinator.edge.authentication import Authentication
from verify.coordinator.edge.bodies import read_body, read_json
from verify.coordinator.intake import Refusal, refusing
from verify.coordinator.services.data import send_file
from verify.coordinator.services.islands import Islands
from verify.coordinator_http import SignedRequest
from verify.formats.islands import read_stored

MAX_WAIT_S = 30.0
_STEP = "{step:[0-9]{1,9}}"


class IslandApi:
    """The endpoints below `/v1/islands` (docs/coordinator.md).

    Args:
        islands: service that the endpoints call.
        authentication: identifies callers.
    """

    def __init__(self, islands: Islands, authentication: Authentication) -> None:
        self._islands, self._authentication = islands, authentication

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/islands/outer", self._announce),
            web.get("/v1/islands/outer", self._stored),
            web.post("/v1/islands/offer", self._offer),
            web.get(f"/v1/islands/records/{_STEP}", self._record),
            web.post("/v1/islands/lost", self._lost),
            web.post("/v1/islands/result", self._result),
            web.get(f"/v1/islands/results/{_STEP}", self._get_result),
            web.get(f"/v1/islands/batches/{_STEP}", self._batch),
            web.get(f"/v1/islands/files/{_STEP}/{{name:[0-9a-z.]{{1,100}}}}", self._file),
        ]

    async def _announce(self, request: web.Request) -> web.StreamResponse:
        island, caller = self._island(request)
        body = await read_json(request, caller, {"url", "version", "digest"})
        with refusing(400, BadSignature):
            outer = read_stored({"island": island, **body})
        self._islands.announce(outer)
        return web.json_response({})

    async def _stored(self, request: web.Request) -> web.StreamResponse:
        self._island(request)
        return web.json_response(asdict(self._islands.stored()))

    async def _offer(self, request: web.Request) -> web.StreamResponse:
        island, caller = self._island(request)
        self._islands.offer(island, await read_body(request, caller))
        return web.json_response({})

    async def _record(self, request: web.Request) -> web.StreamResponse:
        self._island(request)
        found = await self._islands.record(_step(request), _wait(request))
        if isinstance(found, bytes):
            return web.Response(body=found, content_type="application/json")
        return web.json_response(found, status=HTTPStatus.ACCEPTED)

    async def _lost(self, request: web.Request) -> web.StreamResponse:
        island, caller = self._island(request)
        body = await read_json(request, caller, {"step", "island"})
        if not _is_whole(body["step"]) or not isinstance(body["island"], str):
            raise Refusal(400, "step must be a whole number and island a name")
        self._islands.lost(island, body["step"], body["island"])
        return web.json_response({})

    async def _result(self, request: web.Request) -> web.StreamResponse:
        island, caller = self._island(request)
        body = await read_json(request, caller, {"step", "record", "digest"})
        step, record, digest = body["step"], body["record"], body["digest"]
        if not _is_whole(step) or not is_digest(record) or not is_digest(digest):
            raise Refusal(400, "step must be a whole number, record and digest 64 hex characters")
        final = await self._islands.result(island, step, record, digest, _wait(request))
        return web.json_response({"final": final})

    async def _get_result(self, request: web.Request) -> web.StreamResponse:
        self._island(request)
        return web.json_response({"digest": self._islands.result_of(_step(request))})

    async def _batch(self, request: web.Request) -> web.StreamResponse:
        self._island(request)
        path = await self._islands.batch(_step(request), _wait(request))
        if path is None:
            return web.Response(status=HTTPStatus.NO_CONTENT)
        return await send_file(request, path)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        self._island(request)
        name = request.match_info["name"]
        path = self._islands.file(_step(request), name)
        if path is None:
            raise Refusal(404, f"the manifest names no file {name}")
        return await send_file(request, path)

    def _island(self, request: web.Request) -> tuple[str, SignedRequest]:
        """Return the island that signed a request, and the request's signature."""
        caller = self._authentication.caller(request)
        return self._islands.caller(caller.key), caller


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _step(request: web.Request) -> int:
    return int(request.match_info["step"])


def _wait(request: web.Request) -> float:
    """Return the seconds that the caller lets the coordinator wait, at most `MAX_WAIT_S`."""
    text = request.query.get("wait", "0")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if not 0.0 <= wait_s < math.inf:
        raise Refusal(400, "wait must be a number of seconds")
    return min(wait_s, MAX_WAIT_S)
