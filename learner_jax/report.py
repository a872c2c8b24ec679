"""Reports each step: lines of metrics.jsonl and samples.jsonl, and a line of log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from learner_jax.agreement import alarm_limit
from learner_jax.batch import Batch
from learner_jax.learner_run import LearnerRun
from learner_jax.metrics import JsonLines
from learner_jax.training import StepResult
from runspec.core.models.config import ModelConfig
from runspec.core.models.flops import useful_flops
from runspec.core.models.hardware import jax_device
from runspec.core.run_files import METRICS_FILE, SAMPLES_FILE, initial_model
from runspec.core.spec.schema import Lora

SAMPLES_A_STEP = 2


def metrics_line(
    batch: Batch,
    result: StepResult,
    meter: Meter,
    *,
    train_s: float,
    waits: Mapping[str, float],
    logprob_alarm: float,
) -> dict:
    """One step's line, without `step`.

    Rewards and lengths are the manifest's, over all graded groups, the filtered ones included;
    loss, KL and clipping are of what was trained. `mfu` is over all of `train_s`, `mfu_update` over
    the updates alone; both are null on a device whose peak is not known.

    Args:
        batch: what was trained.
        result: what came of it.
        meter: for MFU.
        train_s: the learner's seconds of work since the step before.
        waits: its seconds of waiting since then, by whom it waited for.
        logprob_alarm: `agreement.alarm_limit`.
    """
    stats, wait_s = batch.manifest.stats, sum(waits.values())
    lags = [batch.manifest.step - rollout.version for rollout in batch.rollouts]
    lengths = [len(r.prompt_tokens) + len(r.output_tokens) for r in batch.rollouts]
    found = batch.agreement  # None where nothing was recomputed
    from_stats = {
        ours: stats.get(theirs)
        for ours, theirs in {
            "task_reward": "task_reward_mean",
            "reward": "reward_mean",
            "length_mean": "length_mean",
            "length_error": "length_error_mean",
            "by_target": "by_target",
            "logprob_diff": "logprob_diff_mean",
            "accepted_rollouts": "accepted_rollouts",
            "rejected_rollouts": "rejected_rollouts",
            "rejected_submissions": "rejected_submissions",
            "filtered_groups": "filtered_groups",
            "sampler_busy_fraction": "sampler_busy_fraction",
            "sampler_tokens_per_s": "accepted_tokens_per_s",
            "verdict_latency_p50": "verdict_latency_p50",
            "verdict_latency_p99": "verdict_latency_p99",
            "manifest_latency_p50": "manifest_latency_p50",
            "manifest_latency_p99": "manifest_latency_p99",
        }.items()
    }
    return {
        "version": batch.manifest.step + 1,
        "time": time.time(),
        **from_stats,
        "sampler_logprob_diff_mean": None if found is None else found.mean,
        "sampler_logprob_diff_max": None if found is None else found.largest,
        "sampler_logprob_limit": logprob_alarm,
        # What is not a number agrees with nothing.
        "sampler_logprob_alarm": found is not None and not found.mean <= logprob_alarm,
        **result.numbers,
        "lag_mean": float(np.mean(lags)),
        "lag_max": max(lags),
        "lag_histogram": {str(lag): count for lag, count in sorted(Counter(lags).items())},
        "trained_rollouts": len(lags),
        "tokens": result.tokens,
        "tokens_per_s": result.tokens / train_s,
        "padding_share": 1.0 - result.tokens / result.positions,
        "mfu": meter.mfu(lengths, train_s),
        "mfu_update": meter.mfu(lengths, result.update_s),
        "train_s": train_s,
        "score_s": result.score_s,
        "update_s": result.update_s,
        "wait_s": wait_s,
        "waited_for": max(waits, key=lambda whom: waits[whom]) if wait_s > 0 else None,
        "waits": dict(waits),
        "learner_busy_fraction": train_s / (train_s + wait_s),
        "complete": batch.manifest.complete,
    }


def sample_lines(batch: Batch, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Lines of `SAMPLES_A_STEP` rollouts for people to read, of groups spread over the step."""

    def text(tokens: np.ndarray) -> str:
        return tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    count = min(SAMPLES_A_STEP, len(batch.groups))
    chosen = [batch.groups[i * len(batch.groups) // count][0] for i in range(count)]
    return [
        {
            "version": rollout.version,
            "problem_id": rollout.problem_id,
            "prompt": text(rollout.prompt_tokens),
            "output": text(rollout.output_tokens),
            "target": rollout.target,
            "length": len(rollout.output_tokens),
            "task_reward": rollout.task_reward,
            "reward": rollout.reward,
        }
        for rollout in chosen
    ]


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by the name that JAX gives it; None for one not listed."""
    device = jax_device(device_kind)
    return None if device is None else device.peak_flops


@dataclass(frozen=True)
class Meter:
    """Computes MFU: the share of useful FLOPs in what the devices could do in the time.

        MFU = useful / (seconds x devices x peak FLOP/s of one device)

    with the useful FLOPs of `runspec.core.models.flops`. PaLM's MFU (arXiv 2204.02311, appendix B)
    is the same but for counting the masked half of attention.
    """

    config: ModelConfig
    lora: Lora | None
    devices: int
    peak: float | None
    """FLOP/s of one device; None where it is not known, as for CPUs."""

    def mfu(self, lengths: Sequence[int], seconds: float) -> float | None:
        """MFU of training samples of these lengths in that time; None without a peak."""
        if self.peak is None:
            return None
        return useful_flops(self.config, lengths, self.lora) / (seconds * self.devices * self.peak)


class Records:
    """Writes the lines of one run, in process 0. A step trained again adds only to the log.

    Args:
        run: the run, whose log gets a line for each step.
    """

    def __init__(self, run: LearnerRun) -> None:
        self._metrics = JsonLines(run.folder / METRICS_FILE)
        self._samples = JsonLines(run.folder / SAMPLES_FILE)
        tokenizer = initial_model(run.folder) / "tokenizer.json"
        self._tokenizer, self._log = Tokenizer.from_file(str(tokenizer)), run.log
        self._rows = run.rows
        peak = peak_flops(run.mesh.devices.flat[0].device_kind)
        self._meter = Meter(run.config, run.spec.learner.lora, run.mesh.size, peak)
        self._alarm = alarm_limit(run.spec)
        self._replay_difference: float | None = None

    def write(
        self,
        batch: Batch,
        result: StepResult,
        *,
        train_s: float,
        waits: Mapping[str, float],
        replay_difference: float | None,
        islands: dict[str, Any] | None = None,
    ) -> None:
        """Writes a step's lines.

        Args:
            batch: what was trained.
            result: what came of it.
            train_s, waits: see `report.metrics_line`.
            replay_difference: `VersionWriter.difference`; the next new line has the largest of a
                replay.
            islands: the commit that an island followed; None for a run with one learner.
        """
        step = batch.manifest.step
        if replay_difference is not None:
            self._replay_difference = max(self._replay_difference or 0.0, replay_difference)
        line = metrics_line(
            batch, result, self._meter, train_s=train_s, waits=waits, logprob_alarm=self._alarm
        )
        line["replay_difference"] = self._replay_difference
        line["islands"] = islands
        if self._metrics.append(step, [line]):
            self._replay_difference = None
        self._rows.trained({"step": step, **line})
        self._samples.append(step, sample_lines(batch, self._tokenizer))
        if line["sampler_logprob_alarm"]:
            self._log.warning(
                "step %d: the samplers' log-probs are %.2e from ours on average, %.2e at most "
                "(verify.logprob_alarm %.2e): look at their engine, its dtype and its version",
                *(step, line["sampler_logprob_diff_mean"], line["sampler_logprob_diff_max"]),
                line["sampler_logprob_limit"],
            )
        for skipped in result.skipped:
            self._log.warning("step %d: %s", step, skipped)
        self._log.info(
            "step %d: task reward %s, loss %.4f, gradient %.3f, lag %.2f, trained %.2f s, "
            "waited %.2f s",
            *(step, line["task_reward"], line["loss"], line["grad_norm"], line["lag_mean"]),
            *(train_s, sum(waits.values())),
        )
