"""Where a page reads a run: its directory, live or finished, or its coordinator from elsewhere.

A coordinator is asked with its own key; processes and events of roles stay on their machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, Protocol

from tokenizers import Tokenizer

from broadcast.layout import stored_versions
from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import reported
from runspec.core.files import read_bounded
from runspec.core.run_files import FINDINGS_NAME, METRICS_FILE, initial_model, submission_files
from runspec.core.schema import RunSpec
from runspec.core.schema.load import load_resolved
from runspec.core.signed import BadSignature, SigningKey
from runspec.core.tokenizer_files import MAX_TOKENIZER_BYTES, read_tokenizer, tokenizer_of
from runspec.local.dashboard.overview import events_shown
from runspec.local.diagnosis import diagnose, results_of
from runspec.local.metrics import bytes_sent, latest_by_step, objects, read_rows, served_bytes
from runspec.local.run_view import look_at
from verify.client import MAX_LIST_BYTES
from verify.coordinator.handlers.workers import read_state, summary
from verify.coordinator.ledger import BadRow, LedgerSnapshot, damaged, decode_event
from verify.coordinator.ledger.store import NoLedger
from verify.coordinator.machine.events import Event
from verify.coordinator_http import CoordinatorHttp, SubmissionRefused
from verify.formats import findings
from verify.formats.documents import (
    MAX_PIECE_BYTES,
    MAX_ROW_BYTES,
    MAX_SIGNED_SPEC_BYTES,
    TOKENIZER_FILE,
    Evaluated,
    Figure,
    open_spec,
)
from verify.formats.submission import largest_accepted_bytes
from verify.formats.verdict import MAX_BYTES as MAX_VERDICT_BYTES

EVENTS = 400
"""Newest events of roles of which the page shows those that matter."""
OF_COORDINATOR = ("waiting_for", "workers", "crowd", "validators")
"""Keys of a coordinator's status that a page shows."""
Table = Literal["submission", "verdict"]


class Source(Protocol):
    """A run as its page reads it.

    Raises:
        UserError: from every method, if the run cannot be read now.
    """

    spec: RunSpec

    def rows(self) -> list[dict[str, Any]]:
        """Return metrics.jsonl, a row a step, in order; the same list while nothing is new."""

    def evaluations(self) -> list[Evaluated]:
        """Return the results of evaluations, as `results_of` does."""

    def findings(self) -> list[findings.Signed]:
        """Return what watchers say of steps that they trained again."""

    def events(self, after: int) -> Iterator[tuple[int, Event]]:
        """Yield the ledger's events later than the `after`-th, each with its number."""

    def table(self, kind: Table, step: int, submission: str) -> bytes:
        """Return the file of a submission, or of the verdict on it."""

    def tokenizer(self) -> Tokenizer:
        """Return the run's tokenizer."""

    def head(self) -> dict[str, Any]:
        """Return what is known of the run as a whole; what is not may be left out.

        Keys: `state`, `reason`, `waiting_for`, `wall_s`, `weights_bytes_sent`,
        `shares_bytes_sent`, `published`, `diagnosis` (lines), `conditions`, `stages` (by role),
        `roles`, `events`, `routine` (events of starts and ends), `workers` (the first by credit),
        `crowd` (figures of all workers, or null), `validators`, `servers` (of the broadcast tree).
        """


class FolderSource:
    """Reads a run directory.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.spec = load_resolved(run_dir)
        self._run_dir = run_dir
        self._rows: tuple[tuple[int, int], list[dict[str, Any]]] = ((-1, 0), [])
        """Time and size of metrics.jsonl, and its rows."""
        self._findings: tuple[int, list[findings.Signed]] = (0, [])
        """Time of the folder, and what is in it."""
        self._workers: tuple[int, dict[str, Any]] = (-1, {})
        """Number of trained steps, and the workers by the ledger then."""

    def rows(self) -> list[dict[str, Any]]:
        path = self._run_dir / METRICS_FILE
        found = path.stat() if path.exists() else None
        seen = (found.st_mtime_ns, found.st_size) if found else (0, 0)
        if self._rows[0] != seen:
            self._rows = seen, read_rows(self._run_dir)
        return self._rows[1]

    def evaluations(self) -> list[Evaluated]:
        return results_of(self._run_dir, self.rows())

    def findings(self) -> list[findings.Signed]:
        folder = self._run_dir / FINDINGS_NAME
        seen = folder.stat().st_mtime_ns if folder.exists() else 0
        if self._findings[0] != seen:
            remedy = "delete it: its watcher has it, too"
            with reported("cannot be read", folder, remedy, OSError, BadSignature):
                stored = findings.stored_findings(folder).values()
                self._findings = seen, [*map(findings.open_finding, stored)]
        return self._findings[1]

    def events(self, after: int) -> Iterator[tuple[int, Event]]:
        try:
            with closing(LedgerSnapshot(self._run_dir, self.spec)) as ledger:
                for row in ledger.rows(after=after):
                    yield row.seq, decode_event(row.kind, row.body)
        except NoLedger:  # no coordinator was started
            return
        except BadRow as error:
            raise damaged(self._run_dir, str(error)) from error

    def table(self, kind: Table, step: int, submission: str) -> bytes:
        files = submission_files(self._run_dir, step, submission)
        path, most = files.submission, largest_accepted_bytes(self.spec)
        if kind == "verdict":
            path, most = files.verdict, MAX_VERDICT_BYTES
        with reported("cannot be read", path, "it may have been removed", OSError):
            return read_bounded(path, most)

    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(initial_model(self._run_dir) / TOKENIZER_FILE)

    def head(self) -> dict[str, Any]:
        seen = look_at(self._run_dir, events=EVENTS)
        status: Mapping[str, Any] = seen.coordinator
        if not seen.alive:  # what the ledger says of workers
            if self._workers[0] != seen.trained:
                self._workers = seen.trained, summary(read_state(self._run_dir, self.spec))
            status = self._workers[1]
        return {
            "state": seen.state,
            "reason": seen.reason,
            "wall_s": seen.wall_s,
            **bytes_sent(self._run_dir),
            "published": seen.published,
            "diagnosis": [cause.line for cause in seen.causes],
            "conditions": [
                [each.type, each.reason, each.message]
                for each in seen.conditions.values()
                if each.status == "True"
            ],
            "roles": [
                [role.name, role.state, seen.stages.get(role.name, ""), role.restarts, role.since]
                for role in seen.roles
            ],
            "stages": dict(seen.stages),
            **events_shown(seen.events),
            **{key: status[key] for key in OF_COORDINATOR if key in status},
            "servers": [*map(self._server, broadcast_tree(self.spec))],
        }

    def _server(self, known: dict[str, Any]) -> dict[str, Any]:
        store = self._run_dir / "store" / known["name"]
        versions = stored_versions(store, self.spec.name)
        return {**known, "versions": versions, "bytes_sent": served_bytes(store)}


def broadcast_tree(spec: RunSpec) -> list[dict[str, Any]]:
    """Return origin and relays with what the spec says of them: upstream roles."""
    unknown: dict[str, Any] = {"versions": [], "bytes_sent": None}
    tree = [{"name": "origin", "upstream": [], **unknown}]
    for relay in spec.broadcast.relays:
        upstream = [name if name == "origin" else f"relay-{name}" for name in relay.upstream]
        tree.append({"name": f"relay-{relay.name}", "upstream": upstream, **unknown})
    return tree


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
        remedy = "name this coordinator's own key with --key"
        with reported("the spec is signed with another key", place, remedy, BadSignature):
            self.spec = open_spec(document, coordinators=frozenset({key.public_hex}), place=place)
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

    def findings(self) -> list[findings.Signed]:
        try:
            return findings.open_list(self._get(findings.LIST_PATH, findings.MAX_LIST_BYTES))
        except BadSignature as error:
            raise self._http.not_believed(error) from error

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
            "wall_s": time.time() - rows[0]["time"] if rows else 0.0,
            "published": status["newest_version"],
            "diagnosis": [each.line for each in diagnose(self.spec, rows, dropped)],
            **{key: status[key] for key in OF_COORDINATOR},
            "servers": broadcast_tree(self.spec),
        }

    def _object(self, path: str, most: int) -> dict[str, Any]:
        try:
            return parse_object(self._get(path, most), max_bytes=most)
        except MalformedJson as error:
            raise self._http.not_believed(error) from error

    def _get(self, path: str, most: int) -> bytes:
        return self._http.call("GET", path, max_bytes=most).content
