"""Handlers for the operator: orders on keys and invites, and files for a page of the run elsewhere.

`runspec ban`, `runspec unban` and `runspec invite --revoke` sign with `keys/coordinator.key` of the
run directory. A person who can read that file can sign leases and batches too, so no other right is
needed. While the coordinator is down, `order_stopped` writes the same events into its ledger.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

from aiohttp import web

from runspec.core.canonical import is_digest
from runspec.core.errors import UserError
from runspec.core.roles import Roles
from runspec.core.run_files import METRICS_FILE, initial_model, submission_files
from runspec.core.schema import RunSpec
from verify.coordinator.handlers import RunContext, Signed
from verify.coordinator.journal import Journal
from verify.coordinator.ledger import LedgerSnapshot, open_ledger
from verify.coordinator.machine import events
from verify.coordinator.machine.state import Policy
from verify.coordinator.requests import Refusal, refusing, send_file
from verify.formats.documents import MAX_PIECE_BYTES, TOKENIZER_FILE

MAX_REASON = 500
"""Largest number of characters of a reason."""
_NUMBER = "[0-9]{1,15}"


class Operator:
    """The endpoints below `/v1/operator` and `/v1/view`, for the coordinator's own key.

    Args:
        run: the run.
    """

    def __init__(self, run: RunContext) -> None:
        self._run, self._run_dir = run, run.journal.run_dir

    def routes(self) -> list[web.RouteDef]:
        get, by = self._run.get, self._run.operator
        return [
            self._run.post(
                "/v1/operator/{verb:ban|unban|revoke}", self._order, "key", "reason", by=by
            ),
            get(f"/v1/view/ledger/{{after:{_NUMBER}}}", self._ledger, by),
            get(f"/v1/view/metrics/{{offset:{_NUMBER}}}", self._metrics, by),
            get("/v1/view/tokenizer", self._tokenizer, by),
            get(
                "/v1/view/{kind:submission|verdict}/{step:[0-9]{1,9}}/{digest:[0-9a-f]{64}}",
                *(self._table, by),
            ),
        ]

    async def _order(self, asked: Signed) -> None:
        verb = asked.http.match_info["verb"]
        obey(self._run.journal, self._run.roles, verb, asked.body["key"], asked.body["reason"])

    async def _ledger(self, request: web.Request) -> web.StreamResponse:
        """Send rows later than the `after`-th as JSON lines [seq, kind, body]: some, or none if
        there is no later one."""
        after = int(request.match_info["after"])
        return web.Response(body=await asyncio.to_thread(self._rows, after))

    def _rows(self, after: int) -> bytes:
        lines: list[bytes] = []
        left = MAX_PIECE_BYTES
        run_dir, spec = self._run_dir, self._run.spec
        with refusing(503, UserError), closing(LedgerSnapshot(run_dir, spec)) as ledger:
            for row in ledger.rows(after=after):
                line = json.dumps([row.seq, row.kind.decode(), row.body.decode()]).encode() + b"\n"
                left -= len(line)
                if left < 0 and lines:
                    break
                lines.append(line)
        return b"".join(lines)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        """Send a piece of metrics.jsonl; 409 if the file is shorter."""
        offset = int(request.match_info["offset"])

        def piece() -> bytes:
            try:
                with (self._run_dir / METRICS_FILE).open("rb") as file:
                    if file.seek(0, 2) < offset:
                        raise Refusal(409, "the file has become shorter")
                    file.seek(offset)
                    return file.read(MAX_PIECE_BYTES)
            except FileNotFoundError:
                return b""

        return web.Response(body=await asyncio.to_thread(piece))

    async def _tokenizer(self, request: web.Request) -> web.StreamResponse:
        return await send_file(request, initial_model(self._run_dir) / TOKENIZER_FILE)

    async def _table(self, request: web.Request) -> web.StreamResponse:
        """Send the file of a submission, or of the verdict on it; it may be gone."""
        asked = request.match_info
        files = submission_files(self._run_dir, int(asked["step"]), asked["digest"])
        path = files.verdict if asked["kind"] == "verdict" else files.submission
        return await send_file(request, path)


def obey(journal: Journal, roles: Roles, verb: str, key: Any, reason: Any) -> None:
    """Record an order of the operator.

    Args:
        journal: records the event.
        roles: its keys cannot be banned.
        verb: ban: requests of the key are refused, and its open leases end; unban: the key may work
            again, in quarantine; revoke: no more keys can register with the invite.
        key: key of a worker, or of an invite.
        reason: a text of at most `MAX_REASON` characters.

    Raises:
        Refusal: 400, malformed; 409, in that state already, or a key with a role.
    """
    if not is_digest(key):
        raise Refusal(400, "key must be 64 hex characters")
    if not isinstance(reason, str) or not reason.strip() or len(reason) > MAX_REASON:
        raise Refusal(400, f"reason must be a text of 1 to {MAX_REASON} characters")
    state, now, reason = journal.state, journal.clock(), reason.strip()
    if verb == "ban":
        if key in roles.keys:
            raise Refusal(409, "this key has a role: remove it from roles.json instead")
        if key in state.bans:
            raise Refusal(409, f"banned already: {state.bans[key]}")
        journal.record(events.KeyBanned(now, key, reason, events.BY_OPERATOR))
    elif verb == "unban":
        if key not in state.bans:
            raise Refusal(409, "this key is not banned")
        journal.record(events.BanLifted(now, key, reason, events.BY_OPERATOR))
    else:
        if key in state.revoked:
            raise Refusal(409, f"revoked already: {state.revoked[key]}")
        journal.record(events.InviteRevoked(now, key, reason, events.BY_OPERATOR))


def order_stopped(
    run_dir: Path, spec: RunSpec, roles: Roles, verb: str, body: dict[str, Any]
) -> None:
    """Execute an order in the ledger of a run whose coordinator is down.

    Args:
        run_dir: the run directory.
        spec: the run's resolved spec.
        roles: roles of the run.
        verb: ban, unban or revoke.
        body: has `key` and `reason`.

    Raises:
        UserError: the order is refused, or another process writes the ledger.
    """
    with closing(Journal(run_dir, Policy.of(spec), ledger=open_ledger(run_dir, spec))) as journal:
        try:
            obey(journal, roles, verb, body["key"], body["reason"])
        except Refusal as refusal:
            raise UserError(
                f"{refusal.status}, {refusal.words}",
                place=f"{verb} {body['key']}",
                remedy="see `runspec workers`",
            ) from refusal
