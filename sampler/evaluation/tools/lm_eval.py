"""Adapter to lm-eval: `lm-eval run` over its models for OpenAI-compatible servers."""

from __future__ import annotations

import math
from pathlib import Path

from pydantic import BaseModel, Field

from runspec.core.entry_points import Asked, Measured
from sampler.evaluation.tools import read_shape, result_files, with_error

LIKELIHOODS = "local-completions"
"""Its model for tasks that compare likelihoods; `local-chat-completions` only answers."""
CONCURRENT = 32
_ERROR = "_stderr"


class _Count(BaseModel):
    effective: int


class _Results(BaseModel):
    results: dict[str, dict[str, object]]
    counts: dict[str, _Count] = Field({}, alias="n-samples")


class LmEval:
    """`--with lm-eval`: `--task` names its tasks.

    Tasks that compare likelihoods need `-- --model local-completions`.
    """

    def command(self, asked: Asked) -> list[str]:
        """See `EvaluationTool`."""
        words = [str(asked.python.parent / "lm-eval"), "run", "--tasks", asked.task]
        words += ["--output_path", str(asked.out)]
        model = [f"model={asked.model}", f"num_concurrent={CONCURRENT}"]
        model += [f"max_length={asked.context}"]
        if LIKELIHOODS in asked.more:
            model += [f"base_url={asked.url}/completions", f"tokenizer={asked.tokenizer}"]
        else:
            words += ["--model", "local-chat-completions", "--apply_chat_template"]
            model += [f"base_url={asked.url}/chat/completions"]
        return [*words, "--model_args", ",".join(model), *asked.more]

    def measured(self, out: Path) -> dict[str, Measured]:
        """See `EvaluationTool`."""
        found = {}
        for path in result_files(out, "*/results_*.json"):
            said = read_shape(_Results, path)
            for task, values in said.results.items():
                count = said.counts.get(task)
                found[task] = Measured(_figures(values), count.effective if count else 0, 0)
        return found


def _figures(values: dict[str, object]) -> dict[str, tuple[float, float | None, float | None]]:
    """Return the figures of a task's entries, such as `acc,none` beside `acc_stderr,none`."""
    numbers = {
        key: float(value)
        for key, value in values.items()
        if "," in key and isinstance(value, int | float) and math.isfinite(value)
    }
    figures = {}
    for key, value in numbers.items():
        metric, _, treated = key.partition(",")
        if not metric.endswith(_ERROR):
            name = metric if treated == "none" else f"{metric}.{treated}"
            figures[name] = with_error(value, numbers.get(f"{metric}{_ERROR},{treated}"))
    return figures
