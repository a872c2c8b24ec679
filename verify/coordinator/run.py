"""Process of the coordinator: reads the run directory and serves until SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from runspec.core.connection_limits import answering
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.keys import SigningKey
from runspec.core.process import not_retried, stop_event_of_loop
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.roles import Roles, open_roles, read_own_workers
from runspec.core.signed import BadSignature
from runspec.core.spec.islands import island_names
from runspec.core.spec.resolved import load_resolved
from runspec.core.spec.role_names import worker_names
from runspec.core.spec.schema import RunSpec
from verify.coordinator.edge.authentication import Authentication, networks
from verify.coordinator.edge.backlog import Backlog
from verify.coordinator.edge.limits import Connections, Limiter, NewKeys
from verify.coordinator.journal import Journal
from verify.coordinator.ledger.ledger import open_ledger
from verify.coordinator.machine.state import Policy
from verify.coordinator.server import Api, Documents, Services
from verify.coordinator.services.activity import Peers
from verify.coordinator.services.closing import Closing, watch_latest
from verify.coordinator.services.data import SiteService
from verify.coordinator.services.evaluations import Evaluations
from verify.coordinator.services.islands import Islands
from verify.coordinator.services.judging import Judging
from verify.coordinator.services.leasing import Admission, Leasing
from verify.coordinator.services.operator import OperatorService
from verify.coordinator.services.status import Status
from verify.coordinator.services.view import View
from verify.coordinator_http import RequestChecker
from verify.formats.joining import sign_spec
from verify.profile import gap_noise_by_pool

_SHUTDOWN_S = 0.5
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
    judging = Judging(journal, spec.name, noise)
    own = read_own_workers(run_dir / "keys")
    mine = [own[name] for name in worker_names(spec) if name in own]
    limiter, proxies = Limiter(), networks(spec.verify.proxies)
    authentication = Authentication(journal, RequestChecker(spec.name), limiter, roles, proxies)
    admission = Admission(spec, roles, mine, NewKeys(limiter))
    backlog = Backlog(journal, spec.verify.backlog)
    peers = Peers()
    islands = None
    if journal.state.policy.islands is not None:
        islands = Islands(journal, spec.name, key, roles, peers.islands)
    closing = Closing(journal, spec.name, key, peers.workers, islands)
    site = SiteService(spec, key, public_weights or [weights])
    services = Services(
        Leasing(journal, spec, key, roles, admission, backlog),
        judging,
        OperatorService(journal, roles),
        site,
        Status(spec.name, journal, judging, backlog, peers),
        Evaluations(run_dir, spec, roles),
        View(run_dir, spec),
        islands,
    )
    documents = Documents(sign_spec(spec, key), roles_document)
    api = Api(journal, services, peers, authentication, roles, documents)
    connections = Connections()
    application = api.application()
    application.middlewares.insert(0, answering)
    runner = web.AppRunner(
        application,
        handler_cancellation=True,  # a long poll ends when its caller disconnects
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    stop = stop_event_of_loop()
    tasks: list[asyncio.Future[Any]] = [api.failure]
    try:
        started(_listen(connections, runner, host, port))
        watching = watch_latest(
            weights,
            run=spec.name,
            roles=roles,
            newest=lambda: journal.state.newest.version if journal.state.newest else None,
            published=closing.published,
        )
        tasks += [asyncio.ensure_future(c) for c in (watching, closing.keep_time(), stop.wait())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        journal.stop()
        site.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await connections.close()
        await runner.cleanup()
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
            remedy="check --public-key, or sign roles.json again with the root key",
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


def _listen(connections: Connections, runner: web.AppRunner, host: str, port: int) -> int:
    assert runner.server is not None
    try:
        bound = connections.listen(runner.server, host, port)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise UserError(
            "the port is taken" if taken else f"cannot listen: {error.strerror or error}",
            place=f"{host}:{port}",
            remedy="end the process that holds it, or choose another port"
            if taken
            else "name with --listen an address of this machine",
        ) from error
    _log.info("coordinator listens on http://%s:%d", host, bound)
    return bound
