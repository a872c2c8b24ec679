"""docs/lint.md has every rule with its group, severity and first line; codes are all rules."""

from __future__ import annotations

from typing import get_args

import runspec.lint.rules  # noqa: F401
from runspec.lint.registry import RULES, Group
from tests.harness import ROOT

PAGE = ROOT / "docs" / "lint.md"
HEADING = "## Rules\n"


def table() -> str:
    """The page's table of rules, as it must be."""
    rows = ["| group | code | severity | what must hold |", "|---|---|---|---|"]
    for group in get_args(Group):
        for rule in RULES.values():
            if rule.group == group:
                summary = rule.summary.replace("|", "\\|")
                rows.append(f"| {group} | `{rule.code}` | {rule.severity} | {summary} |")
    return "\n".join(rows) + "\n"


def write() -> None:
    """Writes the table into the page, where rules have changed."""
    text = PAGE.read_text(encoding="utf-8").partition(HEADING)[0]
    PAGE.write_text(text + HEADING + table(), encoding="utf-8")


def test_the_table_of_rules_is_the_rules() -> None:
    assert PAGE.read_text(encoding="utf-8").partition(HEADING)[2] == table(), (
        'python -c "from tests.runspec.lint.test_docs import write; write()"'
    )
