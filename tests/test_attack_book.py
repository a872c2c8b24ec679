"""docs/attacks.md and tests/attacks are one book: every attack has a row, every row its classes."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "attacks.md"
FOLDER = ROOT / "tests" / "attacks"
WHOLE_RUN = ROOT / "tests" / "e2e" / "test_whole_run.py"
COLUMNS = ["attack", "what is done, and for what", "check that decides", "detection"]
ATTACKS = """
older weights; newer weights; other run's weights; fine-tuned weights; int8, int4, fp8 weights;
bf16 with fp8 KV cache; smaller model's tokens prefilled; edited token; edited last token;
truncated or padded output; greedy; other temperature; top-k, top-p; best-of-n cherry-picking;
chosen problems; chosen targets; replayed submission; replayed proofs; another worker's file;
forged signature; constant proof; null proof; tampered rewards; tampered log-probs;
out-of-range tokens; NaN, inf; schema tricks; decompression bomb; path in a file name;
duplicate rows; flooding; slow upload; clock tricks; validator poisoning; key grinding;
version picking; withholding; exchanged files
"""
"""Of the issue, and what leases and the learner's digests must close."""
CLASS = re.compile(r"`(test_\w+\.py)::(Test\w+)`")


def book() -> list[list[str]]:
    """The rows of the table under "The book", cell by cell, its head first."""
    section = PAGE.read_text(encoding="utf-8").split("\n## The book\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


HEAD, _, *ROWS = book()


@cache
def classes() -> set[tuple[str, str]]:
    """(file, class) of every class of tests in the folder and the whole run."""
    return {
        (path.name, node.name)
        for path in (*FOLDER.glob("test_*.py"), WHOLE_RUN)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test")
    }


def test_a_row_has_every_column() -> None:
    assert HEAD[: len(COLUMNS)] == COLUMNS
    for row in ROWS:
        assert len(row) == len(HEAD) and all(row), row


@pytest.mark.parametrize("attack", [" ".join(name.split()) for name in ATTACKS.split(";")])
def test_an_attack_of_the_issue_has_a_row(attack: str) -> None:
    assert attack in [row[0] for row in ROWS]


def test_rows_name_classes_that_are_there() -> None:
    for row in ROWS:
        named = CLASS.findall(row[-1])
        assert named, row[0]
        assert set(named) <= classes(), row[0]


def test_every_class_of_attacks_has_a_row() -> None:
    named = {name for row in ROWS for name in CLASS.findall(row[-1])}
    assert classes() - named == set()


def test_a_rate_of_100_per_cent_says_why() -> None:
    """Exactly compared, or by whom and in what: never the bare figure."""
    for row in ROWS:
        detection = row[3]
        assert not re.fullmatch(r"100 %\.?", detection), row[0]


def test_links_lead_to_sections_that_are_there() -> None:
    links = re.findall(r"\]\(([\w./]*)#([\w-]+)\)", PAGE.read_text(encoding="utf-8"))
    assert links
    for page, anchor in links:
        text = (PAGE.parent / page if page else PAGE).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        found = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}
        assert anchor in found, f"{page}#{anchor}"
