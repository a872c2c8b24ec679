"""A source whose problems are rows of files: indexed once, read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from runspec.core.errors import UserError
from runspec.core.spec.schema import Source
from runspec.core.spec.source_files import row_files, source_files
from sampler.tasks.interfaces import Keep
from sampler.tasks.sources.kept import Kept, kept_rows
from sampler.tasks.sources.rows import ProblemRows, RowReader
from verify.plugins import Problem

BATCH_ROWS = 256
"""Rows that are held while files are looked through."""
MAX_ROW_BYTES = 64 * 1024 * 1024
"""Of one row as it lies in a file."""


class Table(Protocol):
    """The rows of files, behind each other; several threads may read at once.

    It holds where rows are, never all of them.
    """

    def __len__(self) -> int: ...

    def row(self, number: int) -> Mapping[str, Any]:
        """The row at 0 <= number < len(self)."""

    def batches(self) -> Iterator[list[Mapping[str, Any]]]:
        """All rows in order, up to `BATCH_ROWS` at a time."""

    def place(self, number: int) -> str:
        """File and row, for messages; rows count from 1."""


class FileSource(ABC):
    """Problems from rows; implements `ProblemSource`. Kinds say how rows are found and read.

    The files are looked through once, each row strictly checked; which rows are kept is cached on
    disk. After that a problem is read when it is asked for.

    Raises:
        UserError: files that are not there, a malformed row, two equal ids, or no row that is kept.
    """

    def __init__(self, source: Source, seed: int, keep: Keep) -> None:
        if source.uri is None:
            raise UserError(
                f"kind {source.kind} needs uri",
                place=f"data.sources.{source.name}",
                remedy="name the file or the folder with the rows",
            )
        self._rows = self.reader(source)
        files = row_files(source, source_files(source))
        self._table = self.table(files, self._rows.columns)
        self._kept: Kept = kept_rows(source, files, self._table, self._rows, keep)
        self.task_types = frozenset(self._kept.task_types)

    def reader(self, source: Source) -> RowReader:
        """What a row means."""
        return ProblemRows(source)

    @abstractmethod
    def table(self, files: Mapping[str, Path], columns: list[str]) -> Table:
        """The rows of files, by relative name."""

    def __len__(self) -> int:
        return len(self._kept.rows)

    def problem(self, index: int) -> Problem:
        """The problem of the kept row `index`."""
        number = int(self._kept.rows[index])
        return self._rows.problem(self._table.row(number), number, self._table.place(number))
