"""docs/spec.md names every key of the schema and every rule."""

from __future__ import annotations

import re
from pathlib import Path

import runspec.lint.rules  # noqa: F401
from runspec.lint.registry import RULES
from runspec.spec.schema_keys import all_paths

PAGE = (Path(__file__).parents[3] / "docs" / "spec.md").read_text(encoding="utf-8")


def test_the_table_of_fields_is_the_schema() -> None:
    documented = set()
    for row in PAGE.split("## Fields")[1].splitlines():
        if row.startswith(("| `", "| (top)")):
            _, blocks, keys, _ = row.split("|")
            for block in re.findall(r"`([^`]+)`", blocks) or [""]:
                prefix = f"{block}." if block else ""
                documented |= {f"{prefix}{key}" for key in re.findall(r"`([^`]+)`", keys)}
    assert documented == set(all_paths())


def test_every_rule_is_named() -> None:
    assert [code for code in RULES if f"`{code}`" not in PAGE] == []
