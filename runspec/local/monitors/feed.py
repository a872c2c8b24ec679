"""What a run has to show, read from its directory as it appears."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runspec.core.hashing import digest_bytes
from runspec.core.run_files import METRICS_FILE, SAMPLES_FILE, evaluation_files
from runspec.core.spec.schema import RunSpec
from runspec.local.metrics import JsonLines, Row
from runspec.local.monitors.interface import Entry
from verify.formats.evaluation import Evaluated, read_evaluations

SAMPLED_EVERY = 10
"""Steps between those whose rollouts are sent."""
_MOST_SCALARS = 2000
_MOST_LETTERS = 4000
"""Of a prompt or an output."""
_AXES = ("step", "version", "time")
"""Keys of metrics.jsonl that are no figures."""


@dataclass(frozen=True)
class Item:
    """A thing to send, before it has a number."""

    key: str
    """Names it in the run."""
    digest: str
    """Of its contents."""
    axis: Literal["step", "version"]
    at: int
    time: float
    scalars: Mapping[str, float]
    rollouts: tuple[Mapping[str, Any], ...] = ()

    def numbered(self, number: int) -> Entry:
        return Entry(number, self.axis, self.at, self.time, self.scalars, self.rollouts)


class Feed:
    """Reads the rows, samples and evaluations of a run, each once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._metrics = JsonLines(run_dir / METRICS_FILE)
        self._samples = JsonLines(run_dir / SAMPLES_FILE)
        self._evaluations: set[Path] = set()
        self._open_step: list[dict[str, Any]] = []
        """Samples of the newest step, of which more may come."""
        self._times: dict[int, float] = {}
        """Times of the steps whose samples are sent."""

    def look(self, *, last: bool) -> list[Item]:
        """Return what is new since the last look; the first look has everything.

        Args:
            last: nothing more will be written.

        Raises:
            UserError: an evaluation cannot be read.
        """
        rows = {row["step"]: row for row in self._metrics.new_rows() if _is_step(row)}
        items = [step_item(row) for row in rows.values()]
        self._times |= {item.at: item.time for item in items if item.at % SAMPLED_EVERY == 0}
        items += self._sampled(last=last)
        files = [f for f in evaluation_files(self._run_dir) if f not in self._evaluations]
        self._evaluations.update(files)
        return [*items, *map(evaluation_item, read_evaluations(files))]

    def _sampled(self, *, last: bool) -> Iterator[Item]:
        """Yield the samples of each step that is complete, because a later one has begun."""
        rows = [*self._open_step, *(row for row in self._samples.new_rows() if _is_step(row))]
        steps: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            steps.setdefault(row["step"], []).append(row)
        self._open_step = [] if last or not rows else steps.pop(rows[-1]["step"])
        for step, found in steps.items():
            if step % SAMPLED_EVERY == 0:
                yield samples_item(step, found, self._times.get(step, 0.0))


def last_keys(spec: RunSpec) -> set[str]:
    """Return the keys of what a run makes last: once these are there, nothing more comes."""
    evaluations = {_evaluation_key(e.name, spec.steps) for e in spec.evaluations if e.at_end}
    return {f"step:{spec.steps - 1}", *evaluations}


def step_item(row: Row) -> Item:
    """Return the figures of a row of metrics.jsonl: numbers and truth values, nested ones too."""
    named = {key: value for key, value in row.items() if key not in _AXES}
    time, digest = float(row.get("time") or 0.0), _digest(row)
    return Item(f"step:{row['step']}", digest, "step", row["step"], time, dict(_scalars(named)))


def samples_item(step: int, rows: list[dict[str, Any]], time: float) -> Item:
    """Return the sample rollouts of a step that was trained at a time; long texts are cut."""
    cut = tuple({key: _cut(value) for key, value in row.items() if key != "step"} for row in rows)
    return Item(f"samples:{step}", _digest(rows), "step", step, time, {}, cut)


def evaluation_item(result: Evaluated) -> Item:
    """Return the figures of an evaluation of a version, with the ends of their intervals."""
    name, scalars = f"evaluations/{result.evaluation}", dict[str, float]()
    for key, figure in sorted(result.figures.items()):
        ends = {"": figure.value, "/low": figure.low, "/high": figure.high}
        scalars |= {f"{name}/{key}{end}": v for end, v in ends.items() if v is not None}
    key, digest = _evaluation_key(result.evaluation, result.version), _digest(scalars)
    return Item(key, digest, "version", result.version, float(result.finished), scalars)


def _evaluation_key(name: str, version: int) -> str:
    return f"evaluation:{name}:{version}"


def _is_step(row: Row) -> bool:
    return type(row.get("step")) is int and row["step"] >= 0


def _scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for _, (key, value) in zip(range(_MOST_SCALARS), row.items(), strict=False):
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, bool | int | float):
            yield f"{prefix}{key}", float(value)


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MOST_LETTERS:
        return f"{value[:_MOST_LETTERS]} ... ({len(value)} characters)"
    return value if isinstance(value, str | int | float) else None


def _digest(value: Any) -> str:
    return digest_bytes(json.dumps(value, sort_keys=True).encode())[:16]
