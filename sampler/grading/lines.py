"""Files of answers to grade: JSON Lines, read one portion at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from sampler.grading.answers import Answer
from sampler.tasks.prompts import answer_in
from verify.plugins import Problem

MAX_LINE_BYTES = 64 * 1024 * 1024
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 3600.0


@dataclass(frozen=True)
class Line:
    """One line of a file: an answer, or why it is none."""

    number: int
    """From 1, blank lines counted."""
    answer: Answer | None
    error: str = ""
    identity: Any = None
    """Its `id`."""
    timeout_s: float | None = None


class BadLine(Exception):
    """What is wrong with a line, naming the field."""


def read_lines(file: BinaryIO) -> Iterator[Line]:
    """The lines of a file; blank ones are left out, and no more than one is held."""
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES:
            while data and not data.endswith(b"\n"):
                data = file.readline(MAX_LINE_BYTES)
            yield Line(number, None, f"longer than {MAX_LINE_BYTES} bytes")
        elif data.strip():
            yield _line(number, data)


def answer_of(completion: str) -> str:
    """What is graded of a completion: its answer as in training, or all of it where no thinking
    ends in it."""
    answer = answer_in(completion)
    return completion.strip() if answer is None else answer


def _line(number: int, data: bytes) -> Line:
    identity = None
    try:
        row = _object(data, "the line")
        identity = row.get("id")
        problem = Problem(
            problem_id=f"line {number}",
            task_type=_text(row, "task_type"),
            prompt="",
            verification=_verification(row),
        )
        answer = Answer(problem, answer_of(_text(row, "completion")))
        return Line(number, answer, "", identity, _timeout(row))
    except BadLine as error:
        return Line(number, None, str(error), identity)


def _verification(row: dict[str, Any]) -> dict[str, Any]:
    value = row.get("verification_info")
    if isinstance(value, str):
        return _object(value.encode(errors="surrogatepass"), "verification_info")
    if not isinstance(value, dict):
        raise BadLine("verification_info: neither an object nor one as a JSON string")
    return value


def _timeout(row: dict[str, Any]) -> float | None:
    value = row.get("timeout")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadLine("timeout: not a number of seconds")
    if not MIN_TIMEOUT_S <= value <= MAX_TIMEOUT_S:
        raise BadLine(f"timeout: {value} is not in {MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g} s")
    return float(value)


def _text(row: dict[str, Any], field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str):
        raise BadLine(f"{field}: {'missing' if value is None else 'not a text'}")
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"{what}: no JSON: {str(error)[:100]}") from error
    if not isinstance(value, dict):
        raise BadLine(f"{what}: no JSON object")
    return value
