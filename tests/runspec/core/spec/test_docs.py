"""The documentation names every key of the schema and every rule."""

from __future__ import annotations

from pathlib import Path

import runspec.lint.rules  # noqa: F401
from runspec.core.spec.fields import CHANGE_CLASSES
from tests.runspec.core.spec.field_table import with_table

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "spec.md").read_text(encoding="utf-8")


def test_the_table_of_fields_is_the_schema() -> None:
    # else: python -m tests.runspec.core.spec.field_table docs/spec.md
    assert with_table(PAGE) == PAGE


def test_the_table_of_change_classes_is_the_schema() -> None:
    for name, meaning in CHANGE_CLASSES.items():
        assert f"| `{name}` | {meaning} |" in PAGE
