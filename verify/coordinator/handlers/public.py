"""Handlers for everybody: the status, documents, and evaluations.

The status is JSON for people and commands, and Prometheus metrics for monitors.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Generic, TypeVar

from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.http_server import PREFIX, counter, gauge
from runspec.core.run_files import EVALUATIONS_NAME, evaluation_file, evaluation_files
from runspec.core.schema.source_files import data_digest, file_digest, source_files
from runspec.core.signed import BadSignature
from verify.coordinator.handlers import RunContext, islands, workers
from verify.coordinator.handlers.relays import Relays
from verify.coordinator.machine.filling import needed_groups, tried_groups
from verify.coordinator.machine.leases import LeaseRecord
from verify.coordinator.machine.stalls import waited_for
from verify.coordinator.machine.state import State
from verify.coordinator.requests import Refusal, read_body, refusing
from verify.formats import documents

_log = logging.getLogger(__name__)
T = TypeVar("T")

LONG_S = 0.02
"""A value that takes less time to compute is not cached."""
SET_ASIDE = 20
"""Submissions that were set aside, the newest, in a status."""
SHARE = 0.05
"""Largest share of the time that computing may take, however often the value is requested."""
_LIST = f"{{name:{'|'.join(workers.LISTS)}}}"
_KEY = "{key:[0-9a-f]{64}}"


class Cache(Generic[T]):
    """Cache for an expensive response that many clients request.

    It repeats the last value until computing the next one would take more than `SHARE`.

    Args:
        compute: returns a new value.
        clock: seconds, never going back.
    """

    def __init__(
        self, compute: Callable[[], T], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._compute, self._clock = compute, clock
        self._last: tuple[float, T] | None = None
        """Time until which the value is repeated, and the value."""

    def get(self) -> T:
        """Return the last value, or a new one."""
        started = self._clock()
        if self._last is not None and started < self._last[0]:
            return self._last[1]
        self._last = None
        value = self._compute()
        took = self._clock() - started
        if took > LONG_S:
            self._last = started + took / SHARE, value
        return value


class Status(Collector):
    """Status of the coordinator; it changes nothing.

    Args:
        run: the run.
        relays: relays of volunteers.
    """

    def __init__(self, run: RunContext, relays: Relays) -> None:
        self._run, self._journal, self._relays = run, run.journal, relays
        registry = CollectorRegistry()
        self.report = Cache(self._of_now).get
        """Returns the status, whose size does not grow with the number of workers; times are
        seconds since the epoch, ages seconds. With thousands of workers all three are some seconds
        old."""
        self.document = Cache(lambda: json.dumps(self.report(), ensure_ascii=False).encode()).get
        """Returns the answer of `GET /v1/status`: the report as JSON."""
        self.metrics = Cache(lambda: generate_latest(registry)).get
        """Returns the answer of `GET /metrics`."""
        ProcessCollector(registry=registry)
        registry.register(self)

    def routes(self) -> list[web.RouteDef]:
        get, by = self._run.get, self._run.authentication.public
        return [
            get("/v1/status", self._get, by),
            get(f"/v1/lists/{_LIST}", self._get_list, by),
            get(f"/v1/lists/{_LIST}/{_KEY}", self._get_list, by),
            get(f"/v1/workers/{_KEY}", self._get_worker, by),
            get("/metrics", self._metrics, by),
            get("/healthz", self._healthz, by),
        ]

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return await self._run.send_json(request, self.document())

    async def _get_list(self, request: web.Request) -> web.StreamResponse:
        """Send a page of a list; see `workers.page`."""
        at, state, now = request.match_info, self._journal.state, self._journal.clock()
        found = workers.page(at["name"], at.get("key", ""), state, self._run.workers, now)
        document = json.dumps(found, ensure_ascii=False).encode()
        tag = f'"{digest_bytes(document)}"'
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers={"ETag": tag})
        return await self._run.send_json(request, document, {"ETag": tag})

    async def _get_worker(self, request: web.Request) -> web.StreamResponse:
        key, state, now = request.match_info["key"], self._journal.state, self._journal.clock()
        if key not in state.workers:
            raise Refusal(404, "no worker has this key")
        (found,) = workers.rows(state, [key], self._run.workers, now)
        return web.json_response(found)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=self.metrics(), headers=headers)

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    def _of_now(self) -> dict[str, Any]:
        run, state, now = self._run, self._journal.state, self._journal.clock()
        return {
            "run": run.spec.name,
            "state": "finished" if state.finished else "running",
            "waiting_for": waited_for(state),
            "newest_version": None if state.newest is None else state.newest.version,
            "steps": state.policy.steps,
            "steps_closed": state.next_close,
            "rows_signed": state.next_close * state.policy.rows_per_step,
            "open_steps": [_step(state, number, now) for number in state.steps],
            **workers.summary(state, run.workers, now),
            "validators": [
                {"key": key, **workers.activity(peer, now)}
                for key, peer in run.validators.peers.items()
            ],
            "queue": {
                "to_judge": len(state.to_judge),
                "claimed": len(run.claims),
                "suspects": run.claims.suspects,
            },
            "dropped_by_grader": {"groups": state.dropped_groups, "newest": state.last_fault},
            "set_aside": [_set_aside(r) for r in state.leases.values() if r.attempts][-SET_ASIDE:],
            "backlog": run.backlog.report(),
            "latency": {
                "verdict": self._journal.history.to_verdict.report(),
                "manifest": self._journal.history.to_manifest.report(),
            },
            "rejected_submissions": sum(w.standing.rejected for w in state.workers.values()),
            "islands": islands.report(state, run.islands, now),
            "relays": self._relays.report(),
        }

    def collect(self) -> Iterator[Metric]:
        """Yield gauges, counters and histograms made from the report, at each scrape."""
        report, known = self.report(), self._journal.state.workers.values()
        queue, backlog = report["queue"], report["backlog"]
        validators = sum(validator["alive"] for validator in report["validators"])
        gauges = {
            "newest_version": ("Newest published policy version.", report["newest_version"]),
            "finished": ("1 once every step is signed, else 0.", report["state"] == "finished"),
            "open_steps": ("Steps that are being filled.", len(report["open_steps"])),
            "workers_alive": ("Workers that sent a heartbeat lately.", report["crowd"]["alive"]),
            "validators_alive": ("Validators that sent a heartbeat lately.", validators),
            "waiting_submissions": ("Submissions without a verdict.", queue["to_judge"]),
            "suspect_submissions": ("Submissions at which a validator failed.", queue["suspects"]),
            "deferred_submissions": ("Submissions told to come later.", backlog["deferred"]),
            "backlog_bytes": ("Bytes of submissions without a verdict.", backlog["bytes"]),
            "intake_open": ("1, or 0 while too much waits.", not backlog["withheld"]),
        }
        for name, (text, value) in gauges.items():
            yield gauge(f"coordinator_{name}", text, value)
        rejected = report["rejected_submissions"]
        rollouts = sum(w.accepted_rollouts for w in known)
        tokens = sum(w.accepted_tokens for w in known)
        accepted = sum(w.standing.accepted for w in known)
        withheld = sum(w.standing.withheld for w in known)
        counters = {
            "steps_closed": ("Batch manifests signed.", report["steps_closed"]),
            "accepted_rollouts": ("Rollouts accepted.", rollouts),
            "accepted_tokens": ("Output tokens of accepted rollouts.", tokens),
            "accepted_submissions": ("Submissions accepted by a verdict.", accepted),
            "rejected_submissions": ("Submissions rejected by a verdict.", rejected),
            "withheld_leases": ("Leases that ended unanswered.", withheld),
        }
        for name, (text, value) in counters.items():
            yield counter(f"coordinator_{name}", text, value)
        if report["islands"] is not None:
            yield from islands.metrics(report["islands"])
        history = self._journal.history
        for name, durations in (("verdict", history.to_verdict), ("manifest", history.to_manifest)):
            buckets, total = durations.histogram()
            yield HistogramMetricFamily(
                f"{PREFIX}coordinator_{name}_latency_seconds",
                f"From a submission to its {name}.",
                buckets=buckets,
                sum_value=total,
            )


def _step(state: State, number: int, now: float) -> dict[str, Any]:
    step = state.steps[number]
    return {
        "step": number,
        "opened": step.opened,
        "needed_groups": needed_groups(state, number),
        "leased_groups": step.leased,
        "deadline": step.since + state.policy.deadline_s,
        "newcomers": {
            "may_hold": state.policy.newcomer_groups,
            "hold": tried_groups(state, number, now),
        },
    }


def _set_aside(record: LeaseRecord) -> dict[str, Any]:
    """Report a submission that validators could not judge; its files stay for an operator."""
    return {
        "submission": record.submission,
        "worker": record.lease.worker,
        "step": record.lease.step,
        "groups": record.lease.groups,
        "attempts": [asdict(attempt) for attempt in record.attempts],
    }


# -- Documents -------------------------------------------------------------------------------------


class SiteHandlers:
    """Spec, roles.json, and the site: where weights are, and the files of the spec's sources.

    The publisher sends these files to those who have no copy. They are hashed at the start.

    Args:
        run: the run.
        roles: the signed roles.json.
        weights: public URLs of relays and origin.
        relays: relays of volunteers.
    """

    def __init__(
        self, run: RunContext, roles: bytes, weights: Sequence[str], relays: Relays
    ) -> None:
        self._run, self._weights, self._relays = run, list(weights), relays
        self._signed: tuple[documents.Site, bytes] | None = None
        self._documents = {"spec": documents.sign_spec(run.spec, run.key), "roles": roles}
        self._ready = asyncio.ensure_future(asyncio.to_thread(self._look))

    def routes(self) -> list[web.RouteDef]:
        get, by = self._run.get, self._run.authentication.public
        return [
            get("/v1/{name:spec|roles}", self._document, by),
            get("/v1/site", self._site, by),
        ]

    def close(self) -> None:
        self._ready.cancel()

    async def _document(self, request: web.Request) -> web.StreamResponse:
        body = self._documents[request.match_info["name"]]
        return web.Response(body=body, content_type="application/json")

    async def _site(self, request: web.Request) -> web.StreamResponse:
        site = replace(await self._known_site(), relays=self._relays.listed())
        if self._signed is None or self._signed[0] != site:
            self._signed = site, documents.sign_site(site, self._run.key)
        return web.Response(body=self._signed[1], content_type="application/json")

    async def _known_site(self) -> documents.Site:
        """Return the site without relays of volunteers, once the files are hashed.

        Raises:
            Refusal: a file was removed meanwhile.
        """
        with refusing(404, OSError, what="the data cannot be read: "):
            return await asyncio.shield(self._ready)

    def _look(self) -> documents.Site:
        spec, files, digest = self._run.spec, list[documents.SiteFile](), ""
        try:
            if spec.supervised is None:  # else nobody trains on its documents elsewhere
                files, digest = self._files(), data_digest(spec)
        except UserError as error:
            # Workers with a copy of the data still work; workers without it fail with a message.
            _log.warning("the site lists no data: %s", error)
            files = []
        return documents.Site(spec.name, self._weights, files, digest)

    def _files(self) -> list[documents.SiteFile]:
        files = []
        for source in self._run.spec.data.sources:
            for name, path in source_files(source).items():
                digest = file_digest(path)
                files.append(documents.SiteFile(source.name, name, path.stat().st_size, digest))
        if len(files) > documents.MAX_FILES:
            raise UserError(
                f"{len(files)} files, volunteers can be given {documents.MAX_FILES}",
                place="data.sources",
                remedy="put the rows into fewer files",
            )
        return files


class Evaluations:
    """The evaluator's results, one file for each evaluation of a version, the first one sent.

    Args:
        run: the run.
    """

    def __init__(self, run: RunContext) -> None:
        self._run, self._run_dir = run, run.journal.run_dir
        self._names = {each.name for each in run.spec.evaluations}
        found = documents.read_evaluations(evaluation_files(self._run_dir))
        self._known = {(e.evaluation, e.version): _shown(e) for e in found}

    def routes(self) -> list[web.RouteDef]:
        anybody = self._run.authentication.public
        get = self._run.get("/v1/evaluations", self._get, anybody)
        return [get, web.post("/v1/evaluations", self._add)]

    async def _get(self, request: web.Request) -> web.StreamResponse:
        """Send figures without their problems."""
        document = json.dumps({"evaluations": list(self._known.values())}).encode()
        return await self._run.send_json(request, document)

    async def _add(self, request: web.Request) -> web.StreamResponse:
        """Store a result; one that is there stays."""
        caller = self._run.authentication.caller(request)
        if caller.key not in self._run.roles.evaluator:
            raise Refusal(403, "roles.json does not name this key as an evaluator's")
        document = await read_body(request, caller, documents.MAX_EVALUATION_BYTES)
        with refusing(400, BadSignature):
            result = documents.open_evaluation(document, evaluators=frozenset({caller.key}))
        if result.run != self._run.spec.name or result.evaluation not in self._names:
            raise Refusal(400, "a result of another run or evaluation")
        if result.version > self._run.spec.steps:
            raise Refusal(400, f"version {result.version} of a run of {self._run.spec.steps} steps")
        key = (result.evaluation, result.version)
        if key not in self._known:
            path = evaluation_file(self._run_dir, *key)
            with refusing(503, OSError, UserError):  # a full disk: the evaluator tries again
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, document)
            self._known[key] = _shown(result)
            _log.info("%s of version %d is stored in %s", *key, EVALUATIONS_NAME)
        return web.json_response({}, status=202)


def _shown(result: documents.Evaluated) -> Mapping[str, Any]:
    figures = {name: [f.value, f.low, f.high] for name, f in result.figures.items()}
    return {
        "evaluation": result.evaluation,
        "version": result.version,
        "finished": result.finished,
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "faults": result.faults,
        "figures": figures,
    }
