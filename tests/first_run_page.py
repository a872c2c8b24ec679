"""The files and commands that docs/first-run.md shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "first-run.md"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"# (\S+\.\w+)\n")


def blocks(language: str) -> list[str]:
    """The code blocks of a language, in order."""
    return [text for found, text in _BLOCK.findall(PAGE.read_text()) if found == language]


def commands() -> list[str]:
    """All lines of the shell blocks, in order."""
    return [line for block in blocks("sh") for line in block.splitlines()]


def files() -> Iterator[tuple[str, str]]:
    """(name, contents) of each block whose first line names a file."""
    for _, text in _BLOCK.findall(PAGE.read_text()):
        if named := _NAMED.match(text):
            yield named[1], text[named.end() :]
