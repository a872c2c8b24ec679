"""A line for each finding: `FILE:LINE:COLUMN: SEVERITY CODE: PATH: MESSAGE (SUGGESTION)`."""

from __future__ import annotations

from runspec.lint.check import CheckedFiles


def render(checked: CheckedFiles) -> str:
    return "\n".join(visible(str(finding)) for finding in checked.findings)


def visible(text: str) -> str:
    """A line as it may go to a terminal: characters that would steer it are shown as escapes."""
    return "".join(
        char if char == "\t" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )
