"""What a person reads of a run: metrics.jsonl, samples.jsonl and a line of log a step."""

from __future__ import annotations

from collections.abc import Mapping

from learner_jax.agreement import alarm_limit
from learner_jax.batch import Batch
from learner_jax.flops import Meter, peak_flops
from learner_jax.learner_run import LearnerRun
from learner_jax.metrics import JsonLines
from learner_jax.report import SampleWriter, metrics_line
from learner_jax.training import StepResult
from runspec.core.run_files import initial_model


class Records:
    """Process 0's, of one run. A step trained again is logged, and its lines stay as they were.

    Args:
        run: its log is told of each step.
    """

    def __init__(self, run: LearnerRun) -> None:
        self._metrics, self._samples = (
            JsonLines(run.folder / f"{name}.jsonl") for name in ("metrics", "samples")
        )
        self._decode, self._log = SampleWriter(initial_model(run.folder)), run.log
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
    ) -> None:
        """Writes a step's lines.

        Args:
            batch: what was trained.
            result: what came of it.
            train_s, waits: see `report.metrics_line`.
            replay_difference: `VersionWriter.difference`; the next new line has the largest of a
                replay.
        """
        step = batch.manifest.step
        if replay_difference is not None:
            self._replay_difference = max(self._replay_difference or 0.0, replay_difference)
        line = metrics_line(
            batch, result, self._meter, train_s=train_s, waits=waits, logprob_alarm=self._alarm
        )
        line["replay_difference"] = self._replay_difference
        if self._metrics.append(step, [line]):
            self._replay_difference = None
        self._samples.append(step, self._decode.lines(batch))
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
