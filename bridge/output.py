"""Directories that the bridge writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import new_directory


@contextmanager
def output_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary directory that becomes `path` by one rename when the block succeeds.

    Raises:
        UserError: `path` exists already, or cannot be written.
    """
    try:
        with new_directory(path) as folder:
            yield folder
    except FileExistsError as error:
        raise UserError(
            "exists already", place=str(path), remedy="name a new directory, or remove it"
        ) from error
    except OSError as error:
        raise UserError(
            f"cannot write: {error.strerror or error}",
            place=str(path),
            remedy="free disk space or mend the permissions, then start again",
        ) from error
