"""Rows of LiveCodeBench: a programming problem with public and private tests.

The private tests of the published files are packed: base64 of zlib of a pickle of JSON text. The
pickle is never loaded. Its instructions are read as data, and only those of a single text are
accepted.
"""

from __future__ import annotations

import base64
import json
import pickletools
import zlib
from collections.abc import Mapping
from typing import Any

from runspec.core.schema import Source
from sampler.tasks.sources.jsonl import JsonlSource
from sampler.tasks.sources.rows import RowReader, malformed, text
from verify.plugins import Problem

TASK_TYPE = "code"
MAX_TESTS_BYTES = 256 * 1024 * 1024
"""Most bytes of a problem's private tests, unpacked."""
_COLUMNS = (
    *("question_id", "question_content", "starter_code", "metadata"),
    *("public_test_cases", "private_test_cases"),
)
_PROGRAM = "Write a Python program that reads the standard input and prints the answer."
_FUNCTION = "Complete this Python code:\n```python\n{starter}\n```"
_ONE_TEXT = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "STOP"})


class LiveCodeBenchRows(RowReader):
    """Rows of LiveCodeBench's columns; problem ids are its `question_id`."""

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
            info["fn_name"] = _function(row, place)
        return Problem(
            problem_id=text(row, "question_id", place),
            task_type=self._task_types.get(TASK_TYPE, TASK_TYPE),
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


def _function(row: Mapping[str, Any], place: str) -> str:
    metadata = row.get("metadata")
    try:
        found = json.loads(metadata) if isinstance(metadata, str) else metadata
    except (ValueError, RecursionError) as error:
        malformed(f"metadata is no JSON: {error}", place)
    name = found.get("func_name") if isinstance(found, dict) else None
    if not isinstance(name, str):
        malformed("metadata has no func_name, and the tests call a function", place)
    return name


class LiveCodeBenchSource(JsonlSource):
    """`kind: livecodebench`: the JSON Lines files of LiveCodeBench's code generation."""

    reader = LiveCodeBenchRows
