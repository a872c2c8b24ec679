"""What was measured so far, on disk line by line, so that a killed measurement goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from runspec.core.errors import UserError
from runspec.core.files import read_bounded

MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Tries:
    """How often one problem was tried and solved."""

    index: int
    """Of the problem in the task set."""
    solved: int
    """Tries with a task reward of 1 or more."""
    graded: int
    """Tries that were graded; a grader's fault leaves one out."""

    @property
    def rate(self) -> float | None:
        """The share that was solved; None where no try could be graded."""
        return self.solved / self.graded if self.graded else None


class Progress:
    """A file of lines: what is measured, then one line a problem. One writer."""

    def __init__(self, path: Path, file: BinaryIO, done: dict[int, Tries]) -> None:
        self._path, self._file = path, file
        self.done = done
        """By index."""

    def add(self, tries: Iterable[Tries]) -> None:
        """Remembers more problems; they are on disk when this returns.

        Raises:
            UserError: they cannot be written.
        """
        for one in tries:
            self.done[one.index] = one
            self.write(json.dumps(asdict(one)).encode())
        with _said(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def write(self, line: bytes) -> None:
        """Adds a line."""
        with _said(self._path):
            self._file.write(line + b"\n")


@contextmanager
def open_progress(path: Path, about: Mapping[str, object]) -> Iterator[Progress]:
    """Goes on with a measurement, or begins one.

    Args:
        path: of the file.
        about: all that the solve rates depend on.

    Raises:
        UserError: the file is of another measurement, or cannot be read or written.
    """
    head = json.dumps(about, sort_keys=True).encode()
    with _said(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        data = read_bounded(path, MAX_BYTES) if path.exists() else b""
        whole = data.rfind(b"\n") + 1  # a killed process may leave half a line
        lines = data[:whole].splitlines()
        if lines and lines[0] != head:
            raise UserError(
                "a measurement with another model, other data or other settings",
                place=str(path),
                remedy="measure with those again, or take the file away to begin anew",
            )
        done = _tries(lines[1:], path)
        file = path.open("r+b" if lines else "wb")
    with file:
        file.truncate(whole)
        file.seek(whole)
        progress = Progress(path, file, done)
        if not lines:
            progress.write(head)
        yield progress


@contextmanager
def _said(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot keep the progress: {error.strerror or error}",
            place=str(path),
            remedy="free disk space or mend the permissions; the same command goes on",
        ) from error


def _tries(lines: list[bytes], path: Path) -> dict[int, Tries]:
    try:
        found = [Tries(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise UserError(
            f"damaged: {error}", place=str(path), remedy="take the file away to begin anew"
        ) from error
    return {one.index: one for one in found}
