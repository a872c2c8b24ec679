"""A source whose problems are rows of files: indexed once, read one at a time."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import pyarrow as pa

from runspec.core.errors import UserError
from runspec.core.spec.schema import Source
from runspec.core.spec.source_files import row_files, source_files
from sampler.tasks.interfaces import Keep
from sampler.tasks.sources.kept import Kept, kept_rows
from sampler.tasks.sources.rows import ProblemRows, RowReader, Table
from verify.plugins import Problem

MAX_ROW_BYTES = 64 * 1024 * 1024
"""Of one row as it lies in a file."""


class Stamp:
    """Size and time of a file, held against it whenever it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known = path.stat()
        self._known = (known.st_size, known.st_mtime_ns)

    def open(self) -> BinaryIO:
        """The file, to read.

        Raises:
            UserError: it is not there any more, or another one.
        """
        try:
            stream = self.path.open("rb")
            now = os.fstat(stream.fileno())
            if (now.st_size, now.st_mtime_ns) == self._known:
                return stream
            stream.close()
            reason = "changed while the run reads it"
        except OSError as error:
            reason = f"cannot be read any more: {error.strerror or error}"
        raise UserError(
            reason, place=str(self.path), remedy="put the file back as it was, then start again"
        )


class Pieces(ABC):
    """A `Table` of Arrow data that lies in pieces: row groups, or record batches.

    Args:
        files: by relative name.
        rows: of each piece, and the number of its file, in order.
    """

    def __init__(self, files: Mapping[str, Path], rows: Sequence[tuple[int, int]]) -> None:
        self._names = list(files)
        self._file_of = [file for _, file in rows]
        self._starts = [0, *accumulate(count for count, _ in rows)]

    @abstractmethod
    def piece(self, number: int) -> pa.Table | pa.RecordBatch:
        """The piece 0 <= number, in memory or mapped."""

    @abstractmethod
    def batches(self) -> Iterator[list[Mapping[str, Any]]]:
        """See `Table`."""

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> Mapping[str, Any]:
        """See `Table`."""
        at = bisect_right(self._starts, number) - 1
        rows = self.piece(at).slice(number - self._starts[at], 1).to_pylist()
        found: Mapping[str, Any] = rows[0]
        return found

    def place(self, number: int) -> str:
        """See `Table`."""
        file = self._file_of[bisect_right(self._starts, number) - 1]
        first = self._starts[self._file_of.index(file)]
        return f"{self._names[file]}, row {number - first + 1}"


def require_columns(columns: Sequence[str], there: Sequence[str], name: str) -> None:
    """Makes sure that a file has the columns that are read.

    Raises:
        UserError: it lacks some.
    """
    if missing := [column for column in columns if column not in there]:
        raise UserError(
            f"no column {', '.join(map(repr, missing))}; there are {', '.join(there)[:300]}",
            place=name,
            remedy="name the columns under params, and that of the solve rate in solve_rate",
        )


class FileSource:
    """Problems from rows; implements `ProblemSource`. Kinds say how rows are found and read.

    The files are looked through once, each row strictly checked; which rows are kept is cached on
    disk. After that a problem is read when it is asked for.

    Attributes:
        table: makes the `Table` of files by relative name; the columns are those that are read.

    Raises:
        UserError: files that are not there, a malformed row, two equal ids, or no row that is kept.
    """

    table: ClassVar[type[Any]]

    def __init__(self, source: Source, seed: int, keep: Keep) -> None:
        if source.uri is None:
            raise UserError(
                f"kind {source.kind} needs uri",
                place=f"data.sources.{source.name}",
                remedy="name the file or the folder with the rows",
            )
        self._rows = self.reader(source)
        files = row_files(source, source_files(source))
        self._table: Table = self.table(files, self._rows.columns)
        self._kept: Kept = kept_rows(source, files, self._table, self._rows, keep)
        self.task_types = frozenset(self._kept.task_types)

    def reader(self, source: Source) -> RowReader:
        """What a row means."""
        return ProblemRows(source)

    @property
    def summary(self) -> str:
        """How many rows are kept, and how many are left out for what reason."""
        return self._kept.summary

    def __len__(self) -> int:
        return len(self._kept.rows)

    def problem(self, index: int) -> Problem:
        """The problem of the kept row `index`."""
        number = int(self._kept.rows[index])
        return self._rows.problem(self._table.row(number), number, self._table.place(number))
