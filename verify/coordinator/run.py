"""Process of the coordinator: reads the run directory and serves its HTTP API until SIGTERM.

The caller's signature is checked before anything of a body is read. Bodies are limited in size and
time.

`Closing` acts without a request: on new versions, expired leases, steps to close and to commit, and
stalls.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from runspec.core.connection_limits import answering
from runspec.core.errors import NotNow, UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.http_client import NoAnswer, fetch, new_session
from runspec.core.http_server import until
from runspec.core.process import RunStopped, not_retried, stop_event_of_loop
from runspec.core.roles import MAX_BYTES, Latest, Roles, open_latest, open_roles, read_own_workers
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.run_files import STATE_FILE
from runspec.core.schema import RunSpec
from runspec.core.schema.load import load_resolved
from runspec.core.schema.role_names import island_names, worker_names
from runspec.core.signed import BadSignature, SigningKey
from verify.coordinator.authentication import Authentication, Connections, Limiter, networks
from verify.coordinator.handlers import Backlog, Handler, RunContext
from verify.coordinator.handlers.findings import Findings
from verify.coordinator.handlers.islands import Islands
from verify.coordinator.handlers.judging import Judging
from verify.coordinator.handlers.leasing import Leasing
from verify.coordinator.handlers.operator import Operator
from verify.coordinator.handlers.public import Evaluations, SiteHandlers, Status
from verify.coordinator.handlers.registering import Registering
from verify.coordinator.handlers.relays import Relays
from verify.coordinator.journal import Finished, Journal
from verify.coordinator.ledger import open_ledger
from verify.coordinator.machine import events, filling
from verify.coordinator.machine.events import IllegalTransition
from verify.coordinator.machine.stalls import RUN_DIR, Stalled
from verify.coordinator.machine.state import Policy, Tally
from verify.coordinator.machine.verdicts import batch_stats
from verify.coordinator.requests import Refusal
from verify.coordinator_http import RequestChecker, Unauthorised
from verify.formats import batch
from verify.profile import PairLimits

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
        PairLimits(spec, dated=False)
    # In a thread, because a database may be slow to answer.
    ledger = await asyncio.to_thread(open_ledger, run_dir, spec)
    journal = Journal(run_dir, Policy.of(spec), ledger=ledger)
    own = read_own_workers(run_dir / "keys")
    mine = [own[name] for name in worker_names(spec) if name in own]
    limiter, proxies = Limiter(spec.verify.crowd), networks(spec.verify.proxies)
    authentication = Authentication(journal, RequestChecker(spec.name), limiter, roles, proxies)
    backlog = Backlog(journal, spec.verify.backlog)
    run = RunContext(journal, spec, key, roles, authentication, backlog)
    islands = None if journal.state.policy.islands is None else Islands(run)
    relays = Relays(run, limiter)
    site = SiteHandlers(run, roles_document, public_weights or [weights], relays)
    server = Server(
        [
            *site.routes(),
            *Status(run, relays).routes(),
            *relays.routes(),
            *Evaluations(run).routes(),
            *Findings(run, limiter).routes(),
            *Operator(run).routes(),
            *Judging(run).routes(),
            *Registering(run, mine, limiter).routes(),
            *Leasing(run).routes(),
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


_AGAIN_S = 1.0
"""Seconds between two tries to write to a full disk or a locked database."""
_JUMP_S = 60.0
"""Seconds by which the wall clock may move against a steady clock between two looks."""
_WAIT_S = 10
"""Seconds that a server may wait for a newer version before it answers."""
_TIMEOUT_S = _WAIT_S + 20.0
_LEAST_PERIOD_S = 0.2
"""Seconds between polls of a server that answers at once without news (a plain file server)."""
_LONGEST_PAUSE_S = 2.0
_REMIND_EVERY_S = 60.0
_STEPS_AT_ONCE = 64
"""Steps that close before requests are answered again: many may where versions are rare."""


class Closing:
    """Closes each step once.

    Args:
        run: the run.
        islands: commits the steps of learner islands; None for one learner.
        steady: seconds of a clock that nobody sets and that stops while the machine sleeps.
    """

    def __init__(
        self,
        run: RunContext,
        islands: Islands | None = None,
        *,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._journal, self._islands, self._steady = run, run.journal, islands, steady
        policy = run.journal.state.policy
        self._rows_per_step = policy.rows_per_step
        self._island_names = policy.islands.names if policy.islands is not None else ()
        self._ahead = run.journal.clock() - steady()
        self._unwritten: tuple[Path, bytes] | None = None

    def published(self, latest: Latest) -> None:
        """Record the version that the publisher's latest.json names.

        Raises:
            RunStopped: by this ledger the version cannot exist yet, or it was another before.
        """
        state = self._journal.state
        newest, steps, trained = state.newest, state.next_close, "closed"
        if state.policy.islands is not None:
            steps, trained = state.islands.step, "committed"
        if latest.version > steps:
            raise RunStopped(
                f"version {latest.version} is published, but by the ledger only {steps} steps are "
                f"{trained}",
                place=str(self._journal.run_dir / STATE_FILE),
                remedy="restore the ledger, or delete the run and its published weights",
            )
        if newest is None or latest.version > newest.version:
            now, digest = self._journal.clock(), latest.manifest_digest
            self._journal.record(events.VersionPublished(now, latest.version, digest))
            _log.info("version %d is published", latest.version)
        elif latest.version == newest.version and latest.manifest_digest != newest.manifest_digest:
            raise RunStopped(
                f"version {latest.version} is published with manifest {latest.manifest_digest}, "
                f"before it was {newest.manifest_digest}: a version is published once",
                place=f"latest.json of {self._run.spec.name}",
                remedy="find out which publisher signed the second one",
            )

    async def keep_time(self) -> None:
        """Expire leases, close and commit steps, after each event and when a time has passed.

        Raises:
            RunStopped: a step stalled.
            UserError: nothing could be written for too long.
        """
        going_on = True
        while going_on:
            now = self._journal.clock()
            try:
                more = self._advance(now)
                times = [filling.next_due(self._journal.state, now)]
                if self._islands is not None:
                    times.append(self._islands.next_due(now))
                # A time later than `now` would skip some.
                due = now if more else min((at for at in times if at is not None), default=None)
            except NotNow as error:
                self._journal.put_off(error)
                due = self._journal.clock() + _AGAIN_S
            going_on = await self._journal.change(None, due=due)

    def _advance(self, now: float) -> bool:
        """Do what is due; return whether more steps may close now."""
        ahead = now - self._steady()
        if abs(ahead - self._ahead) > _JUMP_S:  # the machine slept, or its clock was set
            _log.warning("the clock jumped by %.0f s: deadlines start again", ahead - self._ahead)
            self._journal.record(events.CoordinatorStarted(now))
        self._ahead = ahead
        self._write_batch()
        for record in filling.expired_leases(self._journal.state, now):
            self._journal.record(events.LeaseExpired(now, record.digest))
            _log.warning(
                "worker %s did not answer its lease %d of step %d in time",
                *(record.lease.worker[:16], record.lease.index, record.lease.step),
            )
        if self._islands is not None and (stalled := self._islands.advance(now)):
            raise self._stopped(stalled)
        for _ in range(_STEPS_AT_ONCE):
            decision = filling.decide_close(self._journal.state, now)
            if decision is None:
                return False
            if isinstance(decision, Stalled):
                raise self._stopped(decision)
            if self._rows_per_step:
                self._sign_rows(decision.step, now)
            else:
                self._close_step(decision, now)
            if self._journal.state.finished:
                _log.info("every step is closed; waiting to be stopped")
        return True

    def _stopped(self, stalled: Stalled) -> RunStopped:
        remedy = stalled.remedy.replace(RUN_DIR, str(self._journal.run_dir))
        return RunStopped(stalled.reason, place=f"run {self._run.spec.name}", remedy=remedy)

    def _close_step(self, decision: filling.Close, now: float) -> None:
        state, step, groups = self._journal.state, decision.step, []
        opened, tally = state.steps[step].opened, state.tallies.get(step, Tally())
        for trained in decision.groups:
            found = state.leases[trained.lease]
            assert found.submission is not None and found.verdict is not None
            group = batch.BatchGroup.of(found.lease, found.submission, found.verdict, trained.group)
            groups.append(group)
        busy = self._run.workers.busy_fraction(now)
        stats = batch_stats(tally, opened=opened, closed=now, busy_fraction=busy)
        stats |= self._journal.history.batch_stats(now, step, decision.groups)
        rows, chain = self._journal.ledger.head
        shares = batch.divide(0, len(groups), self._island_names)
        manifest = batch.BatchManifest(
            *(self._run.spec.name, step, groups, decision.complete, stats, rows, chain, shares)
        )
        self._publish(step, now, decision.groups, batch.sign_batch(manifest, self._run.key))
        _log.info(
            "step %d closed %.2f s after it opened: %d groups (%d leased, %d filtered), "
            "task reward %s, %d submissions rejected",
            *(step, now - opened, len(groups), tally.leased_groups, stats["filtered_groups"]),
            *(stats["task_reward_mean"], tally.rejected_submissions),
        )

    def _sign_rows(self, step: int, now: float) -> None:
        rows = batch.RowRange.of_step(step, self._rows_per_step)
        shares = batch.divide(rows.first, rows.last, self._island_names)
        run, head = self._run, self._journal.ledger.head
        manifest = batch.RangeManifest(run.spec.name, step, rows, *head, shares)
        self._publish(step, now, (), batch.sign_ranges(manifest, run.key))
        _log.info("step %d: rows %d to %d are signed", step, rows.first, rows.last)

    def _publish(
        self, step: int, now: float, trained: tuple[events.TrainedGroup, ...], document: bytes
    ) -> None:
        """Record a closed step and write its manifest."""
        # The ledger before the file: if the process is killed between, the next start writes it.
        self._journal.record(events.StepClosed(now, step, trained, document.decode()))
        self._unwritten = (self._journal.batch_path(step), document)
        self._write_batch()

    def _write_batch(self) -> None:
        """Write the batch manifest that the ledger has and the learner waits for, if any.

        Raises:
            NotNow: the disk is full; the next call tries again.
        """
        if self._unwritten is None:
            return
        path, document = self._unwritten
        try:
            write_atomic(path, document)
        except UserError as error:
            raise NotNow(error.thing, place=error.place, remedy=error.remedy) from error
        self._unwritten = None
        self._journal.written(str(path))

    async def watch_latest(self, url: str) -> NoReturn:
        """Poll an origin or relay for latest.json and record each version, until cancelled."""
        run, publishers = self._run.spec.name, self._run.roles.publisher
        pause, trouble_since, reminded, warned = _LEAST_PERIOD_S, 0.0, -_REMIND_EVERY_S, False
        latest_url = f"{url.rstrip('/')}/{run}/latest.json"
        async with new_session() as session:
            while True:
                asked, newest = time.monotonic(), self._journal.state.newest
                known = None if newest is None else newest.version
                query = "" if known is None else f"?after={known}&wait={_WAIT_S}"
                try:
                    # Relays do not redirect (`broadcast`); some redirects name no valid address.
                    answer = await fetch(
                        *(session, "GET", latest_url + query),
                        max_bytes=MAX_BYTES,
                        timeout_s=_TIMEOUT_S,
                    )
                    latest = None
                    if answer.status == HTTPStatus.OK:
                        latest = open_latest(answer.content, run=run, publishers=publishers)
                        self.published(latest)
                    elif answer.status != HTTPStatus.NOT_FOUND:  # 404: nothing is published yet
                        raise NoAnswer(f"HTTP {answer.status}")
                except (NoAnswer, BadSignature, NotNow) as error:
                    trouble_since = trouble_since or asked
                    if time.monotonic() - reminded > _REMIND_EVERY_S:
                        reminded, warned = time.monotonic(), True
                        _log.warning(
                            "waiting for latest.json at %s for %.0f s: %s",
                            *(url, reminded - trouble_since, error),
                        )
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
                    continue
                if warned:
                    _log.info("latest.json at %s can be read again", url)
                pause, trouble_since, warned = _LEAST_PERIOD_S, 0.0, False
                if latest is None or (known is not None and latest.version <= known):
                    await asyncio.sleep(max(0.0, asked + _LEAST_PERIOD_S - time.monotonic()))
