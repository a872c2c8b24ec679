"""The budget of lines and files: what counts, and what is said of a folder above it."""

from __future__ import annotations

import pytest

from tests import budget

SOURCE = '''"""What it is.

More of it.
"""

import os  # why


class A:
    """A class."""

    text = """
    of four
    lines"""

    # why
    def b(self) -> int:
        """Return it."""
        return (
            1
        )
'''


def test_comments_docstrings_and_blank_lines_are_no_code() -> None:
    assert budget.code_lines(SOURCE) == 1 + 1 + 3 + 1 + 3


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("verify/checks/gaps.py", "verify/checks"),
        ("verify/coordinator/machine/state.py", "verify/coordinator"),
        ("verify/client.py", "verify"),
        ("tests/verify/bench.py", "tests"),
        ("docs/testing.md", None),
    ],
)
def test_each_file_counts_for_one_folder(path: str, folder: str | None) -> None:
    assert budget.folder_of(path) == folder


def test_a_folder_above_its_budget_is_named_with_the_excess() -> None:
    allowed = {"a": {"lines": 10, "files": 2}, "b": {"lines": 10, "files": 2}}
    found = {"a": (10, 2), "b": (13, 3), "c": (1, 1)}
    assert budget.excesses(found, allowed) == [
        "b: 13 lines of code, 3 above its budget",
        "b: 3 files, 1 above its budget",
        "c: no budget (lines, files)",
    ]
