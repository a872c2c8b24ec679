"""Rows of GSM8K: `question`, and `answer` with the final number behind `####`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runspec.core.errors import UserError
from runspec.core.schema import Source
from sampler.tasks.sources.jsonl import JsonlSource
from sampler.tasks.sources.rows import RowReader, text
from verify.plugins import Problem

TASK_TYPE = "math"
_MARK = "####"


class Gsm8kRows(RowReader):
    """Rows of GSM8K's columns; problem n of source `s` is called s-n, from 0."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, ["question", "answer"], params=())
        self._source = source.name

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
            task_type=self._task_types.get(TASK_TYPE, TASK_TYPE),
            prompt=text(row, "question", place),
            verification={"ground_truth": answer.strip().replace(",", "")},
        )


class Gsm8kSource(JsonlSource):
    """`kind: gsm8k`: GSM8K's JSON Lines files."""

    reader = Gsm8kRows
