"""Handlers for learner islands: offers, signed commit records, outer states, batches and files.

Every request is signed with an island's key. Batch manifests, and the rollouts that they name, are
for islands that do not see the run directory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client.core import Metric

from runspec.core.canonical import canonical_json, is_digest
from runspec.core.http_server import counter, gauge
from runspec.core.run_files import submission_files
from runspec.core.signed import BadSignature
from verify.coordinator import requests
from verify.coordinator.handlers import RunContext, Signed
from verify.coordinator.handlers.workers import Activity
from verify.coordinator.machine import events, islands
from verify.coordinator.machine.islands import IslandTally
from verify.coordinator.machine.stalls import Stalled, uncommitted
from verify.coordinator.machine.state import State
from verify.coordinator.requests import Refusal, refusing
from verify.coordinator_http import SignedRequest
from verify.formats import batch

_log = logging.getLogger(__name__)
_AGAIN_S = 1.0
"""Seconds until a manifest that is signed, but not on the disk, is looked for again."""
_STEP = "{step:[0-9]{1,9}}"


class Islands:
    """The coordinator's side of learner islands: endpoints below `/v1/islands`, and commits.

    Args:
        run: the run; its policy has islands.
    """

    def __init__(self, run: RunContext) -> None:
        policy = run.journal.state.policy.islands
        assert policy is not None
        self._run, self._journal, self._policy = run, run.journal, policy
        self._keys = {name: run.roles.islands[name] for name in policy.names}
        self._names = {key: name for name, key in self._keys.items()}
        self._stored: dict[str, batch.StoredOuter] = {}
        self._files: tuple[int, Mapping[str, Path]] = (-1, {})
        """A step, and the paths of the files that its manifest names."""

    def routes(self) -> list[web.RouteDef]:
        get, post, by = self._run.get, self._run.post, self._island
        return [
            post("/v1/islands/outer", self._announce, "url", "version", "digest", by=by),
            get("/v1/islands/outer", self._outer_states, by),
            web.post("/v1/islands/offer", self._offer),
            get(f"/v1/islands/records/{_STEP}", self._record, by),
            post("/v1/islands/lost", self._lost, "step", "island", by=by),
            post("/v1/islands/result", self._result, "step", "record", "digest", by=by),
            get(f"/v1/islands/results/{_STEP}", self._get_result, by),
            get(f"/v1/islands/batches/{_STEP}", self._batch, by),
            get(f"/v1/islands/files/{_STEP}/{{name:[0-9a-z.]{{1,100}}}}", self._file, by),
        ]

    def _island(self, request: web.Request) -> SignedRequest:
        """Return who signed an island's request, and record its activity."""
        caller = self._run.authentication.caller(request)
        if caller.key not in self._names:
            raise Refusal(403, "roles.json does not name this key as an island's")
        self._run.islands.seen(self._names[caller.key], self._journal.clock())
        return caller

    async def _announce(self, asked: Signed) -> None:
        """Remember the newest outer state that an island's store has, for islands that join.

        It is not recorded: an island announces itself again when it starts and when it stores one.
        """
        island = self._names[asked.key]
        with refusing(400, BadSignature):
            self._stored[island] = batch.read_outer(
                canonical_json({"island": island, **asked.body}), kind=batch.STORED
            )

    async def _outer_states(self, request: web.Request) -> web.Response:
        """Send the outer states that were announced, and how far the run is."""
        found = self._journal.state.islands
        oldest = min(found.records, default=found.step)
        outer = batch.OuterStates(list(self._stored.values()), found.step, oldest)
        return web.json_response(asdict(outer))

    async def _offer(self, request: web.Request) -> web.Response:
        """Record an island's signed offer for the next step to commit.

        The same offer again changes nothing, another one of the island replaces its earlier one.
        """
        caller = self._island(request)
        island, data = self._names[caller.key], await requests.read_body(request, caller)
        with refusing(400, BadSignature):
            offer = batch.open_offer(data, keys=self._keys, run=self._run.spec.name)
        if offer.island != island:
            raise Refusal(403, f"the offer is of island {offer.island}")
        state = self._journal.state
        if offer.step < state.islands.step:
            raise Refusal(409, f"step {offer.step} is committed: its record names who contributed")
        if not offer.step == state.islands.step < state.next_close:
            raise Refusal(
                409,
                f"an offer for step {offer.step}: the next step to commit is {state.islands.step}, "
                f"and {state.next_close} steps have a batch manifest",
            )
        before = state.islands.offers.get(island)
        if before is not None and before.offer == offer:
            return web.json_response({})
        if fault := islands.conflict(state.islands, offer):
            _log.error("offer refused: %s", fault)
            raise Refusal(409, fault)
        self._journal.record(events.OfferReceived(self._journal.clock(), offer, data.decode()))
        if refused := self._policy.refused(offer):
            _log.warning("step %d: island %s does not count: %s", offer.step, island, refused)
        return web.json_response({})

    async def _record(self, request: web.Request) -> web.Response:
        """Send the signed record of a step.

        If there is none in time, send who has offered a share, and for whom the step waits.
        """
        step, deadline = _step(request), self._journal.clock() + _wait(request)
        while True:
            found = self._journal.state.islands
            if step in found.records:
                body = found.records[step].encode()
                return web.Response(body=body, content_type="application/json")
            if step < found.step:
                raise Refusal(404, f"the record of step {step} is from before a rollback")
            if not await self._journal.change(deadline):
                missing = found.missing(self._policy)
                offered = [name for name in self._policy.names if name not in missing]
                waiting = {"waiting_for": missing, "offered": offered}
                return web.json_response(waiting, status=HTTPStatus.ACCEPTED)

    async def _lost(self, asked: Signed) -> None:
        """Open a step again, because an island cannot fetch another's share."""
        by, step, island = self._names[asked.key], asked.body["step"], asked.body["island"]
        if not _is_whole(step) or not isinstance(island, str):
            raise Refusal(400, "step must be a whole number and island a name")
        now = self._journal.clock()
        if why := islands.kept(self._policy, self._journal.state.islands, step, island, now):
            raise Refusal(409, why)
        self._journal.record(events.ShareLost(now, step, island, by))
        _log.warning("step %d: island %s cannot fetch the share of %s", step, by, island)

    async def _result(self, asked: Signed) -> dict[str, Any]:
        """Record the outer state that an island made of a step's record.

        The answer says whether the record is final, so that the island may go on.
        """
        island, body = self._names[asked.key], asked.body
        step, record, digest = body["step"], body["record"], body["digest"]
        if not _is_whole(step) or not is_digest(record) or not is_digest(digest):
            raise Refusal(400, "step must be a whole number, record and digest 64 hex characters")
        deadline = self._journal.clock() + _wait(asked.http)
        while True:
            found, now = self._journal.state.islands, self._journal.clock()
            if found.digests.get(step) != record:
                raise Refusal(409, f"step {step} has no record {record[:16]}")
            first = found.results.get(step)
            if first is not None and first.digest != digest:
                words = (
                    f"after step {step} island {island} has outer state {digest[:16]}, but island "
                    f"{first.island} has {first.digest[:16]}"
                )
                _log.error("%s", words)
                raise Refusal(409, words)
            if first is None or islands.is_awaited(found, step, island):
                self._journal.record(events.OuterResult(now, step, island, digest))
            final = islands.final_at(self._policy, self._journal.state.islands, step)
            if final is not None and now >= final:
                return {"final": True}
            if not await self._journal.change(deadline, due=final):
                return {"final": False}

    async def _get_result(self, request: web.Request) -> web.Response:
        """Send the digest of the outer state after a step; null if none was reported."""
        first = self._journal.state.islands.results.get(_step(request))
        return web.json_response({"digest": None if first is None else first.digest})

    async def _batch(self, request: web.Request) -> web.StreamResponse:
        """Send a step's signed manifest."""
        step, wait_s, journal = _step(request), _wait(request), self._journal
        if step >= journal.state.policy.steps:
            raise Refusal(404, f"the run has {journal.state.policy.steps} steps")
        deadline, path = journal.clock() + wait_s, journal.batch_path(step)
        while True:
            closed = step < journal.state.next_close
            if closed and path.exists():
                return await requests.send_file(request, path)
            # A full disk delays the file of a step that is closed.
            due = journal.clock() + _AGAIN_S if closed else None
            if not await journal.change(deadline, due=due):
                return web.Response(status=HTTPStatus.NO_CONTENT)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        """Send a file that the manifest of a closed step names."""
        step, name, journal = _step(request), request.match_info["name"], self._journal
        if self._files[0] != step:
            if journal.state.policy.rows_per_step or step >= journal.state.next_close:
                raise Refusal(404, f"no manifest of step {step} names files")
            with refusing(404, OSError, what="the manifest cannot be read: "):
                data = journal.batch_path(step).read_bytes()
            with refusing(404, BadSignature):
                manifest = batch.open_batch(
                    data, coordinators=None, run=self._run.spec.name, step=step
                )
            paths: dict[str, Path] = {}
            for group in manifest.groups:
                files = submission_files(journal.run_dir, group.step, group.submission)
                paths |= {path.name: path for path in vars(files).values()}
            self._files = step, paths
        if name not in self._files[1]:
            raise Refusal(404, f"the manifest names no file {name}")
        return await requests.send_file(request, self._files[1][name])

    def advance(self, now: float) -> Stalled | None:
        """Commit the next step if it is due, or return why the run cannot go on.

        Raises:
            NotNow, UserError: as `Journal.record` does.
        """
        state = self._journal.state
        commit = islands.decide_commit(self._policy, state.islands, now)
        if commit is None:
            late = islands.overdue(self._policy, state.islands, now)
            return uncommitted(state, now) if late else None
        record = batch.CommitRecord(
            *(self._run.spec.name, commit.step, commit.base, self._policy.codec),
            *(commit.contributors, commit.dropped, state.islands.previous),
            *self._journal.ledger.head,
        )
        document = batch.sign_commit(record, self._run.key).decode()
        self._journal.record(events.IslandsCommitted(now, record, document))
        names = ", ".join(each.island for each in commit.contributors)
        _log.info("step %d is committed: islands %s contribute", commit.step, names)
        for drop in commit.dropped:
            _log.warning("step %d: island %s is dropped: %s", commit.step, drop.island, drop.reason)
        return None

    def next_due(self, now: float) -> float | None:
        """Return when `advance` next has something to do without an event."""
        return islands.next_due(self._policy, self._journal.state.islands, now)


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
    return min(wait_s, requests.MAX_WAIT_S)


def report(state: State, seen: Activity, now: float) -> dict[str, Any] | None:
    """Return the islands' part of the status; None for a run with one learner.

    Args:
        state: state of the run.
        seen: activity of the islands' keys by their names.
        now: seconds since the epoch.
    """
    policy, found = state.policy.islands, state.islands
    if policy is None:
        return None
    members = []
    for name in policy.names:
        peer, tally = seen.peers.get(name), found.tallies.get(name, IslandTally())
        silent_s = None if peer is None else round(now - peer.last_seen, 3)
        offered = {"name": name, "offered": name in found.offers}
        members.append(offered | asdict(tally) | {"silent_s": silent_s})
    return {
        "committed": found.step,
        "waiting_for": found.missing(policy) if found.step < state.next_close else {},
        "deadline": None if found.since is None else found.since + policy.deadline_s,
        "members": members,
    }


def metrics(found: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the islands' metrics, made from `report`."""
    waiting = len(found["waiting_for"])
    text = "Islands whose share the next step lacks."
    yield gauge("coordinator_islands_waited_for", text, waiting)
    text = "Steps that islands committed."
    yield counter("coordinator_islands_committed_steps", text, found["committed"])

    def each(key: str) -> dict[str, float]:
        return {member["name"]: float(member[key]) for member in found["members"]}

    text = "1 if the island offered a share of the next step."
    yield gauge("coordinator_island_offered", text, each("offered"), "island")
    counters = {
        "committed_steps": ("Steps to which the island contributed.", "committed"),
        "dropped_steps": ("Steps whose commit dropped the island.", "dropped"),
        "share_bytes": ("Bytes of the island's committed shares.", "bytes"),
    }
    for name, (text, key) in counters.items():
        yield counter(f"coordinator_island_{name}", text, each(key), "island")
