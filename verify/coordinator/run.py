"""Process of the coordinator: reads the run directory and serves its HTTP API until SIGTERM.

The caller's signature is checked before anything of a body is read. Bodies are limited in size and
time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from aiohttp import web

from runspec.core.connection_limits import answering
from runspec.core.errors import NotNow, UserError
from runspec.core.files import read_bounded
from runspec.core.http_server import until
from runspec.core.process import not_retried, stop_event_of_loop
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.roles import Roles, open_roles, read_own_workers
from runspec.core.schema import RunSpec
from runspec.core.schema.load import load_resolved
from runspec.core.schema.role_names import island_names, worker_names
from runspec.core.signed import BadSignature, SigningKey
from verify.coordinator.authentication import Authentication, Connections, Limiter, networks
from verify.coordinator.closing import Closing
from verify.coordinator.handlers import Backlog, Handler, RunContext
from verify.coordinator.handlers.islands import Islands
from verify.coordinator.handlers.judging import Judging
from verify.coordinator.handlers.leasing import Leasing
from verify.coordinator.handlers.operator import Operator
from verify.coordinator.handlers.public import Evaluations, SiteHandlers, Status
from verify.coordinator.journal import Finished, Journal
from verify.coordinator.ledger import open_ledger
from verify.coordinator.machine.events import IllegalTransition
from verify.coordinator.machine.state import Policy
from verify.coordinator.requests import Refusal
from verify.coordinator_http import RequestChecker, Unauthorised
from verify.profile import gap_noise_by_pool

_log = logging.getLogger(__name__)


async def serve(
    run_dir: Path,
    *,
    host: str,
    port: int,
    weights: str,
    root_public_key: str,
    public_weights: Sequence[str] = (),
    started: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve a run until SIGTERM, SIGINT or cancellation.

    Args:
        run_dir: holds spec.json, keys/ and, after the first start, state.db and rollouts/.
        host, port: where to listen; port 0 picks a free one.
        weights: URL of the origin or relay that serves latest.json.
        root_public_key: the pinned root key (hex).
        public_weights: URLs of relays and origin for volunteers; `weights` if empty.
        started: called with the port once requests are answered.

    Raises:
        UserError: the address or the ledger cannot be used.
        RunStopped: the spec or the keys cannot be used, a step stalled, or the files contradict the
            ledger.
    """
    with not_retried():
        spec = load_resolved(run_dir)
        key = SigningKey.load(run_dir / "keys" / "coordinator.key")
        roles_document, roles = _read_roles(run_dir, spec, key, root_public_key)
        noise = gap_noise_by_pool(spec)
    # In a thread, because a database may be slow to answer.
    ledger = await asyncio.to_thread(open_ledger, run_dir, spec)
    journal = Journal(run_dir, Policy.of(spec), ledger=ledger)
    own = read_own_workers(run_dir / "keys")
    mine = [own[name] for name in worker_names(spec) if name in own]
    limiter, proxies = Limiter(), networks(spec.verify.proxies)
    authentication = Authentication(journal, RequestChecker(spec.name), limiter, roles, proxies)
    backlog = Backlog(journal, spec.verify.backlog)
    run = RunContext(journal, spec, key, roles, authentication, backlog)
    islands = None if journal.state.policy.islands is None else Islands(run)
    site = SiteHandlers(run, roles_document, public_weights or [weights])
    server = Server(
        [
            *site.routes(),
            *Status(run).routes(),
            *Evaluations(run).routes(),
            *Operator(run).routes(),
            *Judging(run, noise).routes(),
            *Leasing(run, mine, limiter).routes(),
            *(islands.routes() if islands is not None else ()),
        ]
    )
    closing, stop = Closing(run, islands), stop_event_of_loop()
    try:
        async with Connections().serving(server.application, host, port) as (bound, _):
            try:
                _log.info("coordinator listens on http://%s:%d", host, bound)
                started(bound)
                watching = closing.watch_latest(weights)
                await until(stop, server.failure, watching, closing.keep_time())
            finally:
                journal.stop()
    finally:
        site.close()
        server.failure.cancel()
        journal.close()


def _read_roles(
    run_dir: Path, spec: RunSpec, key: SigningKey, root_public_key: str
) -> tuple[bytes, Roles]:
    path = run_dir / "keys" / "roles.json"
    try:
        document = read_bounded(path, MAX_ROLES_BYTES)
        roles = open_roles(document, root_public_key=root_public_key, run=spec.name)
    except (OSError, BadSignature) as error:
        raise UserError(
            f"cannot be verified: {error}",
            place=str(path),
            remedy="check identity.root_public_key, or sign roles.json again with the root key",
        ) from error
    if key.public_hex not in roles.coordinator:
        raise UserError(
            f"does not name keys/coordinator.key ({key.public_hex[:16]}) as a coordinator's",
            place=str(path),
            remedy="sign roles.json for this key with the root key",
        )
    unnamed = [name for name in island_names(spec) if name not in roles.islands]
    if unnamed:
        raise UserError(
            f"does not name the keys of learner islands {', '.join(unnamed)}",
            place=str(path),
            remedy="sign roles.json for all of learner.islands.members with the root key",
        )
    return document, roles


class Server:
    """The endpoints of `docs/coordinator.md`.

    Args:
        routes: endpoints with their handlers.
    """

    def __init__(self, routes: Iterable[web.RouteDef]) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Receives the error after which the process must end: the ledger cannot be written."""
        self.application = web.Application(middlewares=[answering, self._errors])
        self.application.add_routes(routes)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
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
