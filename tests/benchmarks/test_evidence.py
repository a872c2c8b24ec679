"""Every row of docs/evidence.csv can be run again, and is drawn from what the file says of it."""

from __future__ import annotations

import pytest

from benchmarks.evidence import ROWS, recorded, table
from benchmarks.runs import ROOT
from tests.runspec.core.schema.spec_files import load


@pytest.mark.parametrize("name", ROWS)
def test_the_spec_of_a_row_is_one_that_runs(name: str) -> None:
    row = ROWS[name]
    changes = [f"{path}={value}" for path, value in row.changes.items()]
    found = load(ROOT / row.spec, *changes, profile="laptop").findings
    assert [str(finding) for finding in found if finding.severity == "error"] == []


def test_the_pages_tables_have_the_recorded_figures() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    for kind in {ROWS[run["row"]].table for run in recorded(*ROWS)}:
        assert "\n".join(table(kind)) in page, f"python -m benchmarks.evidence table {kind}"
