"""The newest row of metrics.jsonl for Prometheus, and totals since the process began."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from runspec.core.metrics import counter, gauge

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
