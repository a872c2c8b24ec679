"""A run directory in the hands of somebody who would change what happened."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.core.hashing import hash_parts
from runspec.core.keys import SigningKey
from tests.verify.coordinator.deployment import DEADLINE_S, Site, submission, verdict
from verify.audit.findings import Report
from verify.audit.replay import audit
from verify.client import CoordinatorClient
from verify.coordinator.ledger.ledger import FIRST_CHAIN
from verify.formats.lease import open_lease


def work(
    site: Site,
    worker: tuple[SigningKey, CoordinatorClient],
    *,
    judged: bool = True,
    **findings: object,
) -> None:
    """A lease taken, answered and judged, by a run that is served."""
    key, client = worker
    data = client.lease(DEADLINE_S)
    assert data is not None
    lease = open_lease(data, coordinators=frozenset({site.coordinator.public_hex}))
    client.submit(*submission(data, lease, key))
    if judged:
        validator = site.client(site.validator)
        item = validator.next_submission(DEADLINE_S)
        assert item is not None
        validator.verdict(*verdict(item.submission, lease, site.validator, **findings))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Copy:
    run_dir: Path
    site: Site

    @property
    def database(self) -> Path:
        return self.run_dir / "state.db"

    def audit(self, heads: dict[int, str] | None = None) -> Report:
        return audit(self.run_dir, root_key=self.site.root.public_hex, heads=heads)

    def whats(self) -> set[str]:
        """What the findings of an audit say."""
        return {finding.what for finding in self.audit().findings}

    def rows(self) -> list[tuple[str, dict[str, Any]]]:
        with closing(sqlite3.connect(self.database)) as database:
            found = database.execute("SELECT kind, body FROM ledger ORDER BY seq").fetchall()
        return [(kind, json.loads(body)) for kind, body in found]

    def first(self, kind: str) -> int:
        """Number of the first row of a kind."""
        return next(n for n, (found, _) in enumerate(self.rows(), start=1) if found == kind)

    def execute(self, statement: str, *values: object) -> None:
        with closing(sqlite3.connect(self.database)) as database, database:
            database.execute(statement, values)

    def rewrite(self, change: Callable[[list[tuple[str, dict[str, Any]]]], object]) -> None:
        """Changes the rows as a list, numbers them anew and makes their chain good again."""
        rows = self.rows()
        change(rows)
        chain = FIRST_CHAIN
        with closing(sqlite3.connect(self.database)) as database, database:
            database.execute("DELETE FROM ledger")
            for number, (kind, fields) in enumerate(rows, start=1):
                body = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
                chain = hash_parts(bytes.fromhex(chain), number, kind, body).hex()
                database.execute(
                    "INSERT INTO ledger VALUES (?, ?, ?, ?)", (number, kind, body, chain)
                )
