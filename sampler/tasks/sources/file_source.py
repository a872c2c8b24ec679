"""A source whose problems are rows of files: scanned once, one row read at a time.

The scan selects the rows that belong to the run and caches them on disk by everything that the
selection depends on.
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, ClassVar
from zipfile import BadZipFile

import numpy as np
import pyarrow as pa

from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.hashing import hash_parts
from runspec.core.parquet import bounded_rows
from runspec.core.spec.schema import Source
from runspec.core.spec.source_files import file_digest, row_files, source_files
from sampler.tasks.interfaces import Keep, Part
from sampler.tasks.sources.rows import ProblemRows, RowReader, Table
from verify.plugins import Problem

_log = logging.getLogger(__name__)
_PROGRESS_S = 5.0
_MAX_CACHED_BYTES = 1 << 32
_VERSION = "kept rows 4"
_SAID: Mapping[Part, str] = {
    "train": "to train on",
    "held_out": "held out",
    "over_long": "over-long",
}
_REMEDIES = {
    "over_long": "raise data.max_prompt_tokens",
    "off_rate": "widen solve_rate",
    "no_rate": "measure solve rates (`python -m sampler solve-rates`)",
}
MAX_ROW_BYTES = 64 * 1024 * 1024
"""Most bytes of one row in a file."""


@dataclass(frozen=True)
class SelectedRows:
    """The rows that belong to a run."""

    rows: np.ndarray
    """u32 [n]: numbers of the rows, ascending."""
    task_types: list[str]
    """Task types of these rows, sorted."""
    summary: str
    """Numbers of rows selected, and left out for each reason."""


def select_rows(
    source: Source, files: Mapping[str, Path], table: Table, rows: RowReader, keep: Keep
) -> SelectedRows:
    """Return the rows within the solve rate limits that `keep` accepts; the same in every process.

    The cache is in `$XDG_CACHE_HOME/runspec/problems` (`~/.cache`), a file for each set of (file
    contents, columns, filters, tokenizer, template, targets). It is optional.

    Raises:
        UserError: a malformed row, two equal ids, or no row is left.
    """
    key = hash_parts(
        *(_VERSION, source.kind, source.name),
        *(file_digest(path) for path in files.values()),
        source.model_dump_json(include={"params", "task_types", "solve_rate"}),
        keep.digest,
    ).hex()
    path = _cache_path(key)
    kept = None if path is None else _read_cache(path, len(table))
    if kept is None:
        kept = _scan(source, table, rows, keep)
        if path is not None:
            _write_cache(path, kept)
    _log.info("source %s: %s", source.name, kept.summary)
    return kept


def _scan(source: Source, table: Table, rows: RowReader, keep: Keep) -> SelectedRows:
    said = time.monotonic()
    looked_at, kept, counts = 0, list[int](), Counter[str]()
    types, ids = set[str](), dict[bytes, int]()
    bounds = source.solve_rate
    for batch in table.batches():
        problems: list[tuple[int, Problem]] = []
        for number, row in enumerate(batch, start=looked_at):
            place = table.place(number)
            problem = rows.problem(row, number, place)
            _refuse_second(ids, problem.problem_id, number, table)
            rate = rows.rate(row, place)
            if bounds is not None and rate is None:
                counts["no_rate"] += 1
            elif bounds is not None and rate is not None and not bounds.min <= rate <= bounds.max:
                counts["off_rate"] += 1
            else:
                problems.append((number, problem))
        looked_at += len(batch)
        parts = keep.parts([problem.prompt for _, problem in problems])
        counts.update(parts)
        for (number, problem), part in zip(problems, parts, strict=True):
            if part == keep.wanted:
                kept.append(number)
                types.add(problem.task_type)
        if time.monotonic() - said > _PROGRESS_S:
            said = time.monotonic()
            _log.info("source %s: %d of %d rows scanned", source.name, looked_at, len(table))
    summary = ", ".join(f"{counts[part]} {_SAID[part]}" for part in keep.known)
    if bounds is not None:
        summary += (
            f", {counts['off_rate']} left out by their solve rate, {counts['no_rate']} without one"
        )
    if not kept:
        remedies = [remedy for cause, remedy in _REMEDIES.items() if counts[cause]]
        raise UserError(
            f"no problem is left: {summary}",
            place=f"data.sources.{source.name}",
            remedy=", or ".join(remedies)
            or "add problems: a run with a warm start holds a tenth of them out",
        )
    return SelectedRows(np.array(kept, dtype=np.uint32), sorted(types), summary)


def _refuse_second(ids: dict[bytes, int], problem_id: str, number: int, table: Table) -> None:
    """Refuse an id that occurred before. Only 16 bytes of each id's hash are stored."""
    first = ids.setdefault(hash_parts(problem_id)[:16], number)
    if first != number:
        raise UserError(
            f"problem_id {problem_id[:80]!r} is that of {table.place(first)} too",
            place=table.place(number),
            remedy="give every problem an id of its own",
        )


def _cache_path(key: str) -> Path | None:
    """Return the cache file of a key; None if there is no home directory."""
    said = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(said) if Path(said).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "runspec" / "problems" / key


def _write_cache(path: Path, kept: SelectedRows) -> None:
    """Write the rows as a zip of arrays, whose checksums show damage."""
    file = BytesIO()
    np.savez(
        file, rows=kept.rows, task_types=np.array(kept.task_types), summary=np.array(kept.summary)
    )
    try:
        write_atomic(path, file.getvalue())
    except UserError as error:
        _log.warning("the selected rows are not cached: %s", error)


def _read_cache(path: Path, rows: int) -> SelectedRows | None:
    """Return the cached rows; None if there are none or the file is damaged."""
    try:
        data = read_bounded(path, _MAX_CACHED_BYTES)
    except (OSError, UserError):
        return None
    try:
        with np.load(BytesIO(data), allow_pickle=False) as file:
            kept = SelectedRows(file["rows"], file["task_types"].tolist(), str(file["summary"]))
        if len(kept.rows) and kept.rows[-1] < rows:
            return kept
        damage = "row numbers beyond the end of the files"
    except (ValueError, KeyError, EOFError, RuntimeError, BadZipFile) as error:
        damage = str(error)
    _log.warning("%s is damaged (%s): scanning the rows again", path, damage)
    return None


class Stamp:
    """Size and time of a file, checked whenever it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known = path.stat()
        self._known = (known.st_size, known.st_mtime_ns)

    def open(self) -> BinaryIO:
        """Open the file to read.

        Raises:
            UserError: it is gone or was replaced.
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
    """A `Table` of Arrow data in pieces: row groups, or record batches.

    Args:
        files: by relative name.
        rows: number of rows of each piece and the number of its file, in order.
    """

    def __init__(self, files: Mapping[str, Path], rows: Sequence[tuple[int, int]]) -> None:
        self._names = list(files)
        self._file_of = [file for _, file in rows]
        self._starts = [0, *accumulate(count for count, _ in rows)]

    @abstractmethod
    def piece(self, number: int) -> pa.Table | pa.RecordBatch:
        """Return piece `number`, in memory or mapped."""

    @abstractmethod
    def batches(self) -> Iterator[list[Mapping[str, Any]]]:
        """See `Table`."""

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> Mapping[str, Any]:
        """See `Table`."""
        at = bisect_right(self._starts, number) - 1
        found = self.piece(at).slice(number - self._starts[at], 1)
        name, first = self._in_file(number)
        ((row,),) = bounded_rows(found, most=MAX_ROW_BYTES, place=name, first=first)
        return row

    def place(self, number: int) -> str:
        """See `Table`."""
        name, of_file = self._in_file(number)
        return f"{name}, row {of_file + 1}"

    def _in_file(self, number: int) -> tuple[str, int]:
        """Return the file of a row, and the row's number in it from 0."""
        file = self._file_of[bisect_right(self._starts, number) - 1]
        return self._names[file], number - self._starts[self._file_of.index(file)]


def require_columns(columns: Sequence[str], there: Sequence[str], name: str) -> None:
    """Check that a file has the columns that are read.

    Raises:
        UserError: a column is missing.
    """
    if missing := [column for column in columns if column not in there]:
        raise UserError(
            f"no column {', '.join(map(repr, missing))}; there are {', '.join(there)[:300]}",
            place=name,
            remedy="name the columns under params, and that of the solve rate in solve_rate",
        )


class FileSource:
    """Problems from rows; implements `ProblemSource`. Subclasses say how rows are found and read.

    The files are scanned once, each row strictly checked, and the selected rows are cached on disk.
    After that a problem is read when it is requested.

    Attributes:
        table: makes the `Table` of files by relative name; the columns are those that are read.
        reader: makes the reader that turns rows into problems.

    Raises:
        UserError: a missing file, a malformed row, two equal ids, or no row is selected.
    """

    table: ClassVar[type[Any]]
    reader: ClassVar[type[Any]] = ProblemRows

    def __init__(self, source: Source, seed: int, keep: Keep) -> None:
        if source.uri is None:
            raise UserError(
                f"kind {source.kind} needs uri",
                place=f"data.sources.{source.name}",
                remedy="name the file or the folder with the rows",
            )
        self._rows: RowReader = self.reader(source)
        files = row_files(source, source_files(source))
        self._table: Table = self.table(files, self._rows.columns)
        self._kept: SelectedRows = select_rows(source, files, self._table, self._rows, keep)
        self.task_types = frozenset(self._kept.task_types)

    @property
    def summary(self) -> str:
        """Numbers of rows selected, and left out for each reason."""
        return self._kept.summary

    def __len__(self) -> int:
        return len(self._kept.rows)

    def problem(self, index: int) -> Problem:
        """Return the problem of the selected row `index`."""
        number = int(self._kept.rows[index])
        return self._rows.problem(self._table.row(number), number, self._table.place(number))

    def placed(self) -> Iterator[tuple[str, Problem]]:
        """Yield each selected row's file and number, and its problem; reads the files in order."""
        selected, reported = {*self._kept.rows.tolist()}, time.monotonic()
        rows = (row for batch in self._table.batches() for row in batch)
        for number, row in enumerate(rows):
            if number in selected:
                place = self._table.place(number)
                yield place, self._rows.problem(row, number, place)
            if time.monotonic() - reported > _PROGRESS_S:
                reported = time.monotonic()
                _log.info("%d of %d rows read", number + 1, len(self._table))
