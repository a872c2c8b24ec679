"""`runspec migrate`: shows, or makes, what raises files to the newest version of the schema."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from runspec.common.errors import UserError
from runspec.common.files import read_bounded, write_atomic
from runspec.lint.migrate import MIGRATIONS, Migration, migrate_text
from runspec.spec.yaml_nodes import MAX_CHARACTERS

EXIT_UNREADABLE = 2
_MARK = b"\xef\xbb\xbf"
"""A byte order mark, which some editors write and want to find again."""


def migrate_command(
    files: Sequence[Path], write: bool, migrations: Mapping[str, Migration] = MIGRATIONS
) -> int:
    """Prints the differences, or writes the files; returns the exit code.

    Nothing is written when one of the files cannot be migrated.
    """
    try:
        texts = {path: _text(path) for path in files}
        migrated = {path: migrate_text(texts[path], str(path), migrations) for path in files}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNREADABLE
    for path, result in migrated.items():
        for sentence in result.said or ["nothing to do"]:
            print(f"{path}: {sentence}", file=sys.stderr)
        if not result.said:
            continue
        if write:
            mark = _MARK if path.read_bytes().startswith(_MARK) else b""
            write_atomic(path, mark + result.text.encode())
        else:
            print(_difference(path, texts[path], result.text), end="")
    return 0


def _difference(path: Path, before: str, after: str) -> str:
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return "".join(difflib.unified_diff(old, new, fromfile=str(path), tofile=str(path)))


def _text(path: Path) -> str:
    try:
        return read_bounded(path, MAX_CHARACTERS).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", place=str(path)) from error
