"""Rows of a Hugging Face dataset on disk, as `Dataset.save_to_disk` writes it.

A folder of Arrow IPC streams with `state.json`, which lists them; a `DatasetDict` is a folder of
such folders with `dataset_dict.json`. Read with pyarrow alone, out of mapped memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa

from runspec.core.errors import UserError
from sampler.tasks.sources.file_source import BATCH_ROWS, FileSource
from sampler.tasks.sources.unchanged import Stamp


class ArrowRows:
    """A `Table` of Arrow IPC streams, whose record batches stay where they lie in the files.

    Raises:
        UserError: no Arrow stream, or a column is missing.
    """

    def __init__(self, files: Mapping[str, Path], columns: list[str]) -> None:
        self._names = list(files)
        self._stamps = [Stamp(path) for path in files.values()]
        self._batches: list[pa.RecordBatch] = []
        self._files: list[int] = []
        """The file of each record batch."""
        self._first: list[int] = []
        """The row that each file begins with."""
        for file, (name, path) in enumerate(files.items()):
            self._first.append(sum(batch.num_rows for batch in self._batches))
            for batch in _read(name, path, columns):
                self._batches.append(batch)
                self._files.append(file)
        self._starts = [0, *accumulate(batch.num_rows for batch in self._batches)]

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> Mapping[str, Any]:
        """See `Table`."""
        at = bisect_right(self._starts, number) - 1
        self._stamps[self._files[at]].open().close()
        rows = self._batches[at].slice(number - self._starts[at], 1).to_pylist()
        found: Mapping[str, Any] = rows[0]
        return found

    def batches(self) -> Iterator[list[Mapping[str, Any]]]:
        """See `Table`."""
        for batch in self._batches:
            for at in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(at, BATCH_ROWS).to_pylist()

    def place(self, number: int) -> str:
        """See `Table`."""
        file = self._files[bisect_right(self._starts, number) - 1]
        return f"{self._names[file]}, row {number - self._first[file] + 1}"


def _read(name: str, path: Path, columns: list[str]) -> list[pa.RecordBatch]:
    try:
        # Closed by nobody: the batches lie in it, and a mapping needs no open file.
        reader = pa.ipc.open_stream(pa.memory_map(str(path)))
        there = reader.schema.names
        missing = [column for column in columns if column not in there]
        batches = [] if missing else [batch.select(columns) for batch in reader]
        for batch in batches:
            batch.validate()
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"cannot be read as an Arrow stream: {error}",
            place=name,
            remedy="write the dataset anew with `save_to_disk`",
        ) from error
    if missing:
        raise UserError(
            f"no column {', '.join(map(repr, missing))}; there are {', '.join(there)[:300]}",
            place=name,
            remedy="name the columns under params, and that of the solve rate in solve_rate",
        )
    return [batch for batch in batches if batch.num_rows]


class HfDatasetSource(FileSource):
    """`kind: hf_dataset`: a folder that `save_to_disk` wrote; `params.split` of a `DatasetDict`."""

    def table(self, files: Mapping[str, Path], columns: list[str]) -> ArrowRows:
        """See `FileSource`."""
        return ArrowRows(files, columns)
