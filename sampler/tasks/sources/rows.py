"""Strict parser from a row of a file to a problem; errors name the file and the row."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

from runspec.core.errors import UserError
from runspec.core.spec.schema import Source
from verify.plugins import Problem

BATCH_ROWS = 256
"""Rows in memory while files are scanned."""
COLUMNS = ("problem_id", "task_type", "prompt", "verification_info")
MAX_ID_CHARS = 512
_REMEDY = "fix the row, or name the columns under params (docs/tasks.md)"


class Table(Protocol):
    """Rows of several files in order; several threads may read at once.

    It stores where the rows are, never all rows.
    """

    def __len__(self) -> int: ...

    def row(self, number: int) -> Mapping[str, Any]:
        """Return the row at 0 <= number < len(self)."""

    def batches(self) -> Iterator[list[Mapping[str, Any]]]:
        """Yield all rows in order, up to `BATCH_ROWS` at a time."""

    def place(self, number: int) -> str:
        """Return file and row, for messages; rows count from 1."""


class RowReader(ABC):
    """Parser of rows.

    Args:
        source: names the solve rate's column.
        columns: the file's columns that are read beside it.
        params: names of the params that the kind of source has.

    Raises:
        UserError: the source has an unknown param.
    """

    def __init__(self, source: Source, columns: Iterable[str], params: Collection[str]) -> None:
        if unknown := source.params.keys() - set(params):
            raise UserError(
                f"unknown: {', '.join(sorted(unknown))}",
                place=f"data.sources.{source.name}.params",
                remedy=f"of kind {source.kind} they are {', '.join(sorted(params)) or 'none'}",
            )
        self._task_types = source.task_types
        self._rate = None if source.solve_rate is None else source.solve_rate.field
        self.columns = [*columns, *([self._rate] if self._rate is not None else ())]

    @abstractmethod
    def problem(self, row: Mapping[str, Any], number: int, place: str) -> Problem:
        """Return the problem of a row.

        Args:
            row: the columns of the row.
            number: of the row, from 0, over all files.
            place: file and row, for messages.

        Raises:
            UserError: a column is missing or malformed.
        """

    def rate(self, row: Mapping[str, Any], place: str) -> float | None:
        """Return the recorded solve rate, a share from 0 to 1; None if it is null or not requested.

        Raises:
            UserError: there is no such column, or its value is no share.
        """
        name = self._rate
        if name is None:
            return None
        if name not in row:
            raise UserError(
                f"no column {name!r} with a solve rate",
                place=place,
                remedy="`python -m sampler solve-rates` measures and writes one",
            )
        value = row[name]
        if value is None:
            return None
        number = type(value) in (int, float) and math.isfinite(value)
        if not number or not 0 <= value <= 1:
            _malformed(f"{name} is {_shown(value, row, name)}, not a share from 0 to 1", place)
        return float(value)


class ProblemRows(RowReader):
    """Rows of `problem_id`, `task_type`, `prompt` and `verification_info` (an object, or JSON text
    of one), under these names or those of `source.params`."""

    def __init__(self, source: Source) -> None:
        self._names = {column: str(source.params.get(column, column)) for column in COLUMNS}
        known = {*COLUMNS, *({"split"} if source.kind == "hf_dataset" else ())}
        super().__init__(source, self._names.values(), known)

    def problem(self, row: Mapping[str, Any], number: int, place: str) -> Problem:
        """See `RowReader`."""
        problem_id = self._text(row, "problem_id", place)
        if len(problem_id) > MAX_ID_CHARS:
            _malformed(f"a problem_id of {len(problem_id)} characters", place)
        task_type = self._text(row, "task_type", place)
        return Problem(
            problem_id=problem_id,
            task_type=self._task_types.get(task_type, task_type),
            prompt=self._text(row, "prompt", place),
            verification=verification(row, self._names["verification_info"], place),
        )

    def _text(self, row: Mapping[str, Any], column: str, place: str) -> str:
        return text(row, self._names[column], place)


def text(row: Mapping[str, Any], name: str, place: str) -> str:
    """Return a column that is text and not empty.

    Raises:
        UserError: it is missing or has another type.
    """
    value = row.get(name)
    if not isinstance(value, str) or not value:
        _malformed(f"{name} is {_shown(value, row, name)}, not a text", place)
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a pair of surrogates
        _malformed(f"{name} is no text: {error.reason} at {error.start}", place)
    return value


def verification(row: Mapping[str, Any], name: str, place: str) -> dict[str, Any]:
    """Return a column that is an object, or JSON text of one.

    Raises:
        UserError: it is missing or has another type.
    """
    value = row.get(name)
    try:
        if isinstance(value, str):
            value = json.loads(value, parse_constant=_refuse_constant)
        else:
            json.dumps(value, allow_nan=False)  # graders receive it as JSON
    except (ValueError, TypeError, RecursionError) as error:
        _malformed(f"{name} is no JSON: {error}", place)
    if not isinstance(value, dict):
        _malformed(f"{name} is {_shown(value, row, name)}, not an object", place)
    return value


def _shown(value: Any, row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return f"missing (columns: {', '.join(map(str, row))[:200]})"
    return repr(value)[:80]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _malformed(what: str, place: str) -> NoReturn:
    raise UserError(what, place=place, remedy=_REMEDY)
