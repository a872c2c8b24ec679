"""Where a page reads a run: its directory, live or finished."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, Protocol

from tokenizers import Tokenizer

from broadcast.layout import stored_versions
from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.run_files import METRICS_FILE, initial_model, submission_files
from runspec.core.spec.resolved import load_resolved
from runspec.core.spec.schema import RunSpec
from runspec.core.tokenizer_files import read_tokenizer
from runspec.local.conditions import conditions
from runspec.local.diagnosis import cause_lines, diagnose
from runspec.local.endpoints import load_endpoints
from runspec.local.evaluations import results_of
from runspec.local.metrics import read_rows, shares_bytes_sent, weights_bytes_sent
from runspec.local.progress import coordinator_status
from runspec.local.snapshot import Snapshot, look_at
from verify.coordinator.ledger.ledger import BadRow, decode_event
from verify.coordinator.ledger.snapshot import damaged, open_snapshot
from verify.coordinator.ledger.store import NoLedger
from verify.coordinator.machine.events import Event
from verify.coordinator.services.workers import read_state, summary
from verify.formats.evaluation import Evaluated
from verify.formats.joining import TOKENIZER_FILE
from verify.formats.submission import largest_accepted_bytes
from verify.formats.verdict import MAX_BYTES as MAX_VERDICT_BYTES

EVENTS = 40
"""Newest events of roles that the page shows."""
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

    def events(self, after: int) -> Iterator[tuple[int, Event]]:
        """Yield the ledger's events later than the `after`-th, each with its number."""

    def table(self, kind: Table, step: int, submission: str) -> bytes:
        """Return the file of a submission, or of the verdict on it."""

    def tokenizer(self) -> Tokenizer:
        """Return the run's tokenizer."""

    def head(self) -> dict[str, Any]:
        """Return what is known of the run as a whole.

        Keys: `state`, `reason`, `waiting_for`, `wall_s`, `weights_bytes_sent`,
        `shares_bytes_sent`, `published`, `diagnosis` (lines), `conditions`, `roles`, `events`,
        `workers` (the first by credit), `crowd` (figures of all workers, or null), `validators`,
        `servers` (of the broadcast tree).
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

    def events(self, after: int) -> Iterator[tuple[int, Event]]:
        try:
            with closing(open_snapshot(self._run_dir, self.spec)) as ledger:
                for row in ledger.rows(after=after):
                    yield row.seq, decode_event(row.kind, row.body)
        except NoLedger:  # no coordinator was started
            return
        except BadRow as error:
            raise damaged(self._run_dir, str(error)) from error

    def table(self, kind: Table, step: int, submission: str) -> bytes:
        files = submission_files(self._run_dir, step, submission)
        if kind == "verdict":
            return _read(files.verdict, MAX_VERDICT_BYTES)
        return _read(files.submission, largest_accepted_bytes(self.spec))

    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(initial_model(self._run_dir) / TOKENIZER_FILE)

    def head(self) -> dict[str, Any]:
        seen = look_at(self._run_dir, events=EVENTS)
        status = self._status(seen)
        return {
            "state": seen.state,
            "reason": seen.reason,
            "waiting_for": status.get("waiting_for"),
            "wall_s": seen.wall_s,
            "weights_bytes_sent": weights_bytes_sent(self._run_dir),
            "shares_bytes_sent": shares_bytes_sent(self._run_dir),
            "published": seen.published,
            "diagnosis": [*cause_lines(diagnose(seen.spec, seen.rows, seen.dropped.by_grader))],
            "conditions": [
                [each.type, each.reason, each.message]
                for each in conditions(seen)
                if each.status == "True"
            ],
            "roles": [
                [role.name, role.state, seen.stages.get(role.name, ""), role.restarts, role.since]
                for role in seen.roles
            ],
            "events": [[event.time, event.role, event.text] for event in reversed(seen.events)],
            "workers": status.get("workers", []),
            "crowd": status.get("crowd"),
            "validators": status.get("validators", []),
            "servers": self._servers(seen),
        }

    def _status(self, seen: Snapshot) -> Mapping[str, Any]:
        """Return the coordinator's status; of a stopped run what its ledger says of workers."""
        if seen.alive:
            endpoints = load_endpoints(self._run_dir)
            return coordinator_status(endpoints.coordinator) if endpoints else {}
        if self._workers[0] != seen.trained:
            self._workers = seen.trained, summary(read_state(self._run_dir, self.spec))
        return self._workers[1]

    def _servers(self, seen: Snapshot) -> list[dict[str, Any]]:
        endpoints, found = load_endpoints(self._run_dir), []
        urls = endpoints.all() if endpoints else {}
        for role, upstream, url in broadcast_tree(self.spec):
            store = self._run_dir / "store" / role
            found.append(
                {
                    "name": role,
                    "upstream": upstream,
                    "url": urls.get(role, url),
                    "versions": stored_versions(store, self.spec.name),
                    "bytes_sent": _bytes_sent(store),
                }
            )
        return found


def broadcast_tree(spec: RunSpec) -> list[tuple[str, list[str], str]]:
    """Return role, upstream roles and URL (empty if the spec has none) of origin and relays."""
    tree: list[tuple[str, list[str], str]] = [("origin", [], spec.broadcast.origin.url or "")]
    for relay in spec.broadcast.relays:
        upstream = [name if name == "origin" else f"relay-{name}" for name in relay.upstream]
        tree.append((f"relay-{relay.name}", upstream, relay.url or ""))
    return tree


def _bytes_sent(store: Path) -> int | None:
    try:
        served = parse_object(read_bounded(store / "served.json", 4096), max_bytes=4096)
    except (OSError, MalformedJson):
        return None
    sent = served.get("bytes")
    return sent if isinstance(sent, int) else None


def _read(path: Path, most: int) -> bytes:
    try:
        return read_bounded(path, most)
    except OSError as error:
        raise UserError(
            f"cannot be read: {error.strerror}", place=str(path), remedy="it may have been removed"
        ) from error
