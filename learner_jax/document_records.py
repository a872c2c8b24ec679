"""Reports each supervised step: a line of metrics.jsonl and a line of log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from learner_jax.corpus.packed import Corpus
from learner_jax.document_batch import DocumentBatch
from learner_jax.learner_run import LearnerRun
from learner_jax.metrics import JsonLines
from learner_jax.optimizer import learning_rate
from learner_jax.packing import TokenBatch
from learner_jax.report import Meter, peak_flops
from learner_jax.training import StepResult
from runspec.core.run_files import METRICS_FILE


def document_lengths(batch: TokenBatch) -> list[int]:
    """The lengths of the segments of packed rows, numpy int32 [R, tokens], in tokens."""
    segments, tokens = batch.segment_ids, batch.segment_ids.shape[1]
    numbered = segments + np.arange(len(segments))[:, None] * (tokens + 1)
    counts = np.bincount(numbered[segments > 0])
    return counts[counts > 0].tolist()


class DocumentRecords:
    """Writes the lines of one run, in process 0. A step trained again adds only to the log.

    Args:
        run: the run, whose log gets a line for each step.
        corpus: its documents.
    """

    def __init__(self, run: LearnerRun, corpus: Corpus) -> None:
        self._metrics = JsonLines(run.folder / METRICS_FILE)
        self._run, self._corpus, self._log = run, corpus, run.log
        peak = peak_flops(run.mesh.devices.flat[0].device_kind)
        self._meter = Meter(run.config, run.spec.learner.lora, run.mesh.size, peak)
        updates = run.spec.steps * run.spec.algorithm.updates_per_step
        self._rate = learning_rate(run.spec.optimizer, updates)
        self._replay_difference: float | None = None

    def write(
        self,
        batch: DocumentBatch,
        result: StepResult,
        *,
        train_s: float,
        waits: Mapping[str, float],
        replay_difference: float | None,
        held_out_nll: float | None,
        islands: dict[str, Any] | None = None,
    ) -> None:
        """Writes a step's lines.

        Args:
            batch: what was trained.
            result: what came of it.
            train_s: the learner's seconds of work since the step before.
            waits: its seconds of waiting since then, by what it waited for.
            replay_difference: `VersionWriter.difference`; the next new line has the largest of a
                replay.
            held_out_nll: sum of -log p over the held-out tokens, in nats; None where it was not
                measured.
            islands: the commit that an island followed; None for a run with one learner.
        """
        step = batch.manifest.step
        if replay_difference is not None:
            self._replay_difference = max(self._replay_difference or 0.0, replay_difference)
        line = self._line(batch, result, train_s, waits, held_out_nll)
        line["islands"] = islands
        if self._metrics.append(step, [line]):
            self._replay_difference = None
        self._run.rows.trained({"step": step, **line})
        for skipped in result.skipped:
            self._log.warning("step %d: %s", step, skipped)
        held_out = line["held_out_bits_per_byte"]
        self._log.info(
            "step %d: loss %.4f, %.3f bits a byte%s, gradient %.3f, %.0f tokens/s, trained %.2f s, "
            "waited %.2f s",
            *(step, line["loss"], line["bits_per_byte"]),
            "" if held_out is None else f" (held out {held_out:.3f})",
            *(line["grad_norm"], line["tokens_per_s"], train_s, line["wait_s"]),
        )

    def _line(
        self,
        batch: DocumentBatch,
        result: StepResult,
        train_s: float,
        waits: Mapping[str, float],
        held_out_nll: float | None,
    ) -> dict[str, Any]:
        """One step's line, without `step`; docs/learner_jax.md explains the keys."""
        manifest, corpus, wait_s = batch.manifest, self._corpus, sum(waits.values())
        lengths = document_lengths(batch.rows.batch)
        algorithm = self._run.spec.algorithm
        bits = result.numbers["nll"] / math.log(2) / corpus.bytes_per_token
        held_out_bits, held_out_mean = None, None
        if held_out_nll is not None:
            held_out_bits = held_out_nll / math.log(2) / corpus.held_out_bytes
            held_out_mean = held_out_nll / corpus.held_out_tokens
        return {
            "version": manifest.step + 1,
            "time": time.time(),
            **result.numbers,
            "bits_per_byte": bits,
            "held_out_nll": held_out_mean,
            "held_out_bits_per_byte": held_out_bits,
            "learning_rate": float(
                self._rate((manifest.step + 1) * algorithm.updates_per_step - 1)
            ),
            "epoch": manifest.rows.last / corpus.rows,
            "first_row": manifest.rows.first,
            "last_row": manifest.rows.last,
            "tokens": result.tokens,
            "trained_tokens": int((batch.rows.weights > 0).sum()),
            "tokens_per_s": result.tokens / train_s,
            "padding_share": 1.0 - result.tokens / result.positions,
            "mfu": self._meter.mfu(lengths, train_s),
            "mfu_update": self._meter.mfu(lengths, result.update_s),
            "train_s": train_s,
            "update_s": result.update_s,
            "wait_s": wait_s,
            "waited_for": max(waits, key=lambda whom: waits[whom]) if wait_s > 0 else None,
            "waits": dict(waits),
            "learner_busy_fraction": train_s / (train_s + wait_s),
            "replay_difference": self._replay_difference,
        }
