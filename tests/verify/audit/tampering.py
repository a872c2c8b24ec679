"""A run directory in the hands of somebody who would change what happened."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.core.canonical import hash_parts
from runspec.core.signed import SigningKey
from tests.verify.coordinator.deployment import Site
from tests.verify.coordinator.over_http import check, sample
from verify.audit import audit
from verify.audit.files import Report
from verify.client import CoordinatorClient
from verify.coordinator.ledger import FIRST_CHAIN

Fields = dict[str, Any]
Rows = list[tuple[str, Fields]]


def work(
    site: Site,
    worker: tuple[SigningKey, CoordinatorClient],
    *,
    judged: bool = True,
    **findings: object,
) -> None:
    """A lease taken, answered and judged, by a run that is served."""
    sample(site, *worker)
    if judged:
        check(site, site.client(site.validator), **findings)


@dataclass(frozen=True)
class Copy:
    run_dir: Path
    site: Site

    @classmethod
    def of(cls, site: Site, folder: Path, **options: Any) -> Copy:
        shutil.copytree(site.run_dir, folder, **options)
        return cls(folder, site)

    @property
    def database(self) -> Path:
        return self.run_dir / "state.db"

    def audit(self, heads: dict[int, str] | None = None) -> Report:
        return audit(self.run_dir, root_key=self.site.root.public_hex, heads=heads)

    def found(self) -> set[tuple[int | None, str]]:
        """Rows and checks of the findings of an audit."""
        return {(finding.row, finding.what) for finding in self.audit().findings}

    def whats(self) -> set[str]:
        return {what for _, what in self.found()}

    def rows(self) -> Rows:
        with closing(sqlite3.connect(self.database)) as database:
            found = database.execute("SELECT kind, body FROM ledger ORDER BY seq").fetchall()
        return [(kind, json.loads(body)) for kind, body in found]

    def all(self, kind: str) -> list[int]:
        """Numbers of the rows of a kind."""
        return [n for n, (found, _) in enumerate(self.rows(), start=1) if found == kind]

    def first(self, kind: str) -> int:
        return self.all(kind)[0]

    def execute(self, statement: str, *values: object) -> None:
        with closing(sqlite3.connect(self.database)) as database, database:
            database.execute(statement, values)

    def rewrite(self, change: Callable[[Rows], object]) -> None:
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

    def change(self, row: int, change: Callable[[Fields], object]) -> None:
        """Changes the fields of one row, under a good chain."""
        self.rewrite(lambda rows: change(rows[row - 1][1]))
