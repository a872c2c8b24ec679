"""Adapter to inspect-ai: `inspect eval`, and its log."""

from __future__ import annotations

import math
from pathlib import Path

from pydantic import AliasPath, BaseModel, Field

from runspec.core.entry_points import Asked, Figures, Measured
from runspec.core.errors import UserError
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


class _Log(BaseModel):
    status: str
    task: str = Field(validation_alias=AliasPath("eval", "task"))
    error: str = Field("", validation_alias=AliasPath("error", "message"))
    total: int = Field(-1, validation_alias=AliasPath("results", "total_samples"))
    """Negative where there are no results."""
    completed: int = Field(0, validation_alias=AliasPath("results", "completed_samples"))
    scores: list[_Score] = Field([], validation_alias=AliasPath("results", "scores"))


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
            if log.status != "success" or log.total < 0:
                why = f": {log.error[:500]}" if log.error else ""
                raise UserError(f"{log.task} ended as {log.status}{why}", place=str(path))
            figures = {k: v for score in log.scores for k, v in _figures(score).items()}
            count, faults = log.total, log.total - log.completed
            if log.scores:  # several answers to a problem are one scored sample
                first = log.scores[0]
                count = first.scored_samples + first.unscored_samples
                faults += first.unscored_samples
            found[log.task] = Measured(figures, count, faults)
        return found


def _figures(score: _Score) -> Figures:
    error = score.metrics.get(ERROR)
    return {
        f"{score.name}.{name}": with_error(
            metric.value, error.value if error is not None and name in _OF_MEANS else None
        )
        for name, metric in score.metrics.items()
        if name != ERROR and math.isfinite(metric.value)
    }
