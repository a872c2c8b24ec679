"""Strict parsers from a row of a file to a problem; errors name the file and the row."""

from __future__ import annotations

import base64
import json
import math
import pickletools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

from runspec.core.errors import UserError
from runspec.core.schema import Source
from verify.plugins import Problem

COLUMNS = ("problem_id", "task_type", "prompt", "verification_info")
MAX_ID_CHARS = 512
_MARK = "####"
MAX_TESTS_BYTES = 256 * 1024 * 1024
"""Most bytes of a problem's private tests, unpacked."""
_COLUMNS = (
    *("question_id", "question_content", "starter_code", "metadata"),
    *("public_test_cases", "private_test_cases"),
)
_PROGRAM = "Write a Python program that reads the standard input and prints the answer."
_FUNCTION = "Complete this Python code:\n```python\n{starter}\n```"
_ONE_TEXT = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "STOP"})
_REMEDY = "fix the row, or name the columns under params (docs/tasks.md)"


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
        self._source, self._task_types = source.name, source.task_types
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
            malformed(f"{name} is {_shown(value, row, name)}, not a share from 0 to 1", place)
        return float(value)


class ProblemRows(RowReader):
    """Rows of `problem_id`, `task_type`, `prompt` and `verification_info` (an object, or JSON text
    of one), under these names or those of `source.params`.

    Where `params.verification_info` is an object of columns, the rows are of another data set: the
    columns' values are the verification, and rows are numbered if `params` names no `problem_id`.
    `params.type` is the task type of all rows, `params.instruction` goes before each prompt.
    """

    def __init__(self, source: Source) -> None:
        params = source.params
        known = {*COLUMNS, "type", "instruction"}
        known |= {"split"} if source.kind == "hf_dataset" else set()
        self._names = {column: str(params.get(column, column)) for column in COLUMNS}
        parts = params.get("verification_info")
        self._parts = parts if isinstance(parts, dict) else None
        self._type = None if "type" not in params else str(params["type"])
        self._instruction = f"{params['instruction']}\n" if "instruction" in params else ""
        if self._parts is not None:
            del self._names["verification_info"]
            if "problem_id" not in params:
                del self._names["problem_id"]
        if self._type is not None:
            del self._names["task_type"]
        columns = dict.fromkeys([*self._names.values(), *(self._parts or {}).values()])
        super().__init__(source, columns, known)

    def problem(self, row: Mapping[str, Any], number: int, place: str) -> Problem:
        """See `RowReader`."""
        problem_id = f"{self._source}-{number}"
        if "problem_id" in self._names:
            problem_id = self._text(row, "problem_id", place)
        if len(problem_id) > MAX_ID_CHARS:
            malformed(f"a problem_id of {len(problem_id)} characters", place)
        task_type = self._type or self._text(row, "task_type", place)
        info, name = row, self._names.get("verification_info", "verification_info")
        if self._parts is not None:
            for column in self._parts.values():
                if row.get(column) is None:
                    malformed(f"{column} is {_shown(row.get(column), row, column)}", place)
            info = {name: {key: row[column] for key, column in self._parts.items()}}
        return Problem(
            problem_id=problem_id,
            task_type=self._task_types.get(task_type, task_type),
            prompt=self._instruction + self._text(row, "prompt", place),
            verification=verification(info, name, place),
        )

    def _text(self, row: Mapping[str, Any], column: str, place: str) -> str:
        return text(row, self._names[column], place)


class Gsm8kRows(RowReader):
    """Rows of GSM8K's columns; problem n of source `s` is called s-n, from 0."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, ["question", "answer"], params=())

    def problem(self, row: Mapping[str, Any], number: int, place: str) -> Problem:
        """See `RowReader`."""
        solution, mark, answer = text(row, "answer", place).rpartition(_MARK)
        if not mark or not answer.strip():
            raise UserError(
                f"answer has no number behind {_MARK}: {solution[-60:]!r}",
                place=place,
                remedy="end the answer with `#### 42`",
            )
        return Problem(
            problem_id=f"{self._source}-{number}",
            task_type=self._task_types.get("math", "math"),
            prompt=text(row, "question", place),
            verification={"ground_truth": answer.strip().replace(",", "")},
        )


class LiveCodeBenchRows(RowReader):
    """Rows of LiveCodeBench: a programming problem with public and private tests.

    Problem ids are its `question_id`.

    The private tests of the published files are packed: base64 of zlib of a pickle of JSON text.
    The pickle is never loaded. Its instructions are read as data, and only those of a single text
    are accepted.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source, _COLUMNS, params=())

    def problem(self, row: Mapping[str, Any], number: int, place: str) -> Problem:
        """See `RowReader`."""
        starter = row.get("starter_code") or ""
        task = _FUNCTION.replace("{starter}", str(starter)) if starter else _PROGRAM
        public = _parsed(text(row, "public_test_cases", place), "public_test_cases", place)
        private = text(row, "private_test_cases", place)
        tests = [*public, *_parsed(_unpacked(private, place), "private_test_cases", place)]
        info: dict[str, Any] = {
            "inputs": [_field(test, "input", place) for test in tests],
            "outputs": [_field(test, "output", place) for test in tests],
        }
        if any(test.get("testtype") == "functional" for test in tests):
            metadata = row.get("metadata")
            try:
                found = json.loads(metadata) if isinstance(metadata, str) else metadata
            except (ValueError, RecursionError) as error:
                malformed(f"metadata is no JSON: {error}", place)
            name = found.get("func_name") if isinstance(found, dict) else None
            if not isinstance(name, str):
                malformed("metadata has no func_name, and the tests call a function", place)
            info["fn_name"] = name
        return Problem(
            problem_id=text(row, "question_id", place),
            task_type=self._task_types.get("code", "code"),
            prompt=f"{text(row, 'question_content', place)}\n\n{task}",
            verification=info,
        )


def _parsed(tests: str, column: str, place: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(tests)
    except (ValueError, RecursionError) as error:
        malformed(f"{column} is no JSON: {error}", place)
    if not isinstance(found, list) or not all(isinstance(test, dict) for test in found):
        malformed(f"{column} is no list of tests", place)
    return found


def _unpacked(tests: str, place: str) -> str:
    """Return private tests as JSON text; they may be JSON already."""
    if tests.startswith("["):
        return tests
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(tests, validate=True), MAX_TESTS_BYTES)
        if not stream.eof:
            malformed(f"private_test_cases are cut off, or over {MAX_TESTS_BYTES} bytes", place)
        texts = [arg for opcode, arg, _ in pickletools.genops(data) if opcode.name not in _ONE_TEXT]
    except (ValueError, zlib.error) as error:
        malformed(f"private_test_cases cannot be unpacked: {error}", place)
    if len(texts) != 1 or not isinstance(texts[0], str):
        malformed("private_test_cases hold more than a text", place)
    return texts[0]


def _field(test: Mapping[str, Any], name: str, place: str) -> str:
    value = test.get(name)
    if not isinstance(value, str):
        malformed(f"a test's {name} is {value!r:.80}, not a text", place)
    return value


def text(row: Mapping[str, Any], name: str, place: str) -> str:
    """Return a column that is text and not empty.

    Raises:
        UserError: it is missing or has another type.
    """
    value = row.get(name)
    if not isinstance(value, str) or not value:
        malformed(f"{name} is {_shown(value, row, name)}, not a text", place)
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a pair of surrogates
        malformed(f"{name} is no text: {error.reason} at {error.start}", place)
    return value


def verification(row: Mapping[str, Any], name: str, place: str) -> dict[str, Any]:
    """Return a column that is an object, or JSON text of one.

    Raises:
        UserError: it is missing or has another type.
    """
    value = row.get(name)

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        if isinstance(value, str):
            value = json.loads(value, parse_constant=refuse)
        else:
            json.dumps(value, allow_nan=False)  # graders receive it as JSON
    except (ValueError, TypeError, RecursionError) as error:
        malformed(f"{name} is no JSON: {error}", place)
    if not isinstance(value, dict):
        malformed(f"{name} is {_shown(value, row, name)}, not an object", place)
    return value


def _shown(value: Any, row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return f"missing (columns: {', '.join(map(str, row))[:200]})"
    return repr(value)[:80]


def malformed(what: str, place: str) -> NoReturn:
    """Refuse a row.

    Raises:
        UserError: always.
    """
    raise UserError(what, place=place, remedy=_REMEDY)
