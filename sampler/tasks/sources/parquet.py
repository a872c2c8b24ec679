"""Rows of Parquet files, read one row group at a time."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from runspec.core.errors import UserError
from sampler.tasks.sources.file_source import BATCH_ROWS, FileSource
from sampler.tasks.sources.unchanged import Stamp

MAX_GROUP_BYTES = 1024**3
"""Of the columns that are read of a row group, unpacked."""
CACHED_BYTES = 512 * 1024**2
"""Of row groups that are held; the one read last always is."""


class ParquetRows:
    """A `Table` of Parquet files; it holds the row groups that were read last.

    Raises:
        UserError: no Parquet, a column is missing, or a row group is over 1 GiB.
    """

    def __init__(self, files: Mapping[str, Path], columns: list[str]) -> None:
        self._names = list(files)
        self._stamps = [Stamp(path) for path in files.values()]
        self._columns = columns
        self._groups: list[tuple[int, int]] = []
        """(file, row group in it) of each group."""
        rows: list[int] = []
        for file, name in enumerate(self._names):
            for group, size in enumerate(self._group_sizes(file, name)):
                self._groups.append((file, group))
                rows.append(size)
        self._starts = [0, *accumulate(rows)]
        self._held: OrderedDict[int, pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> Mapping[str, Any]:
        """See `Table`."""
        group = bisect_right(self._starts, number) - 1
        rows = self._group(group).slice(number - self._starts[group], 1).to_pylist()
        found: Mapping[str, Any] = rows[0]
        return found

    def batches(self) -> Iterator[list[Mapping[str, Any]]]:
        """See `Table`."""
        for file, stamp in enumerate(self._stamps):
            with stamp.open() as stream:
                try:
                    reader = pq.ParquetFile(stream)
                    for group in range(reader.num_row_groups):  # all at once, it holds them all
                        for batch in reader.iter_batches(
                            BATCH_ROWS, row_groups=[group], columns=self._columns
                        ):
                            yield batch.to_pylist()
                except (pa.ArrowException, OSError) as error:
                    raise _unreadable(self._names[file], error) from error

    def place(self, number: int) -> str:
        """See `Table`."""
        group = bisect_right(self._starts, number) - 1
        file, within = self._groups[group]
        first = self._starts[group - within]
        return f"{self._names[file]}, row {number - first + 1}"

    def _group_sizes(self, file: int, name: str) -> list[int]:
        """Rows of each row group of a file, whose columns are all there."""
        try:
            with self._stamps[file].open() as stream:
                reader = pq.ParquetFile(stream)
                metadata, there = reader.metadata, reader.schema_arrow.names
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(name, error) from error
        if missing := [column for column in self._columns if column not in there]:
            raise UserError(
                f"no column {', '.join(map(repr, missing))}; there are {', '.join(there)[:300]}",
                place=name,
                remedy="name the columns under params, and that of the solve rate in solve_rate",
            )
        sizes = []
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            size = sum(
                group.column(i).total_uncompressed_size
                for i in range(group.num_columns)
                if group.column(i).path_in_schema.partition(".")[0] in self._columns
            )
            if size > MAX_GROUP_BYTES:
                raise UserError(
                    f"row group {number} is {size} bytes, more than {MAX_GROUP_BYTES}",
                    place=name,
                    remedy="write the file with row groups of a thousand rows",
                )
            sizes.append(group.num_rows)
        return sizes

    def _group(self, number: int) -> pa.Table:
        with self._lock:
            if number in self._held:
                self._held.move_to_end(number)
                return self._held[number]
            file, group = self._groups[number]
            try:
                with self._stamps[file].open() as stream:
                    table = pq.ParquetFile(stream).read_row_group(group, columns=self._columns)
            except (pa.ArrowException, OSError) as error:
                raise _unreadable(self._names[file], error) from error
            self._held[number] = table
            while len(self._held) > 1 and sum(t.nbytes for t in self._held.values()) > CACHED_BYTES:
                self._held.popitem(last=False)
            return table


def _unreadable(name: str, error: Exception) -> UserError:
    return UserError(
        f"cannot be read as Parquet: {error}",
        place=name,
        remedy="fetch the file again, or name the folder with the .parquet files in uri",
    )


class ParquetSource(FileSource):
    """`kind: parquet`: one file, a folder of shards, or a pattern."""

    def table(self, files: Mapping[str, Path], columns: list[str]) -> ParquetRows:
        """See `FileSource`."""
        return ParquetRows(files, columns)
