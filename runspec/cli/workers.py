"""`runspec workers`, `ban` and `unban`: who works for a run, and what the operator decides.

The operator reaches the coordinator over HTTP, or its ledger while the run is stopped.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from runspec.cli.view import plain_table
from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.hashing import is_digest
from runspec.core.keys import SigningKey
from runspec.core.spec.resolved import load_resolved
from runspec.local.endpoints import load_endpoints
from runspec.local.identity import load_roles
from runspec.local.run_dir import find_run, hold, holder

if TYPE_CHECKING:
    from verify.coordinator.machine.state import State
    from verify.coordinator_http import CoordinatorHttp

REQUEST_TIMEOUT_S = 10.0
_MAX_PAGE_BYTES = 4 * 1024 * 1024
LEAST_PREFIX = 8
"""Characters of a key that are enough to name it."""
_SOURCES = {name: name for name in ("key", "pool", "standing", "reputation", "prefill_share")}
_SOURCES |= {"credits": "accepted_tokens", "accepted": "accepted_submissions"}
_SOURCES |= {"rejected": "rejected_submissions", "withheld": "withheld_leases"}
_SOURCES |= {"alive": "alive", "reason": "reason"}
"""Column of `runspec workers`, and its key in the coordinator's list."""
_NEVER_REGISTERED: dict[str, Any] = {**dict.fromkeys(_SOURCES, 0), "pool": None, "alive": False}
_NEVER_REGISTERED |= {"standing": "banned", "reputation": 0.0, "prefill_share": 1.0}


class CoordinatorAccess(ABC):
    """An operator's access to a coordinator: reads its lists and gives it orders."""

    @abstractmethod
    def page(self, name: str, after: str) -> dict[str, Any]:
        """A page of a list, as `GET /v1/lists/NAME/AFTER` has it; an empty `after` is the first.

        Raises:
            UserError: it cannot be read.
        """

    def entries(self, name: str) -> list[dict[str, Any]]:
        """All entries of a list: `workers`, `banned` or `invites`.

        Raises:
            UserError: they cannot be read.
        """
        found: list[dict[str, Any]] = []
        after: str | None = ""
        while after is not None:
            page = self.page(name, after)
            found += page[name]
            after = page["next"]
        return found

    @abstractmethod
    def order(self, verb: str, key: str, reason: str) -> None:
        """Ban or unban a key, or revoke an invite.

        Raises:
            UserError: it cannot be done, or is refused; the message is the coordinator's own.
        """

    def find_key(self, named: str) -> str:
        """A key by its 64 hex characters, or by the first eight and more of one that is known."""
        if is_digest(named):
            return named
        known = {each["key"] for name in ("workers", "banned") for each in self.entries(name)}
        return key_by_prefix(named, known, "KEY", "one that `runspec workers` lists, or all 64")


@dataclass(frozen=True)
class _LiveCoordinator(CoordinatorAccess):
    """Sends requests to a running coordinator, signed with its own key."""

    http: CoordinatorHttp

    def page(self, name: str, after: str) -> dict[str, Any]:
        path = f"/v1/lists/{name}/{after}".rstrip("/")
        answer = self.http.call("GET", path, max_bytes=_MAX_PAGE_BYTES)
        try:
            return parse_object(answer.content, max_bytes=_MAX_PAGE_BYTES)
        except MalformedJson as error:
            raise self.http.not_believed(error) from error

    def order(self, verb: str, key: str, reason: str) -> None:
        body = canonical_json({"key": key, "reason": reason})
        self.http.call("POST", f"/v1/operator/{verb}", body=body)


@dataclass(frozen=True)
class _StoppedCoordinator(CoordinatorAccess):
    """Reads and writes the ledger of a run that is not alive."""

    run_dir: Path

    def page(self, name: str, after: str) -> dict[str, Any]:
        from verify.coordinator.handlers.workers import page

        return page(name, after, self._state)

    @cached_property
    def _state(self) -> State:
        from verify.coordinator.handlers.workers import read_state

        return read_state(self.run_dir, load_resolved(self.run_dir))

    def order(self, verb: str, key: str, reason: str) -> None:
        from verify.coordinator.handlers.operator import order_stopped

        spec = load_resolved(self.run_dir)
        with hold(self.run_dir):
            roles = load_roles(self.run_dir, spec)
            order_stopped(self.run_dir, spec, roles, verb, {"key": key, "reason": reason})


def key_by_prefix(named: str, known: set[str], place: str, of: str) -> str:
    """Return the one known key that begins with `named`.

    Raises:
        UserError: none does, several do, or `named` is too short; `place` and `of` say of what.
    """
    found = [key for key in known if key.startswith(named)]
    if len(named) < LEAST_PREFIX or len(found) != 1:
        raise UserError(
            f"{len(found)} known keys begin with it",
            place=f"{place} {named[:80]!r}",
            remedy=f"give {LEAST_PREFIX} characters or more of {of}",
        )
    return found[0]


def coordinator_of(run: str, runs_dir: Path) -> CoordinatorAccess:
    """Return the access to the coordinator of a run whose directory is on this machine.

    Raises:
        UserError: there is no such run, or it has never been started.
    """
    from verify.coordinator_http import CoordinatorHttp

    run_dir = find_run(run, runs_dir)
    if holder(run_dir) is None:
        return _StoppedCoordinator(run_dir)
    endpoints = load_endpoints(run_dir)
    if endpoints is None:
        raise UserError(
            "has no coordinator yet", place=str(run_dir), remedy="start it with `runspec apply`"
        )
    key = SigningKey.load(run_dir / "keys" / "coordinator.key")
    http = CoordinatorHttp(
        _from_here(endpoints.coordinator),
        key,
        run=load_resolved(run_dir).name,
        deadline_s=REQUEST_TIMEOUT_S,
    )
    return _LiveCoordinator(http)


def _from_here(url: str) -> str:
    """Return a URL for this machine: loopback where the coordinator listens on all addresses."""
    parts = urlsplit(url)
    here = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(parts.hostname or "")  # noqa: S104
    return f"{parts.scheme}://{here}:{parts.port}" if here else url


def workers_command(run: str, as_json: bool, runs_dir: Path) -> int:
    """Lists the workers, those with the most credit first; returns the exit code."""
    coordinator = coordinator_of(run, runs_dir)
    rows = worker_rows(coordinator.entries("workers"), coordinator.entries("banned"))
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        Console(markup=False, highlight=False, soft_wrap=True).print(worker_table(rows))
        if any(row["standing"] == "banned" for row in rows):
            print(f"an appeal is granted with: runspec unban {run} KEY --reason WHY")
    else:
        print("no worker has registered")
    return 0


def worker_rows(
    workers: Sequence[dict[str, Any]], banned: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each key.

    Args:
        workers, banned: lists of the coordinator.

    Returns:
        By credit: key, pool (null for a banned key that never registered), standing, reputation in
        [0, 1], prefill_share, credits (accepted output tokens), accepted, rejected, withheld,
        alive, reason.
    """
    rows = [{name: worker[source] for name, source in _SOURCES.items()} for worker in workers]
    rows.sort(key=lambda row: (-row["credits"], row["key"]))
    registered = {row["key"] for row in rows}
    return rows + [
        {**_NEVER_REGISTERED, **each} for each in banned if each["key"] not in registered
    ]


def worker_table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows of `worker_rows` as a table."""
    table = plain_table(
        *("key", "pool", "standing", "reputation", "recomputed", "credits"),
        *("accepted", "rejected", "withheld", "alive", "reason"),
    )
    for row in rows:
        table.add_row(
            *(row["key"][:16], row["pool"] or "", row["standing"]),
            *(f"{row['reputation']:.2f}", f"{row['prefill_share']:.0%}", f"{row['credits']:,}"),
            *(str(row[name]) for name in ("accepted", "rejected", "withheld")),
            *("yes" if row["alive"] else "no", _printable(row["reason"])),
        )
    return table


def _printable(text: str) -> str:
    """A reason may repeat what a stranger sent; terminals obey control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def ban_command(run: str, key: str, reason: str, runs_dir: Path) -> int:
    """Bans a key; returns the exit code."""
    whole = _order("ban", run, key, reason, runs_dir)
    print(f"{whole} is banned: its requests are refused, and its open leases are over")
    return 0


def unban_command(run: str, key: str, reason: str, runs_dir: Path) -> int:
    """Lifts a ban; returns the exit code."""
    whole = _order("unban", run, key, reason, runs_dir)
    print(f"{whole} may work again; all its work is recomputed until enough was accepted")
    return 0


def _order(verb: str, run: str, key: str, reason: str, runs_dir: Path) -> str:
    """Gives an order about a key; returns the whole key."""
    coordinator = coordinator_of(run, runs_dir)
    whole = coordinator.find_key(key)
    coordinator.order(verb, whole, reason)
    return whole
