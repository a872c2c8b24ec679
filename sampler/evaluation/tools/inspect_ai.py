"""Adapter to inspect-ai: `inspect eval`, and its log."""

from __future__ import annotations

import math
from pathlib import Path

from pydantic import BaseModel

from runspec.core.errors import UserError
from runspec.core.evaluation_tools import Asked, Figures, Measured
from sampler.evaluation.tools import read_shape, result_files, with_error

ERROR = "stderr"
_OF_MEANS = ("accuracy", "mean")
"""Metrics whose standard error a scorer's `stderr` is."""


class _Metric(BaseModel):
    value: float


class _Score(BaseModel):
    name: str
    scored_samples: int = 0
    unscored_samples: int = 0
    metrics: dict[str, _Metric]


class _Results(BaseModel):
    total_samples: int
    completed_samples: int
    scores: list[_Score]


class _Task(BaseModel):
    task: str


class _Failure(BaseModel):
    message: str


class _Log(BaseModel):
    status: str
    eval: _Task
    results: _Results | None = None
    error: _Failure | None = None


class InspectAi:
    """`--with inspect-ai`: `--task` is FILE@TASK, or a task of an installed package."""

    def command(self, asked: Asked) -> list[str]:
        """See `EvaluationTool`."""
        words = [str(asked.python.parent / "inspect"), "eval", asked.task]
        # `openai-api/NAME/MODEL` takes its key from NAME_API_KEY.
        words += ["--model", f"openai-api/runspec/{asked.model}", "--model-base-url", asked.url]
        words += ["--log-dir", str(asked.out), "--log-format", "json", "--display", "plain"]
        return [*words, *asked.more]

    def measured(self, out: Path) -> dict[str, Measured]:
        """See `EvaluationTool`."""
        found = {}
        for path in result_files(out, "*.json"):
            log = read_shape(_Log, path)
            if log.status != "success" or log.results is None:
                why = f": {log.error.message[:500]}" if log.error else ""
                raise UserError(f"{log.eval.task} ended as {log.status}{why}", place=str(path))
            found[log.eval.task] = _measured(log.results)
        return found


def _measured(results: _Results) -> Measured:
    figures: dict[str, tuple[float, float | None, float | None]] = {}
    for score in results.scores:
        figures |= _figures(score)
    first = results.scores[0] if results.scores else None
    count = results.total_samples
    faults = results.total_samples - results.completed_samples
    if first is not None:  # several answers to a problem are one scored sample
        count = first.scored_samples + first.unscored_samples
        faults += first.unscored_samples
    return Measured(figures, count, faults)


def _figures(score: _Score) -> Figures:
    error = score.metrics.get(ERROR)
    return {
        f"{score.name}.{name}": with_error(
            metric.value, error.value if error is not None and name in _OF_MEANS else None
        )
        for name, metric in score.metrics.items()
        if name != ERROR and math.isfinite(metric.value)
    }
