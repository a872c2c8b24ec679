"""`runspec migrate`: shows, or makes, what raises files to the newest version of the schema."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.spec.layers import read_text
from runspec.lint.fix import Mended, write_mended
from runspec.lint.migrate import MIGRATIONS, Migration, migrate_text

EXIT_UNREADABLE = 2


def migrate_command(
    files: Sequence[Path], write: bool, migrations: Mapping[str, Migration] = MIGRATIONS
) -> int:
    """Prints the differences, or writes the files; returns the exit code.

    Nothing is written when one of the files cannot be migrated.
    """
    try:
        texts = {str(path): read_text(path) for path in files}
        migrated = {file: migrate_text(text, file, migrations) for file, text in texts.items()}
        changed = {file: result.text for file, result in migrated.items() if result.said}
        if write:
            write_mended(Mended(changed), texts)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNREADABLE
    for file, result in migrated.items():
        for sentence in result.said or ["nothing to do"]:
            print(f"{file}: {sentence}", file=sys.stderr)
        if result.said and not write:
            print(_difference(file, texts[file], result.text), end="")
    return 0


def _difference(file: str, before: str, after: str) -> str:
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return "".join(difflib.unified_diff(old, new, fromfile=file, tofile=file))
