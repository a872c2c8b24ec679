"""Directories that the bridge writes: whole under their name, or not there at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import new_directory


@contextmanager
def output_directory(
    path: Path, faults: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[Path]:
    """Yields a folder that becomes `path` by one rename when the block succeeds.

    Args:
        path: must not exist.
        faults: errors which mean that the disk did not take something.

    Raises:
        UserError: `path` exists, or cannot be written.
    """
    try:
        with new_directory(path) as folder:
            yield folder
    except FileExistsError as error:
        raise UserError(
            "exists already", place=str(path), remedy="name a new directory, or remove it"
        ) from error
    except faults as error:
        raise UserError(
            f"cannot write: {getattr(error, 'strerror', None) or error}",
            place=str(path),
            remedy="free disk space or mend the permissions, then try again",
        ) from error
