"""HTTP handlers of the coordinator: authentication, size limits, status codes.

The caller's signature is checked before anything of a body is read. Bodies are limited in size and
time.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from runspec.core.errors import NotNow, UserError
from runspec.core.hashing import digest_bytes, is_digest
from runspec.core.roles import Roles
from runspec.core.signed import BadSignature
from verify.coordinator.edge.authentication import Authentication
from verify.coordinator.edge.bodies import read_body, read_json
from verify.coordinator.intake import Refusal, refusing
from verify.coordinator.island_server import IslandApi
from verify.coordinator.journal import Finished, Journal
from verify.coordinator.machine.events import IllegalTransition
from verify.coordinator.services.activity import Peers, scalars
from verify.coordinator.services.data import SiteService, send_file, send_json
from verify.coordinator.services.evaluations import Evaluations
from verify.coordinator.services.islands import Islands
from verify.coordinator.services.judging import Judging
from verify.coordinator.services.leasing import Leasing
from verify.coordinator.services.operator import OperatorService
from verify.coordinator.services.status import Status
from verify.coordinator.services.view import View
from verify.coordinator.services.workers import LISTS
from verify.coordinator.view_server import ViewApi
from verify.coordinator_http import ENVELOPE, SignedRequest, Unauthorised
from verify.formats.evaluation import MAX_EVALUATION_BYTES
from verify.formats.submission import open_submission
from verify.formats.verdict import open_verdict

_log = logging.getLogger(__name__)

MAX_WAIT_S = 30.0
_MAX_HOLDING = 64
_CHUNK_BYTES = 1 << 20
_SMALL_BYTES = 64 * 1024
"""Larger answers count as downloads, and few downloads may be sent at once."""
_LIST = f"{{name:{'|'.join(LISTS)}}}"
_KEY = "{key:[0-9a-f]{64}}"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Services:
    """The services behind the endpoints."""

    leasing: Leasing
    """For workers."""
    judging: Judging
    """For validators."""
    operator: OperatorService
    """For the holder of the coordinator's key."""
    site: SiteService
    """For volunteers, who need more than the spec."""
    status: Status
    """For everybody."""
    evaluations: Evaluations
    """For the evaluator."""
    view: View
    """For a page of the run elsewhere."""
    islands: Islands | None
    """For learner islands; None for one learner."""


@dataclass(frozen=True)
class Documents:
    """Signed documents that everybody may read."""

    spec: bytes
    """The resolved spec."""
    roles: bytes


class Api:
    """The endpoints of `docs/coordinator.md`.

    Args:
        journal: journal of the run.
        services: services that the endpoints call.
        peers: records the activity of workers and validators.
        authentication: identifies and limits callers.
        roles: names the validators.
        documents: public documents.
    """

    def __init__(
        self,
        journal: Journal,
        services: Services,
        peers: Peers,
        authentication: Authentication,
        roles: Roles,
        documents: Documents,
    ) -> None:
        self._journal, self._peers, self._roles = journal, peers, roles
        self._authentication, self._documents = authentication, documents
        self._leasing, self._judging = services.leasing, services.judging
        self._operator, self._site = services.operator, services.site
        self._status, self._islands = services.status, services.islands
        self._evaluations, self._view = services.evaluations, services.view
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Receives the error after which the process must end: the ledger cannot be written."""

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._errors])
        application.add_routes(
            [
                web.get("/v1/spec", self._public(self._spec)),
                web.get("/v1/roles", self._public(self._get_roles)),
                web.get("/v1/site", self._public(self._get_site)),
                web.get("/v1/data/{digest:[0-9a-f]{64}}", self._public(self._get_data)),
                web.get("/v1/status", self._public(self._get_status)),
                web.get(f"/v1/lists/{_LIST}", self._public(self._get_list)),
                web.get(f"/v1/lists/{_LIST}/{_KEY}", self._public(self._get_list)),
                web.get(f"/v1/workers/{_KEY}", self._public(self._get_worker)),
                web.get("/metrics", self._public(self._metrics)),
                web.get("/healthz", self._public(self._healthz)),
                web.post("/v1/workers", self._register),
                web.post("/v1/heartbeat", self._heartbeat),
                web.post("/v1/leases", self._lease),
                web.post("/v1/release", self._release),
                web.post("/v1/submissions", self._submit),
                web.post("/v1/validator/next", self._next),
                web.post("/v1/validator/release", self._release_claims),
                web.get("/v1/submissions/{digest:[0-9a-f]{64}}", self._download),
                web.post("/v1/verdicts", self._verdict),
                web.get("/v1/evaluations", self._public(self._get_evaluations)),
                web.post("/v1/evaluations", self._evaluated),
                web.post("/v1/operator/ban", self._ordered(self._operator.ban)),
                web.post("/v1/operator/unban", self._ordered(self._operator.unban)),
                web.post("/v1/operator/revoke", self._ordered(self._operator.revoke)),
            ]
        )
        application.add_routes(ViewApi(self._view, self._roles, self._authentication).routes())
        if self._islands is not None:
            application.add_routes(IslandApi(self._islands, self._authentication).routes())
        return application

    def _public(self, handler: _Handler) -> _Handler:
        """Let everybody call a handler, within the limits of unsigned requests."""

        async def answer(request: web.Request) -> web.StreamResponse:
            self._authentication.public(request)
            return await handler(request)

        return answer

    # -- Public ----------------------------------------------------------------------------------

    async def _spec(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._documents.spec, content_type="application/json")

    async def _get_roles(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._documents.roles, content_type="application/json")

    async def _get_site(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=await self._site.document(), content_type="application/json")

    async def _get_data(self, request: web.Request) -> web.StreamResponse:
        path = await self._site.path(request.match_info["digest"])
        if path is None:
            raise Refusal(404, "no file of the data has this digest")
        with self._authentication.download(request):
            return await send_file(request, path)

    async def _get_status(self, request: web.Request) -> web.StreamResponse:
        return await self._send_json(request, self._status.document())

    async def _get_list(self, request: web.Request) -> web.StreamResponse:
        at = request.match_info
        document = self._status.page(at["name"], at.get("key", ""))
        tag = f'"{digest_bytes(document)}"'
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers={"ETag": tag})
        return await self._send_json(request, document, {"ETag": tag})

    async def _get_worker(self, request: web.Request) -> web.StreamResponse:
        found = self._status.worker(request.match_info["key"])
        if found is None:
            raise Refusal(404, "no worker has this key")
        return web.json_response(found)

    async def _get_evaluations(self, request: web.Request) -> web.StreamResponse:
        return await self._send_json(request, self._evaluations.document())

    async def _send_json(
        self, request: web.Request, document: bytes, headers: Mapping[str, str] | None = None
    ) -> web.StreamResponse:
        if len(document) <= _SMALL_BYTES:
            return web.Response(body=document, content_type="application/json", headers=headers)
        with self._authentication.download(request):
            return await send_json(request, document, headers or {})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=self._status.metrics(), headers=headers)

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    # -- Workers ---------------------------------------------------------------------------------

    async def _register(self, request: web.Request) -> web.StreamResponse:
        caller = self._authentication.caller(request, "registration")
        body = await read_json(request, caller, {"pool", "info"}, {"invite"})
        if not isinstance(body["pool"], str) or not isinstance(body["info"], dict):
            raise Refusal(400, "pool must be a name and info a map")
        with refusing(400, ValueError, what="info: "):
            info = scalars(body["info"])
        address = self._authentication.address(request)
        self._leasing.register(caller.key, body["pool"], body.get("invite"), address=address)
        self._peers.workers.registered(caller.key, info, self._journal.clock())
        return web.json_response({})

    async def _heartbeat(self, request: web.Request) -> web.StreamResponse:
        caller = self._authentication.caller(request, "heartbeat")
        body = await read_json(request, caller, {"state"})
        if caller.key in self._roles.validator:
            activity = self._peers.validators
        elif caller.key in self._journal.state.workers:
            activity = self._peers.workers
        else:
            raise Refusal(403, "this key is neither a worker's nor a validator's")
        with refusing(400, TypeError, ValueError, what="state: "):
            activity.heartbeat(caller.key, dict(body["state"]), self._journal.clock())
        self._judging.claims.prolong(caller.key, self._journal.clock())
        return web.json_response({})

    async def _lease(self, request: web.Request) -> web.StreamResponse:
        caller = self._authentication.caller(request, "lease")
        wait_s, holding = _wait_and_holding(await read_json(request, caller, {"wait", "holding"}))
        if caller.key in self._journal.state.workers:
            self._peers.workers.seen(caller.key, self._journal.clock())
        with self._authentication.poll(caller.key, request):
            lease = await self._leasing.lease(caller.key, holding, wait_s)
        if lease is None:
            return web.Response(status=204)
        return web.Response(body=lease, content_type="application/json")

    async def _release(self, request: web.Request) -> web.StreamResponse:
        caller = self._authentication.caller(request, "release")
        leases = _digests("leases", (await read_json(request, caller, {"leases"}))["leases"])
        self._leasing.release(caller.key, leases)
        return web.json_response({})

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        caller = self._authentication.caller(request, "submission")
        signed = _envelope(request)
        with refusing(400, BadSignature):
            envelope = open_submission(signed)
        if envelope.worker != caller.key:
            raise Refusal(403, "the submission is another worker's")
        if envelope.digest != caller.body_digest:
            raise Refusal(400, "the envelope names another body")
        await self._leasing.submit(envelope, signed, request.content.iter_chunked(_CHUNK_BYTES))
        return web.json_response({}, status=202)

    # -- Validators ------------------------------------------------------------------------------

    async def _next(self, request: web.Request) -> web.StreamResponse:
        caller = self._validator(request)
        wait_s, holding = _wait_and_holding(await read_json(request, caller, {"wait", "holding"}))
        found = await self._judging.next_submission(caller.key, holding, wait_s)
        if found is None:
            return web.Response(status=204)
        record, envelope = found
        return web.json_response(
            {
                "step": record.lease.step,
                "submission": record.submission,
                "lease": record.document,
                "envelope": envelope.decode(),
                "share": self._judging.share_of(record),
            }
        )

    async def _release_claims(self, request: web.Request) -> web.StreamResponse:
        caller = self._validator(request)
        body = await read_json(request, caller, {"submissions", "fault"})
        submissions = _digests("submissions", body["submissions"])
        if not isinstance(body["fault"], str):
            raise Refusal(400, "fault must be a text")
        self._judging.release(caller.key, submissions, body["fault"])
        return web.json_response({})

    async def _download(self, request: web.Request) -> web.StreamResponse:
        self._validator(request)
        path = self._judging.submission_file(request.match_info["digest"])
        if path is None:
            raise Refusal(404, "no such submission")
        return await send_file(request, path)

    async def _verdict(self, request: web.Request) -> web.StreamResponse:
        caller = self._validator(request)
        signed = _envelope(request)
        with refusing(400, BadSignature):
            envelope = open_verdict(signed, validators=frozenset({caller.key}))
        if envelope.digest != caller.body_digest:
            raise Refusal(400, "the envelope names another body")
        chunks = request.content.iter_chunked(_CHUNK_BYTES)
        await self._judging.judge(caller.key, envelope, signed, chunks)
        return web.json_response({}, status=202)

    # -- The evaluator ---------------------------------------------------------------------------

    async def _evaluated(self, request: web.Request) -> web.StreamResponse:
        caller = self._authentication.caller(request)
        if caller.key not in self._roles.evaluator:
            raise Refusal(403, "roles.json does not name this key as an evaluator's")
        document = await read_body(request, caller, MAX_EVALUATION_BYTES)
        self._evaluations.add(document, caller.key)
        return web.json_response({}, status=202)

    # -- The operator ----------------------------------------------------------------------------

    def _ordered(self, action: Callable[[dict[str, Any]], None]) -> _Handler:
        """Let the operator call an action with a key and a reason."""

        async def answer(request: web.Request) -> web.StreamResponse:
            caller = self._authentication.caller(request)
            if caller.key not in self._roles.coordinator:
                raise Refusal(403, "only the coordinator's own key may do this")
            action(await read_json(request, caller, {"key", "reason"}))
            return web.json_response({})

        return answer

    # -- Validators' keys and errors -------------------------------------------------------------

    def _validator(self, request: web.Request) -> SignedRequest:
        caller = self._authentication.caller(request)
        if caller.key not in self._roles.validator:
            raise Refusal(403, "roles.json does not name this key as a validator's")
        self._peers.validators.seen(caller.key, self._journal.clock())
        return caller

    @web.middleware
    async def _errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as error:
            # At debug level, because anybody can cause any number of these lines.
            _log.debug("%s %s refused: %s", request.method, request.path, error)
            return _error(error.status, error.words, error.retry_after_s)
        except Unauthorised as error:
            return _error(401, str(error))
        except Finished:
            return _error(410, "the run is finished")
        except NotNow:
            words = "the coordinator waits for its disk or its database; ask again"
            return _error(503, words)
        except (UserError, IllegalTransition) as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            return _error(503, "the coordinator must be started again")


def _error(status: int, words: str, retry_after_s: float | None = None) -> web.Response:
    headers = None
    if retry_after_s is not None:
        headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    return web.json_response({"error": words}, status=status, headers=headers)


def _wait_and_holding(body: dict[str, Any]) -> tuple[float, list[str]]:
    wait, holding = body["wait"], _digests("holding", body["holding"])
    # Compared before the conversion, because a float cannot hold every integer of JSON.
    if type(wait) not in (int, float) or not 0 <= wait < math.inf:
        raise Refusal(400, "wait must be a number of seconds")
    return float(min(wait, MAX_WAIT_S)), holding


def _digests(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or len(value) > _MAX_HOLDING:
        raise Refusal(400, f"{name} must be a list of at most {_MAX_HOLDING} digests")
    if not all(is_digest(digest) for digest in value):
        raise Refusal(400, f"{name} must be a list of digests")
    return value


def _envelope(request: web.Request) -> bytes:
    try:
        return base64.b64decode(request.headers[ENVELOPE], validate=True)
    except KeyError as error:
        raise Refusal(400, f"header {ENVELOPE} is missing") from error
    except (binascii.Error, ValueError) as error:
        raise Refusal(400, f"header {ENVELOPE} is not base64: {error}") from error
