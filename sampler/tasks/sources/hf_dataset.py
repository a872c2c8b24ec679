"""Rows of a Hugging Face dataset on disk, as `Dataset.save_to_disk` writes it.

A folder of Arrow IPC streams with `state.json`, which lists them; a `DatasetDict` is a folder of
such folders with `dataset_dict.json`. Read with pyarrow alone, out of mapped memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from runspec.core.errors import UserError
from runspec.core.parquet import bounded_rows
from sampler.tasks.sources.file_source import (
    MAX_ROW_BYTES,
    FileSource,
    Pieces,
    Stamp,
    require_columns,
)


class ArrowRows(Pieces):
    """A `Table` of Arrow IPC streams, whose record batches stay in the mapped files.

    Raises:
        UserError: a file is not an Arrow stream, or lacks a column.
    """

    def __init__(self, files: Mapping[str, Path], columns: list[str]) -> None:
        self._stamps = [Stamp(path) for path in files.values()]
        read = [_read(name, path, columns) for name, path in files.items()]
        self._batches = [batch for of_file in read for batch in of_file]
        sizes = [(batch.num_rows, file) for file, found in enumerate(read) for batch in found]
        super().__init__(files, sizes)

    def piece(self, number: int) -> pa.RecordBatch:
        """See `Pieces`."""
        self._stamps[self._file_of[number]].open().close()
        return self._batches[number]

    def batches(self) -> Iterator[list[Mapping[str, Any]]]:
        """See `Table`."""
        for start, batch in zip(self._starts, self._batches, strict=False):
            name, first = self._in_file(start)
            yield from bounded_rows(batch, most=MAX_ROW_BYTES, place=name, first=first)


def _read(name: str, path: Path, columns: list[str]) -> list[pa.RecordBatch]:
    try:
        # Not closed, because the batches are in this mapping, which needs no open file.
        reader = pa.ipc.open_stream(pa.memory_map(str(path)))
        require_columns(columns, reader.schema.names, name)
        batches = [batch.select(columns) for batch in reader]
        for batch in batches:
            batch.validate()
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"cannot be read as an Arrow stream: {error}",
            place=name,
            remedy="write the dataset anew with `save_to_disk`",
        ) from error
    return [batch for batch in batches if batch.num_rows]


class HfDatasetSource(FileSource):
    """`kind: hf_dataset`: a folder that `save_to_disk` wrote; `params.split` of a `DatasetDict`."""

    table = ArrowRows
