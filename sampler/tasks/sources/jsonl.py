"""Rows of JSON Lines files: one object a line."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from runspec.core.errors import UserError
from sampler.tasks.sources.file_source import MAX_ROW_BYTES, FileSource, Stamp
from sampler.tasks.sources.rows import BATCH_ROWS

_BLOCK_BYTES = 16 * 1024 * 1024
_MAX_BLANK_BYTES = 32
"""Largest line that is looked at for being blank; a longer one of white space is an error."""


class JsonLines:
    """A `Table` of JSON Lines files; it stores the offset of each line, 8 bytes a row.

    Raises:
        UserError: a line of more than 64 MiB.
    """

    def __init__(self, files: Mapping[str, Path], columns: list[str]) -> None:
        self._names = list(files)
        self._stamps = [Stamp(path) for path in files.values()]
        found = [_line_ends(path, name) for name, path in files.items()]
        self._ends, self._lines = [ends for ends, _ in found], [lines for _, lines in found]
        self._starts = [0, *accumulate(len(ends) for ends in self._ends)]

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> Mapping[str, Any]:
        """See `Table`."""
        file, line = self._find(number)
        ends = self._ends[file]
        begin = int(ends[line - 1]) if line else 0
        with self._stamps[file].open() as stream:
            stream.seek(begin)
            return self._parse(stream.read(int(ends[line]) - begin), number)

    def batches(self) -> Iterator[list[Mapping[str, Any]]]:
        """See `Table`."""
        for file, ends in enumerate(self._ends):
            with self._stamps[file].open() as stream:
                begin, first = 0, self._starts[file]
                for at in range(0, len(ends), BATCH_ROWS):
                    batch = []
                    for line, end in enumerate(ends[at : at + BATCH_ROWS].tolist(), start=at):
                        batch.append(self._parse(stream.read(end - begin), first + line))
                        begin = end
                    yield batch

    def place(self, number: int) -> str:
        """See `Table`."""
        file, line = self._find(number)
        return f"{self._names[file]}:{self._lines[file](line) + 1}"

    def _find(self, number: int) -> tuple[int, int]:
        file = bisect_right(self._starts, number) - 1
        return file, number - self._starts[file]

    def _parse(self, line: bytes, number: int) -> Mapping[str, Any]:
        try:
            row = json.loads(line)
            if isinstance(row, dict):
                return row
            reason = "no JSON object" if line.strip() else "an empty line"
        except (ValueError, RecursionError) as error:
            reason = f"no JSON: {error}" if line.strip() else "an empty line"
        raise UserError(reason, place=self.place(number), remedy="write one object a line")


def _line_ends(path: Path, name: str) -> tuple[np.ndarray, Callable[[int], int]]:
    """Return i64 [rows], the offset after each row, and a function from row to line, both from 0.

    The last line may lack its line break. A blank line is no row: it counts to the one after it.
    """
    found, size = [np.zeros(0, dtype=np.int64)], 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            breaks = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
            found.append(breaks + (size + 1))
            size += len(block)
    ends = np.concatenate(found)
    if size == 0:
        return ends, int
    if not len(ends) or ends[-1] != size:
        ends = np.append(ends, size)
    longest = int(np.diff(ends, prepend=0).max())
    if longest > MAX_ROW_BYTES:
        line = int(np.diff(ends, prepend=0).argmax()) + 1
        raise UserError(
            f"{longest} bytes, more than the {MAX_ROW_BYTES} that a row may have",
            place=f"{name}:{line}",
            remedy="leave the row out",
        )
    ends = ends.astype(np.int64)
    blank = _blank_lines(path, ends)
    if not blank:
        return ends, int
    lines = np.delete(np.arange(len(ends)), blank)
    return np.delete(ends, blank), lambda row: int(lines[row])


def _blank_lines(path: Path, ends: np.ndarray) -> list[int]:
    """Return the numbers, from 0, of lines without a character but white space."""
    short = np.flatnonzero(np.diff(ends, prepend=0) <= _MAX_BLANK_BYTES)
    found = []
    with path.open("rb") as stream:
        for line in short.tolist():
            stream.seek(ends[line - 1] if line else 0)
            if not stream.read(int(ends[line]) - stream.tell()).strip():
                found.append(line)
    return found


class JsonlSource(FileSource):
    """`kind: jsonl`: one file, a folder of them, or a pattern."""

    table = JsonLines
