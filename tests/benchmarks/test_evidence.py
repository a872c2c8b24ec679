"""Every row of docs/evidence.csv can be run again, and is drawn from what the file says of it."""

from __future__ import annotations

import json
import re

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


@pytest.mark.parametrize("name", ["sums", "stories", "products"])
def test_no_held_out_problem_has_the_numbers_of_one_that_is_trained(name: str) -> None:
    def numbers(part: str) -> set[tuple[int, ...]]:
        """Sorted, so that 3 + 8 is 8 + 3."""
        file = ROOT / "specs" / "problems" / f"{name}-{part}.jsonl"
        asked = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
        return {tuple(sorted(map(int, re.findall(r"\d+", prompt)))) for prompt in asked}

    held_out = numbers("held-out")
    assert held_out and not held_out & numbers("train")


def test_the_pages_tables_have_the_recorded_figures() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    for kind in {ROWS[run["row"]].table for run in recorded(*ROWS)}:
        assert "\n".join(table(kind)) in page, f"python -m benchmarks.evidence table {kind}"
