"""Where a page elsewhere reads a run: its coordinator, with the coordinator's own key."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature
from runspec.core.tokenizer_files import MAX_TOKENIZER_BYTES, tokenizer_of
from runspec.local.dashboard.source import Table, broadcast_tree
from runspec.local.diagnosis import cause_lines, diagnose
from runspec.local.metrics import latest_by_step, objects
from verify.client import MAX_LIST_BYTES
from verify.coordinator.ledger.ledger import BadRow, decode_event
from verify.coordinator.machine.events import Event
from verify.coordinator_http import CoordinatorHttp, SubmissionRefused
from verify.formats.evaluation import Evaluated, Figure
from verify.formats.joining import MAX_PIECE_BYTES, MAX_ROW_BYTES, MAX_SIGNED_SPEC_BYTES, open_spec
from verify.formats.submission import largest_accepted_bytes
from verify.formats.verdict import MAX_BYTES as MAX_VERDICT_BYTES

DEADLINE_S = 10.0
_MAX_STATUS_BYTES = 4 * 1024 * 1024


class CoordinatorSource:
    """Asks a coordinator; processes and events of roles stay on their machine.

    Args:
        url: URL such as http://127.0.0.1:29400.
        key: the coordinator's own.

    Raises:
        UserError: from every method, if it cannot be reached or answers otherwise.
    """

    def __init__(self, url: str, key: SigningKey) -> None:
        asking = CoordinatorHttp(url, key, run="", deadline_s=DEADLINE_S)
        document = asking.call("GET", "/v1/spec", max_bytes=MAX_SIGNED_SPEC_BYTES).content
        place = f"coordinator {url}"
        try:
            self.spec = open_spec(document, coordinators=frozenset({key.public_hex}), place=place)
        except BadSignature as error:
            raise UserError(
                f"the spec is signed with another key: {error}",
                place=place,
                remedy="name this coordinator's own key with --key",
            ) from error
        self._http = CoordinatorHttp(url, key, run=self.spec.name, deadline_s=DEADLINE_S)
        self._metrics = bytearray()
        """What was read of metrics.jsonl."""
        self._rows: list[dict[str, Any]] = []

    def rows(self) -> list[dict[str, Any]]:
        while True:
            try:
                piece = self._get(f"/v1/view/metrics/{len(self._metrics)}", MAX_PIECE_BYTES)
            except SubmissionRefused:  # it has become shorter: steps are trained again
                self._metrics.clear()
                continue
            if piece:
                self._metrics += piece
                self._rows = latest_by_step(objects(bytes(self._metrics)))
            if len(piece) < MAX_PIECE_BYTES:
                return self._rows

    def evaluations(self) -> list[Evaluated]:
        """Return the figures of each result, without its problems."""
        shown = self._object("/v1/evaluations", MAX_LIST_BYTES)["evaluations"]
        found = [self._evaluated(each) for each in shown]
        return sorted(found, key=lambda each: (each.evaluation, each.version))

    def _evaluated(self, each: dict[str, Any]) -> Evaluated:
        figures = {name: Figure(*figure) for name, figure in each["figures"].items()}
        return Evaluated(
            run=self.spec.name,
            evaluation=each["evaluation"],
            version=each["version"],
            model_digest=None,
            figures=figures,
            faults=each["faults"],
            problems=[],
            finished=each["finished"],
            wall_s=each["wall_s"],
            cpu_s=each["cpu_s"],
        )

    def events(self, after: int) -> Iterator[tuple[int, Event]]:
        while lines := self._get(f"/v1/view/ledger/{after}", MAX_ROW_BYTES).splitlines():
            for line in lines:
                try:
                    after, kind, body = json.loads(line)
                    event = decode_event(kind.encode(), body.encode())
                except (ValueError, BadRow) as error:
                    raise self._http.not_believed(error) from error
                yield after, event

    def table(self, kind: Table, step: int, submission: str) -> bytes:
        most = MAX_VERDICT_BYTES if kind == "verdict" else largest_accepted_bytes(self.spec)
        return self._get(f"/v1/view/{kind}/{step}/{submission}", most)

    def tokenizer(self) -> Tokenizer:
        data = self._get("/v1/view/tokenizer", MAX_TOKENIZER_BYTES)
        return tokenizer_of(data, f"coordinator {self._http.url}")

    def head(self) -> dict[str, Any]:
        status = self._object("/v1/status", _MAX_STATUS_BYTES)
        rows, dropped = self.rows(), status["dropped_by_grader"]["groups"]
        return {
            "state": status["state"],
            "reason": "",
            "waiting_for": status["waiting_for"],
            "wall_s": time.time() - rows[0]["time"] if rows else 0.0,
            "weights_bytes_sent": 0,
            "shares_bytes_sent": 0,
            "published": status["newest_version"],
            "diagnosis": [*cause_lines(diagnose(self.spec, rows, dropped))],
            "conditions": [],
            "roles": [],
            "events": [],
            "workers": status["workers"],
            "crowd": status["crowd"],
            "validators": status["validators"],
            "servers": [
                {"name": role, "upstream": up, "url": url, "versions": [], "bytes_sent": None}
                for role, up, url in broadcast_tree(self.spec)
            ],
        }

    def _object(self, path: str, most: int) -> dict[str, Any]:
        try:
            return parse_object(self._get(path, most), max_bytes=most)
        except MalformedJson as error:
            raise self._http.not_believed(error) from error

    def _get(self, path: str, most: int) -> bytes:
        return self._http.call("GET", path, max_bytes=most).content
