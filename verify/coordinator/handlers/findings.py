"""Handlers for the findings of watchers, who are anybody: bounded, and believed by nobody here.

A finding lies with its watcher as well (`runspec watch`), so what is refused or dropped here is not
suppressed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from aiohttp import web

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.run_files import FINDINGS_NAME
from runspec.core.signed import BadSignature
from verify.coordinator.authentication import Limiter, count_new_key
from verify.coordinator.handlers import RunContext
from verify.coordinator.requests import Refusal, read_body, refusing
from verify.formats import findings

_log = logging.getLogger(__name__)


def _signer(name: str) -> str:
    return name.removesuffix(".json").rpartition("-")[2]


class Findings:
    """The newest findings, one of each key and interval.

    Args:
        run: the run.
        limiter: limits new keys.
    """

    def __init__(self, run: RunContext, limiter: Limiter) -> None:
        self._run, self._limiter = run, limiter
        self._folder = run.journal.run_dir / FINDINGS_NAME
        self._known = findings.stored_findings(self._folder)
        """Documents by name, FIRST-LAST-KEY.json."""

    def routes(self) -> list[web.RouteDef]:
        anybody = self._run.authentication.public
        get = self._run.get(findings.LIST_PATH, self._get, anybody)
        return [get, web.post(findings.LIST_PATH, self._add)]

    async def _get(self, request: web.Request) -> web.StreamResponse:
        document = findings.list_findings(self._known.values())
        return await self._run.send_json(request, document)

    async def _add(self, request: web.Request) -> web.StreamResponse:
        run, closed = self._run, self._run.journal.state.next_close
        caller = run.authentication.caller(request, "finding")
        if run.spec.audit is None:
            raise Refusal(404, "this run publishes no full states")
        document = await read_body(request, caller, findings.MAX_BYTES)
        with refusing(400, BadSignature):
            found, key = findings.open_finding(document)
        if (found.run, key) != (run.spec.name, caller.key):
            raise Refusal(400, "a finding of another run or key")
        if not found.first < found.last <= closed:
            raise Refusal(400, f"steps {found.first} to {found.last - 1}: {closed} are signed")
        name = f"{found.first}-{found.last}-{key}.json"
        with refusing(503, OSError, UserError):  # a full disk: the watcher keeps it
            if name not in self._known:
                self._make_room(key, run.authentication.address(request))
                _log.info("a watcher found: %s", name)
            write_atomic(self._folder / name, document)
        self._known[name] = document
        return web.json_response({}, status=202)

    def _make_room(self, key: str, address: str) -> None:
        """Count a new key, and drop the oldest finding of whoever has the most if there is no room.

        Raises:
            Refusal: too many new keys came from the address.
        """
        signers = Counter(map(_signer, self._known))
        if key not in signers:
            state = self._run.journal.state
            count_new_key(self._limiter, state, address, now=time.monotonic())
        if len(self._known) >= findings.MOST:
            ((most, _),) = signers.most_common(1)
            oldest = next(name for name in self._known if _signer(name) == most)
            (self._folder / oldest).unlink(missing_ok=True)
            del self._known[oldest]
