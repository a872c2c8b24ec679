"""Adapters to inspect-ai, lm-eval and verifiers: their command lines, and the JSON that they write.

Each implements `runspec.core.entry_points.EvaluationTool`. Results are bounded. Their shapes are
schemas, and what a schema does not name is ignored.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import AliasPath, BaseModel, Field, ValidationError

from runspec.core.entry_points import KEY_VARIABLE, Asked, Measured
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.rows import lines
from sampler.evaluation.ask import mean_of

MAX_BYTES = 512 * 1024 * 1024
"""Largest result that is read."""
MAX_LINE_BYTES = 64 * 1024 * 1024
CONCURRENT = 32
LIKELIHOODS = "local-completions"
"""lm-eval's model for tasks that compare likelihoods; `local-chat-completions` only answers."""
_HALF_WIDTH = 1.96
"""Of a normal distribution's 95 % interval, in standard errors."""
_ERROR = "stderr"
_OF_MEANS = ("accuracy", "mean")
"""Metrics whose standard error a scorer's `stderr` is in inspect-ai."""
_RUN = "run"
Shape = TypeVar("Shape", bound=BaseModel)
Figures = dict[str, tuple[float, float | None, float | None]]
"""Value, and the ends of its interval where they are known, by name."""


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
        for path in _result_files(out, "*.json"):
            log = _read(_Log, read_bounded(path, MAX_BYTES), str(path))
            if log.status != "success" or log.total < 0:
                why = f": {log.error[:500]}" if log.error else ""
                raise UserError(f"{log.task} ended as {log.status}{why}", place=str(path))
            figures: Figures = {}
            for score in log.scores:
                error = score.metrics.pop(_ERROR, None)
                for name, metric in score.metrics.items():
                    if math.isfinite(metric.value):
                        own = error.value if error is not None and name in _OF_MEANS else None
                        figures[f"{score.name}.{name}"] = _with_error(metric.value, own)
            count, faults = log.total, log.total - log.completed
            if log.scores:  # several answers to a problem are one scored sample
                first = log.scores[0]
                count = first.scored_samples + first.unscored_samples
                faults += first.unscored_samples
            found[log.task] = Measured(figures, count, faults)
        return found


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
        """See `EvaluationTool`. A figure is an entry `acc,none` beside `acc_stderr,none`."""
        found = {}
        for path in _result_files(out, "*/results_*.json"):
            written = _read(_Results, read_bounded(path, MAX_BYTES), str(path))
            for task, values in written.results.items():
                numbers = {
                    key: float(value)
                    for key, value in values.items()
                    if "," in key and isinstance(value, int | float) and math.isfinite(value)
                }
                figures: Figures = {}
                for key, value in numbers.items():
                    metric, _, treated = key.partition(",")
                    if not metric.endswith(f"_{_ERROR}"):
                        name = metric if treated == "none" else f"{metric}.{treated}"
                        error = numbers.get(f"{metric}_{_ERROR},{treated}")
                        figures[name] = _with_error(value, error)
                count = written.counts.get(task)
                found[task] = Measured(figures, count.effective if count else 0, 0)
        return found


class _Reward(BaseModel):
    score: float
    weight: float = 1.0


class _Trace(BaseModel):
    rewards: dict[str, _Reward | None] = {}
    metrics: dict[str, float | None] = {}

    def figures(self) -> dict[str, float]:
        """Return reward and metrics of an answer: `mean` is the weighted sum of its rewards."""
        rewards = {name: each for name, each in self.rewards.items() if each is not None}
        found = {"mean": sum(each.score * each.weight for each in rewards.values())}
        found |= {name: each.score for name, each in rewards.items()} if len(rewards) > 1 else {}
        return found | {name: value for name, value in self.metrics.items() if value is not None}


class _Episode(BaseModel):
    task: str = Field(validation_alias=AliasPath("env", "id"))
    row: int = Field(validation_alias=AliasPath("task", "data", "idx"))
    ok: bool
    traces: list[_Trace]


class Verifiers:
    """`--with verifiers`: `--task` is a taskset that its environment can import.

    Without an option `--env....` of the user the model is asked in plain chat, on this machine.
    """

    def command(self, asked: Asked) -> list[str]:
        """See `EvaluationTool`."""
        words = [str(asked.python.parent / "vf-eval"), asked.task, "--model", asked.model]
        words += ["--client.base-url", asked.url, "--client.api-key-var", KEY_VARIABLE]
        # Its defaults upload the run to its makers, and ask in a sandbox of theirs.
        words += ["--no-push", "--no-rich", "--output-dir", str(asked.out), "--run.dir", _RUN]
        if not any(word.startswith("--env.") for word in asked.more):
            words += ["--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess"]
        return [*words, *asked.more]

    def measured(self, out: Path) -> dict[str, Measured]:
        """See `EvaluationTool`."""
        values: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        counts: dict[str, set[int]] = defaultdict(set)
        faults: dict[str, int] = defaultdict(int)
        [path] = _result_files(out, f"{_RUN}/traces.jsonl")
        with path.open("rb") as stream:
            for number, _, line in lines(stream, str(path), MAX_LINE_BYTES):
                episode = _read(_Episode, line, f"{path}:{number}")
                counts[episode.task].add(episode.row)
                graded = [trace for trace in episode.traces if any(trace.rewards.values())]
                if not episode.ok or not graded:
                    faults[episode.task] += 1
                    continue
                for trace in graded:
                    for name, value in trace.figures().items():
                        values[episode.task][name][episode.row].append(value)
        found = {}
        for task, rows in counts.items():
            figures: Figures = {}
            for name, of_rows in values[task].items():
                mean = mean_of(np.array([sum(row) / len(row) for row in of_rows.values()]))
                figures[name] = mean.value, mean.low, mean.high
            found[task] = Measured(figures, len(rows), faults[task])
        return found


def _result_files(out: Path, pattern: str) -> list[Path]:
    """Return the files that a tool wrote.

    Raises:
        UserError: there is none.
    """
    if not (found := sorted(out.glob(pattern))):
        raise UserError(
            "the tool wrote no result",
            place=str(out / pattern),
            remedy="the lines above say why",
        )
    return found


def _read(shape: type[Shape], data: bytes, place: str) -> Shape:
    """Return JSON as an object of a shape.

    Raises:
        UserError: it has another shape.
    """
    try:
        return shape.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            place=place,
            remedy="use the tool's version in requirements/",
        ) from error


def _with_error(value: float, error: float | None) -> tuple[float, float | None, float | None]:
    """Return a value with the interval of its standard error, where that is known."""
    if error is None or not math.isfinite(error):
        return value, None, None
    half = _HALF_WIDTH * error
    return value, value - half, value + half
