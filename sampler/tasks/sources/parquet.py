"""Rows of Parquet files, read one row group at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from runspec.core.errors import UserError
from runspec.core.parquet import open_parquet, parquet_rows, require_small_groups
from sampler.tasks.sources.file_source import (
    MAX_ROW_BYTES,
    FileSource,
    Pieces,
    Stamp,
    require_columns,
)

CACHED_BYTES = 512 * 1024**2
"""Most bytes of cached row groups; the one read last is always cached."""


class ParquetRows(Pieces):
    """A `Table` of Parquet files; it caches the row groups that were read last.

    Raises:
        UserError: a file is not Parquet, lacks a column, or has a row group over 1 GiB.
    """

    def __init__(self, files: Mapping[str, Path], columns: list[str]) -> None:
        self._stamps = [Stamp(path) for path in files.values()]
        self._columns = columns
        sizes = [self._group_sizes(file, name) for file, name in enumerate(files)]
        self._groups = [group for of_file in sizes for group in range(len(of_file))]
        super().__init__(files, [(n, file) for file, found in enumerate(sizes) for n in found])
        self._held: OrderedDict[int, pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def batches(self) -> Iterator[list[Mapping[str, Any]]]:
        """See `Table`."""
        for file, name in enumerate(self._names):
            with self._open(file, name) as reader:
                yield from parquet_rows(reader, self._columns, most=MAX_ROW_BYTES, place=name)

    @contextmanager
    def _open(self, file: int, name: str) -> Iterator[pq.ParquetFile]:
        """Open a file; see `open_parquet`."""
        try:
            with self._stamps[file].open() as stream:
                yield open_parquet(stream, self._columns)
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"cannot be read as Parquet: {error}",
                place=name,
                remedy="fetch the file again, or name the folder with the .parquet files in uri",
            ) from error

    def _group_sizes(self, file: int, name: str) -> list[int]:
        """Return the number of rows of each row group of a file, after checking its columns."""
        with self._open(file, name) as reader:
            metadata, there = reader.metadata, reader.schema_arrow.names
            require_columns(self._columns, there, name)
            require_small_groups(reader, self._columns, name)
        return [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]

    def piece(self, number: int) -> pa.Table:
        """See `Pieces`."""
        with self._lock:
            if number in self._held:
                self._held.move_to_end(number)
                return self._held[number]
            file = self._file_of[number]
            with self._open(file, self._names[file]) as reader:
                table = reader.read_row_group(
                    self._groups[number], columns=self._columns, use_threads=False
                )
            self._held[number] = table
            while len(self._held) > 1 and sum(t.nbytes for t in self._held.values()) > CACHED_BYTES:
                self._held.popitem(last=False)
            return table


class ParquetSource(FileSource):
    """`kind: parquet`: one file, a folder of shards, or a pattern."""

    table = ParquetRows
