"""Adapter to verifiers: `vf-eval`, and the traces that it writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import AliasPath, BaseModel, Field

from runspec.core.entry_points import KEY_VARIABLE, Asked, Measured
from runspec.core.rows import lines
from sampler.evaluation.ask import mean_of
from sampler.evaluation.tools import parse_shape, result_files

MAX_LINE_BYTES = 64 * 1024 * 1024
_RUN = "run"
_ENVIRONMENT = "--env."


class _Reward(BaseModel):
    score: float
    weight: float = 1.0


class _Trace(BaseModel):
    rewards: dict[str, _Reward | None] = {}
    metrics: dict[str, float | None] = {}


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
        if not any(word.startswith(_ENVIRONMENT) for word in asked.more):
            words += ["--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess"]
        return [*words, *asked.more]

    def measured(self, out: Path) -> dict[str, Measured]:
        """See `EvaluationTool`."""
        values: dict[str, dict[str, dict[int, list[float]]]] = {}
        counts: dict[str, set[int]] = defaultdict(set)
        faults: dict[str, int] = defaultdict(int)
        for episode in _episodes(out):
            name, row = episode.task, episode.row
            counts[name].add(row)
            graded = [trace for trace in episode.traces if any(trace.rewards.values())]
            if not episode.ok or not graded:
                faults[name] += 1
                continue
            of_task = values.setdefault(name, defaultdict(lambda: defaultdict(list)))
            for trace in graded:
                for figure, value in _values(trace).items():
                    of_task[figure][row].append(value)
        return {
            name: Measured(
                {
                    figure: _mean(list(rows.values()))
                    for figure, rows in values.get(name, {}).items()
                },
                len(rows),
                faults[name],
            )
            for name, rows in counts.items()
        }


def _episodes(out: Path) -> Iterator[_Episode]:
    [path] = result_files(out, f"{_RUN}/traces.jsonl")
    with path.open("rb") as stream:
        for number, _, line in lines(stream, str(path), MAX_LINE_BYTES):
            yield parse_shape(_Episode, line, f"{path}:{number}")


def _values(trace: _Trace) -> dict[str, float]:
    """Return reward and metrics of an answer: `mean` is the weighted sum of its rewards."""
    rewards = {name: each for name, each in trace.rewards.items() if each is not None}
    found = {"mean": sum(each.score * each.weight for each in rewards.values())}
    found |= {name: each.score for name, each in rewards.items()} if len(rewards) > 1 else {}
    return found | {name: value for name, value in trace.metrics.items() if value is not None}


def _mean(rows: list[list[float]]) -> tuple[float, float | None, float | None]:
    figure = mean_of(np.array([sum(row) / len(row) for row in rows]))
    return figure.value, figure.low, figure.high
