"""The operator's way to a coordinator, or to its ledger while the run is stopped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.hashing import is_digest
from runspec.core.keys import SigningKey
from runspec.core.spec.resolved import load_resolved
from runspec.local.endpoints import load_endpoints
from runspec.local.identity import load_roles
from runspec.local.run_dir import find_run, hold, holder

if TYPE_CHECKING:
    from verify.coordinator_http import CoordinatorHttp

PATIENCE_S = 10.0
_MAX_STATUS_BYTES = 64 * 1024 * 1024
LEAST_PREFIX = 8
"""Characters of a key that are enough to name it."""


class Desk(ABC):
    """Tells what a run's coordinator knows, and gives it orders."""

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """`workers`, `banned` and `invites` as `GET /v1/status` has them.

        Raises:
            UserError: they cannot be had.
        """

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
        status = self.status()
        known = {worker["key"] for worker in status["workers"]} | set(status["banned"])
        return begun_by(named, known, "KEY", "one that `runspec workers` lists, or all 64")


@dataclass(frozen=True)
class _LiveDesk(Desk):
    """Asks the coordinator, in its own name."""

    http: CoordinatorHttp

    def status(self) -> dict[str, Any]:
        answer = self.http.call("GET", "/v1/status", max_bytes=_MAX_STATUS_BYTES)
        try:
            return parse_object(answer.content, max_bytes=_MAX_STATUS_BYTES)
        except MalformedJson as error:
            raise self.http.not_believed(error) from error

    def order(self, verb: str, key: str, reason: str) -> None:
        body = canonical_json({"key": key, "reason": reason})
        self.http.call("POST", f"/v1/operator/{verb}", body=body)


@dataclass(frozen=True)
class _StoppedDesk(Desk):
    """Reads and writes the ledger of a run that is not alive."""

    run_dir: Path

    def status(self) -> dict[str, Any]:
        from verify.coordinator.services.status import read_workers

        return read_workers(self.run_dir, load_resolved(self.run_dir))

    def order(self, verb: str, key: str, reason: str) -> None:
        from verify.coordinator.services.operator import order_stopped

        spec = load_resolved(self.run_dir)
        with hold(self.run_dir):
            roles = load_roles(self.run_dir, spec)
            order_stopped(self.run_dir, spec, roles, verb, {"key": key, "reason": reason})


def begun_by(named: str, known: set[str], place: str, of: str) -> str:
    """The one known key that begins with `named`.

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


def desk(run: str, runs_dir: Path) -> Desk:
    """The desk of a run whose directory is on this machine.

    Raises:
        UserError: there is no such run, or it has never been started.
    """
    from verify.coordinator_http import CoordinatorHttp

    run_dir = find_run(run, runs_dir)
    if holder(run_dir) is None:
        return _StoppedDesk(run_dir)
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
        deadline_s=PATIENCE_S,
    )
    return _LiveDesk(http)


def _from_here(url: str) -> str:
    """A coordinator that listens on all addresses is asked on this machine's own."""
    parts = urlsplit(url)
    here = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(parts.hostname or "")  # noqa: S104
    return f"{parts.scheme}://{here}:{parts.port}" if here else url
