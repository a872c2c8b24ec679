"""metrics.jsonl and samples.jsonl: whole lines or none, and each step's lines once.

Prometheus is served the newest row, and totals since the process began.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from runspec.core.errors import UserError
from runspec.core.http_server import counter, gauge

_BLOCK = 64 * 1024


class JsonLines:
    """An append-only file of JSON lines, each with the `step` that it is of.

    A line that a killed process left torn is dropped on opening. Steps come in order, so that the
    last whole line says which are written already: a replayed step writes nothing twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        _drop_torn_line(path)
        self.last_step = _last_step(path)
        """The newest step that has lines; -1 for none."""

    def append(self, step: int, lines: list[dict[str, Any]]) -> bool:
        """Writes the lines of a step in one write; False when the step has its lines already."""
        if step <= self.last_step:
            return False
        self.write(step, lines)
        return True

    def write(self, step: int, lines: list[dict[str, Any]]) -> None:
        """Writes lines of a step in one write, whether it has some already or not."""
        data = "".join(json.dumps({"step": step, **line}) + "\n" for line in lines).encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                written = file.write(data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes written")
        except OSError as error:
            raise UserError(
                f"cannot write: {error.strerror or error}",
                place=str(self._path),
                remedy="free disk space, then start again",
            ) from error
        self.last_step = step


class Clock:
    """Splits the learner's time into training and waiting, honestly: each second is one or other.

    Time before it is made, that of start-up and compilation, is neither.

    Args:
        now: seconds, never going back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._at = now()
        self._train_s = 0.0
        self._waits: dict[str, float] = {}

    def trained(self) -> None:
        """Counts the time since the last call as training."""
        self._train_s += self._elapsed()

    def waited(self, whom: str) -> None:
        """Counts the time since the last call as waiting for `whom`."""
        self._waits[whom] = self._waits.get(whom, 0.0) + self._elapsed()

    def take(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last `take`: of training, and of waiting by whom it was for."""
        result = self._train_s, self._waits
        self._train_s, self._waits = 0.0, {}
        return result

    def _elapsed(self) -> float:
        now = self._now()
        elapsed, self._at = now - self._at, now
        return elapsed


def _drop_torn_line(path: Path) -> None:
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        keep = _after_last_newline(file, end)
        if keep != end:
            file.truncate(keep)


def _after_last_newline(file: Any, end: int) -> int:
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _last_step(path: Path) -> int:
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        if end == 0:
            return -1
        start = _after_last_newline(file, end - 1)
        file.seek(start)
        line = file.read()
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"its last line is not one of ours: {line[:80]!r}",
            place=str(path),
            remedy="remove that line, then start again",
        ) from error


GAUGES: Mapping[str, str] = {
    "step": "step",
    "version": "version",
    "time": "step_timestamp_seconds",
    "loss": "loss",
    "grad_norm": "gradient_norm",
    "skipped_updates": "skipped_updates",
    "learning_rate": "learning_rate",
    "reward": "reward",
    "task_reward": "task_reward",
    "length_mean": "length_tokens",
    "length_error": "length_error_tokens",
    "entropy": "entropy_nats",
    "kl": "kl_nats",
    "policy_drift": "policy_drift_nats",
    "ratio_max": "probability_ratio_max",
    "lag_mean": "lag_steps",
    "lag_max": "lag_max_steps",
    "filtered_groups": "filtered_groups",
    "sampler_logprob_diff_mean": "logprob_difference_nats",
    "sampler_logprob_limit": "logprob_limit_nats",
    "sampler_logprob_alarm": "logprob_alarm",
    "bits_per_byte": "bits_per_byte",
    "held_out_bits_per_byte": "held_out_bits_per_byte",
    "epoch": "epoch",
    "tokens_per_s": "tokens_per_busy_second",
    "mfu": "mfu_ratio",
    "learner_busy_fraction": "busy_ratio",
    "padding_share": "padding_ratio",
}
"""Key of a row: the figure's name after `runspec_learner_`. The keys are explained in
docs/learner_jax.md and docs/documents.md."""
CLIPPED = {"low": "clip_fraction_low", "high": "clip_fraction_high", "delta": "clip_fraction_delta"}
"""Label of `clipped_ratio`: key of a row."""


class Rows(Collector):
    """Takes each row in one thread, and is read by another."""

    def __init__(self) -> None:
        self._row: Mapping[str, Any] = {}
        self._steps = self._tokens = 0
        self._busy_s = 0.0
        self._waits: dict[str, float] = {}

    def trained(self, row: Mapping[str, Any]) -> None:
        """Take the row of a step that was trained."""
        self._row = row
        self._steps += 1
        self._tokens += row["tokens"]
        self._busy_s += row["train_s"]
        waits: Mapping[str, float] = row["waits"]
        self._waits |= {whom: self._waits.get(whom, 0.0) + each for whom, each in waits.items()}

    def collect(self) -> Iterator[Metric]:
        """Yield the figures; what the newest row lacks has no value."""
        row = self._row
        for key, name in GAUGES.items():
            text = f"`{key}` of the newest row of metrics.jsonl."
            yield gauge(f"learner_{name}", text, row.get(key))
        clipped = {bound: row[key] for bound, key in CLIPPED.items() if row.get(key) is not None}
        text = "Share of the newest step's tokens that the clip's bound acts on."
        yield gauge("learner_clipped_ratio", text, clipped, "bound")
        yield counter("learner_steps", "Steps trained.", self._steps)
        yield counter("learner_tokens", "Tokens trained, with prompts.", self._tokens)
        yield counter("learner_busy_seconds", "Seconds of work.", self._busy_s)
        text = "Seconds of waiting, by whom or what it was for."
        yield counter("learner_wait_seconds", text, dict(self._waits), "waited_for")
