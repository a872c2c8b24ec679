"""A source whose problems are rows of files: scanned once, one row read at a time.

The scan selects the rows that belong to the run and caches them on disk by everything that the
selection depends on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Literal
from zipfile import BadZipFile

import numpy as np
import pyarrow as pa

from runspec.core import rows as readers
from runspec.core.canonical import hash_parts
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.rows import (
    Row,
)
from runspec.core.schema import Source
from runspec.core.schema.source_files import file_digest, row_files, source_files
from sampler.tasks.interfaces import Keep, Part
from sampler.tasks.rows import Gsm8kRows, LiveCodeBenchRows, ProblemRows, RowReader
from verify.plugins import Problem

_log = logging.getLogger(__name__)
_PROGRESS_S = 5.0
_MAX_CACHED_BYTES = 1 << 32
_VERSION = "kept rows 6"
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
_TOGETHER = 256
"""Prompts that are measured together."""
MAX_ROW_BYTES = 64 * 1024 * 1024
"""Most bytes of one row in a file."""
CACHED_BYTES = 512 * 1024**2
"""Most bytes of cached row groups; the one read last is always cached."""
Form = Literal["jsonl", "parquet", "arrow"]
_FORMS: Mapping[Form, str] = {
    "jsonl": "JSON Lines",
    "parquet": "Parquet",
    "arrow": "an Arrow stream",
}
_FORM_OF_KIND: Mapping[str, Form] = {"parquet": "parquet", "hf_dataset": "arrow"}
_READERS: Mapping[str, Callable[[Source], RowReader]] = {
    "gsm8k": Gsm8kRows,
    "livecodebench": LiveCodeBenchRows,
}
_cached: OrderedDict[tuple[object, ...], pa.Table | pa.RecordBatch] = OrderedDict()
_cache_lock = threading.Lock()


@dataclass(frozen=True)
class SelectedRows:
    """The rows that belong to a run."""

    rows: np.ndarray
    """i64 [n, 4], ascending: number over all files, file, and `number` and `at` of its `Row`."""
    task_types: list[str]
    """Task types of these rows, sorted."""
    summary: str
    """Numbers of rows selected, and left out for each reason."""


def _selected(
    source: Source, files: Sequence[RowFile], reader: RowReader, keep: Keep
) -> SelectedRows:
    """Return the rows within the solve rate limits that `keep` accepts; the same in every process.

    The cache is in `$XDG_CACHE_HOME/runspec/problems` (`~/.cache`), a file for each set of (file
    contents, columns, filters, tokenizer, template, targets). It is optional.

    Raises:
        UserError: a malformed row, two equal ids, or no row is left.
    """
    key = hash_parts(
        *(_VERSION, source.kind, source.name),
        *(file_digest(file.path) for file in files),
        source.model_dump_json(include={"params", "task_types", "solve_rate", "train"}),
        keep.digest,
    ).hex()
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache"
        path = root / "runspec" / "problems" / key
    except RuntimeError:  # there is no home directory
        path = None
    kept = None if path is None else _read_cache(path)
    if kept is None:
        kept = _scan(source, files, reader, keep)
        # A zip of arrays, whose checksums show damage.
        types, summary = np.array(kept.task_types), np.array(kept.summary)
        np.savez(file := BytesIO(), rows=kept.rows, task_types=types, summary=summary)
        try:
            if path is not None:
                write_atomic(path, file.getvalue())
        except UserError as error:
            _log.warning("the selected rows are not cached: %s", error)
    _log.info("source %s: %s", source.name, kept.summary)
    return kept


def _scan(source: Source, files: Sequence[RowFile], reader: RowReader, keep: Keep) -> SelectedRows:
    kept, counts = list[tuple[int, ...]](), Counter[str]()
    types, ids = set[str](), dict[bytes, str]()
    bounds = source.solve_rate
    waiting = list[tuple[str, str, tuple[int, ...]]]()  # prompt, task type, and where the row is

    def decide() -> None:
        parts = keep.parts([prompt for prompt, _, _ in waiting])
        counts.update(parts)
        for part, (_, task_type, where) in zip(parts, waiting, strict=True):
            if part == keep.wanted:
                kept.append(where)
                types.add(task_type)
        waiting.clear()

    for index, (file, row) in enumerate(_all_rows(source.name, files)):
        problem = reader.problem(row.columns, index, row.place)
        first = ids.setdefault(hash_parts(problem.problem_id)[:16], row.place)
        if first != row.place:  # only 16 bytes of each id's hash are stored
            raise UserError(
                f"problem_id {problem.problem_id[:80]!r} is that of {first} too",
                place=row.place,
                remedy="give every problem an id of its own",
            )
        rate = reader.rate(row.columns, row.place)
        if bounds is not None and rate is None:
            counts["no_rate"] += 1
        elif bounds is not None and rate is not None and not bounds.min <= rate <= bounds.max:
            counts["off_rate"] += 1
        else:
            where = (index, file, row.number, row.at)
            waiting.append((problem.prompt, problem.task_type, where))
            if len(waiting) == _TOGETHER:
                decide()
    decide()
    said = _SAID if source.train else {"train": "to ask", "over_long": _SAID["over_long"]}
    summary = ", ".join(f"{counts[part]} {said[part]}" for part in keep.known if part in said)
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
            or "add problems"
            + ": a run with a warm start holds a tenth of them out" * source.train,
        )
    return SelectedRows(np.array(kept, dtype=np.int64), sorted(types), summary)


def _all_rows(name: str, files: Sequence[RowFile]) -> Iterator[tuple[int, Row]]:
    """Yield all rows in order, each with the number of its file, and log progress."""
    said, count = time.monotonic(), 0
    for number, file in enumerate(files):
        for row in file.rows():
            yield number, row
            count += 1
            if time.monotonic() - said > _PROGRESS_S:
                said = time.monotonic()
                _log.info("source %s: %d rows read", name, count)


def _read_cache(path: Path) -> SelectedRows | None:
    """Return the cached rows; None if there are none or the file is damaged."""
    try:
        data = read_bounded(path, _MAX_CACHED_BYTES)
    except (OSError, UserError):
        return None
    try:
        with np.load(BytesIO(data), allow_pickle=False) as file:
            return SelectedRows(file["rows"], file["task_types"].tolist(), str(file["summary"]))
    except (ValueError, KeyError, EOFError, RuntimeError, BadZipFile) as error:
        _log.warning("%s is damaged (%s): scanning the rows again", path, error)
    return None


class RowFile:
    """A file that is read row by row, and of which single rows are read again later.

    Args:
        path: the file, which must stay as it is now.
        name: for messages.
        form: `jsonl`, `parquet` or `arrow`.
        columns: the columns that are read; JSON lines are read whole.
    """

    def __init__(self, path: Path, name: str, form: Form, columns: Sequence[str]) -> None:
        self.path, self._name, self._form, self._columns = path, name, form, tuple(columns)
        known = path.stat()
        self._known = (known.st_size, known.st_mtime_ns)

    def rows(self) -> Iterator[Row]:
        """Yield all rows, in order.

        Raises:
            UserError: the file is not of its form, or a row is malformed or too large.
        """
        with self._open() as stream:
            if self._form == "jsonl":
                yield from readers.json_rows(stream, self._name, MAX_ROW_BYTES)
            else:
                yield from readers.table_rows(self._groups(stream, 0), self._name, MAX_ROW_BYTES)

    def row(self, number: int, at: int) -> Row:
        """Return the row of this number and position; several threads may read at once."""
        if self._form == "jsonl":
            with self._open() as stream:
                stream.seek(at)
                line = stream.readline(MAX_ROW_BYTES + 1)
            place = f"{self._name}:{number}"
            return Row(number, place, readers.json_object(line, place), at)
        group, within = at >> readers.GROUP_BITS, at % (1 << readers.GROUP_BITS)
        data = self._group(group).slice(within, 1)
        ((row,),) = readers.bounded_rows(
            data, most=MAX_ROW_BYTES, place=self._name, first=number - 1
        )
        return Row(number, f"{self._name}, row {number}", row, at)

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        """Open the file to read.

        Raises:
            UserError: it is gone or was replaced, or is not of its form.
        """
        try:
            stream = self.path.open("rb")
        except OSError as error:
            raise _changed(
                self.path, f"cannot be read any more: {error.strerror or error}"
            ) from error
        with stream, readers.readable(self._name, _FORMS[self._form]):
            now = os.fstat(stream.fileno())
            if (now.st_size, now.st_mtime_ns) != self._known:
                raise _changed(self.path, "changed while the run reads it")
            yield stream

    def _groups(
        self, stream: BinaryIO, start: int
    ) -> Iterator[tuple[int, pa.Table | pa.RecordBatch]]:
        if self._form == "parquet":
            return readers.parquet_groups(stream, self._columns, self._name, start=start)
        return readers.arrow_batches(self.path, self._columns, self._name, start=start)

    def _group(self, number: int) -> pa.Table | pa.RecordBatch:
        """Return a row group or batch; those that were read last are cached."""
        key = (self.path, self._known, self._columns, number)
        with self._open() as stream, _cache_lock:
            if key not in _cached:
                _, _cached[key] = next(self._groups(stream, number))
                while len(_cached) > 1 and sum(t.nbytes for t in _cached.values()) > CACHED_BYTES:
                    _cached.popitem(last=False)
            _cached.move_to_end(key)
            return _cached[key]


def _changed(path: Path, reason: str) -> UserError:
    return UserError(
        reason, place=str(path), remedy="put the file back as it was, then start again"
    )


class FileSource:
    """Problems from rows of files; implements `ProblemSource`.

    The kinds `jsonl`, `gsm8k` and `livecodebench` read JSON Lines, with one object a line, and
    `parquet` reads Parquet: one file, a folder of them, or a pattern. `hf_dataset` reads a folder
    that `Dataset.save_to_disk` wrote, with pyarrow alone, out of mapped memory: Arrow IPC streams
    with `state.json`, which lists them. A `DatasetDict`, of which `params.split` names a part, is a
    folder of such folders with `dataset_dict.json`.

    The files are scanned once, each row strictly checked, and the selected rows are cached on disk.
    After that a problem is read when it is requested.

    Raises:
        UserError: a missing file, a malformed row, two equal ids, or no row is selected.
    """

    def __init__(self, source: Source, seed: int, keep: Keep) -> None:
        if source.uri is None:
            raise UserError(
                f"kind {source.kind} needs uri",
                place=f"data.sources.{source.name}",
                remedy="name the file or the folder with the rows",
            )
        self._name = source.name
        self._reader: RowReader = _READERS.get(source.kind, ProblemRows)(source)
        form = _FORM_OF_KIND.get(source.kind, "jsonl")
        self._files = [
            RowFile(path, name, form, self._reader.columns)
            for name, path in row_files(source, source_files(source)).items()
        ]
        self._kept = _selected(source, self._files, self._reader, keep)
        self.task_types = frozenset(self._kept.task_types)

    @property
    def summary(self) -> str:
        """Numbers of rows selected, and left out for each reason."""
        return self._kept.summary

    def __len__(self) -> int:
        return len(self._kept.rows)

    def problem(self, index: int) -> Problem:
        """Return the problem of the selected row `index`."""
        over_all, file, number, at = self._kept.rows[index].tolist()
        row = self._files[file].row(number, at)
        return self._reader.problem(row.columns, over_all, row.place)

    def placed(self) -> Iterator[tuple[str, Problem]]:
        """Yield each selected row's file and number, and its problem; reads the files in order."""
        selected = {*self._kept.rows[:, 0].tolist()}
        for index, (_, row) in enumerate(_all_rows(self._name, self._files)):
            if index in selected:
                yield row.place, self._reader.problem(row.columns, index, row.place)
