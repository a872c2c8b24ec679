"""What each kind of run reads, trains and reports in a step. The loop (`train`) is the same.

A step is reported by lines of metrics.jsonl and samples.jsonl, and a line of log.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from learner_jax.batch import Batch, BatchReader, alarm_limit
from learner_jax.corpus.packed import Corpus, CorpusRows
from learner_jax.distributed import LearnerRun
from learner_jax.feed import (
    BatchFeed,
    DocumentBatch,
    DocumentReader,
    ManifestReader,
    Reader,
    decode,
    encode,
)
from learner_jax.full_states import Start
from learner_jax.islands.mirror import MirroredReader
from learner_jax.metrics import JsonLines
from learner_jax.optimizer import learning_rate, rise_of
from learner_jax.packing import TokenBatch
from learner_jax.step import Programs, TrainState
from learner_jax.training import StepResult, held_out_loss, supervised_step, train_step
from runspec.core.models import jax_device
from runspec.core.models.parameters import useful_flops
from runspec.core.run_files import METRICS_FILE, SAMPLES_FILE, initial_model


class Recipe(ABC):
    """One kind of run; every method is collective over the learner's processes."""

    programs: Programs
    """Those of the step that is trained next."""
    feed: BatchFeed[Any]
    """Gives every process the batch of a step."""
    reader: ManifestReader[Any] | None
    """Reads the run's manifests, in process 0."""
    records: Records | None
    """Writes the lines of a step, in process 0."""
    corpus: str | None = None
    """Digest of the documents; None for runs that train on rollouts."""
    held_out_nll: float | None = None
    """Sum of -log p over the held-out tokens, in nats; None where the version was not measured."""

    @abstractmethod
    def train(
        self, state: TrainState, batch: Any, start: Start, published: Any | None
    ) -> StepResult:
        """Train a batch. Uses up the state."""

    @abstractmethod
    def weight(self, batch: Any) -> float:
        """Return the loss denominator of a batch, by which an island counts among the others."""

    def measure(self, version: int, weights: Callable[[], Any]) -> None:
        """Measure a version where that is due; `weights` gives its bits as they are published."""
        self.held_out_nll = None


def recipe_of(run: LearnerRun, programs: Programs, stop: threading.Event) -> Recipe:
    """Open what the run trains on.

    Raises:
        UserError: the run's roles or its documents cannot be read.
    """
    kind = Rollouts if run.spec.supervised is None else Documents
    return kind(run, programs, stop)


def _source(run: LearnerRun, reader: Reader | None) -> Reader | None:
    """A reader that waits for the run's files wherever they come from."""
    return reader if reader is None or run.trunk else MirroredReader(run, reader)


class Rollouts(Recipe):
    """Runs of kind `grpo`: graded rollouts, which the coordinator's batch manifests name."""

    def __init__(self, run: LearnerRun, programs: Programs, stop: threading.Event) -> None:
        self._run, self.programs = run, programs
        first, key = run.peers.first, run.root_public_key
        self.reader = BatchReader(run.folder, run.spec, key(), run.island) if first else None
        source = _source(run, self.reader)
        self.feed = BatchFeed(source, run.peers, stop, run.log, Batch)
        self.records = RolloutRecords(run) if first else None

    def train(
        self, state: TrainState, batch: Batch, start: Start, published: Any | None
    ) -> StepResult:
        return train_step(
            self._run.own,
            self._run.mesh,
            self.programs,
            state,
            published=published,
            reference=start.reference,
            batch=batch,
            base=start.base,
        )

    def weight(self, batch: Batch) -> float:
        if self._run.spec.grpo.loss_normalizer == "token":
            return float(sum(rollout.length for rollout in batch.rollouts))
        return float(len(batch.rollouts))


class Documents(Recipe):
    """Runs of kind `pretrain` and `sft`: rows of documents, which the manifests number."""

    def __init__(self, run: LearnerRun, programs: Programs, stop: threading.Event) -> None:
        assert run.spec.supervised is not None, "a run that trains on documents"
        self._run, self.programs, self._every = run, programs, run.spec.supervised.held_out.every
        peers = run.peers
        opened: list[DocumentReader] = []

        def open_documents() -> bytes:
            opened.append(DocumentReader(run, run.root_public_key()))
            held_out = opened[0].corpus.held_out()
            return b"" if held_out is None else encode(held_out)

        # The other processes are given what process 0 reads: they need no file of the data.
        held_out = peers.from_first(open_documents)
        # Every island would find the same: the trunk's measures.
        self._held_out = decode(held_out, CorpusRows) if held_out and run.trunk else None
        self.reader = opened[0] if opened else None
        self.corpus = peers.json_from_first(lambda: opened[0].corpus.digest)
        source = _source(run, self.reader)
        self.feed = BatchFeed(source, peers, stop, run.log, DocumentBatch)
        self.records = DocumentRecords(run, self.reader.corpus) if self.reader else None

    def train(
        self, state: TrainState, batch: DocumentBatch, start: Start, published: Any | None
    ) -> StepResult:
        run = self._run
        return supervised_step(run.own, run.mesh, self.programs, state, batch.rows, base=start.base)

    def weight(self, batch: DocumentBatch) -> float:
        return float(batch.rows.weights.sum(dtype=np.float64))

    def measure(self, version: int, weights: Callable[[], Any]) -> None:
        run, due = self._run, version % self._every == 0 or version == self._run.spec.steps
        self.held_out_nll = None
        if due and self._held_out is not None:
            self.held_out_nll = held_out_loss(
                run.own, run.mesh, self.programs, weights(), self._held_out
            )


SAMPLES_A_STEP = 2
_SAME = (
    *("by_target", "accepted_rollouts", "rejected_rollouts", "rejected_submissions"),
    *("filtered_groups", "sampler_busy_fraction", "length_mean"),
    *("verdict_latency_p50", "verdict_latency_p99"),
    *("manifest_latency_p50", "manifest_latency_p99"),
)
FROM_STATS = {
    "task_reward": "task_reward_mean",
    "reward": "reward_mean",
    "length_error": "length_error_mean",
    "logprob_diff": "logprob_diff_mean",
    "sampler_tokens_per_s": "accepted_tokens_per_s",
    **{name: name for name in _SAME},
}
"""Key of a line: name of the figure in the manifest's `stats`."""


def work_line(
    result: StepResult,
    useful: float,
    peak: float | None,
    train_s: float,
    waits: Mapping[str, float],
) -> dict[str, Any]:
    """What the line of a step says of any run: numbers, speed, and where the time went.

    `mfu` is the share of useful FLOPs in what the devices could do over all of `train_s`,
    `mfu_update` over the updates alone:

        MFU = useful / (seconds x peak FLOP/s of all devices)

    PaLM's MFU (arXiv 2204.02311, appendix B) is the same but for counting the masked half of
    attention.

    Args:
        result: what came of the step.
        useful: FLOPs (`runspec.core.models.parameters.useful_flops`).
        peak: FLOP/s of all devices; None where it is not known, as for CPUs. Both are null then.
        train_s: seconds of work since the step before.
        waits: seconds of waiting since then, by whom or what it was for.
    """
    wait_s = sum(waits.values())
    return {
        "time": time.time(),
        **result.numbers,
        "tokens": result.tokens,
        "tokens_per_s": result.tokens / train_s,
        "padding_share": result.padding_share,
        "mfu": None if peak is None else useful / (train_s * peak),
        "mfu_update": None if peak is None else useful / (result.update_s * peak),
        "train_s": train_s,
        "update_s": result.update_s,
        "wait_s": wait_s,
        "waited_for": max(waits, key=lambda whom: waits[whom]) if wait_s > 0 else None,
        "waits": dict(waits),
        "learner_busy_fraction": train_s / (train_s + wait_s),
    }


def rollouts_line(batch: Batch, score_s: float, logprob_alarm: float) -> dict[str, Any]:
    """What the line of a step says of its rollouts.

    Rewards and lengths are the manifest's, over all graded groups, the filtered ones included.

    Args:
        batch: what was trained.
        score_s: seconds of packing and scoring.
        logprob_alarm: `batch.alarm_limit`.
    """
    stats = batch.manifest.stats
    lags = [batch.manifest.step - rollout.version for rollout in batch.rollouts]
    found = batch.agreement  # None where nothing was recomputed
    return {
        **{ours: stats.get(theirs) for ours, theirs in FROM_STATS.items()},
        "sampler_logprob_diff_mean": None if found is None else found.mean,
        "sampler_logprob_diff_max": None if found is None else found.largest,
        "sampler_logprob_limit": logprob_alarm,
        # What is not a number agrees with nothing.
        "sampler_logprob_alarm": found is not None and not found.mean <= logprob_alarm,
        "lag_mean": float(np.mean(lags)),
        "lag_max": max(lags),
        "lag_histogram": {str(lag): count for lag, count in sorted(Counter(lags).items())},
        "trained_rollouts": len(lags),
        "score_s": score_s,
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
            "length": rollout.length,
            "task_reward": rollout.task_reward,
            "reward": rollout.reward,
        }
        for rollout in chosen
    ]


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by the name that JAX gives it; None for one not listed."""
    device = jax_device(device_kind)
    return None if device is None else device.peak_flops


class Records(ABC):
    """Writes the lines of one run, in process 0. A step trained again adds only to the log.

    Args:
        run: the run, whose log gets a line for each step.
    """

    def __init__(self, run: LearnerRun) -> None:
        self._run, self._metrics = run, JsonLines(run.folder / METRICS_FILE)
        peak = peak_flops(run.mesh.devices.flat[0].device_kind)
        self._peak = None if peak is None else peak * run.mesh.size
        self._replay_difference: float | None = None

    def write(
        self,
        batch: Any,
        result: StepResult,
        train_s: float,
        waits: Mapping[str, float],
        *,
        replay_difference: float | None,
        islands: dict[str, Any] | None,
        held_out_nll: float | None,
    ) -> None:
        """Writes a step's lines.

        Args:
            batch: what was trained.
            result: what came of it.
            train_s, waits: see `work_line`.
            replay_difference: `VersionWriter.difference`; the next new line has the largest of a
                replay.
            islands: the commit that an island followed; None for a run with one learner.
            held_out_nll: sum of -log p over the held-out tokens, in nats; None where it was not
                measured.
        """
        step, log = batch.manifest.step, self._run.log
        if replay_difference is not None:
            self._replay_difference = max(self._replay_difference or 0.0, replay_difference)
        lengths, own = self._describe(batch, result, held_out_nll)
        useful = useful_flops(self._run.config, lengths, self._run.spec.learner.lora)
        line = {
            "version": step + 1,
            **own,
            **work_line(result, useful, self._peak, train_s, waits),
            "replay_difference": self._replay_difference,
            "islands": islands,
        }
        if self._metrics.append(step, [line]):
            self._replay_difference = None
        self._run.rows.trained({"step": step, **line})
        for skipped in result.skipped:
            log.warning("step %d: %s", step, skipped)
        log.info(
            "step %d: %s, trained %.2f s, waited %.2f s",
            *(step, self._summary(line), train_s, line["wait_s"]),
        )

    @abstractmethod
    def _describe(
        self, batch: Any, result: StepResult, held_out_nll: float | None
    ) -> tuple[list[int], dict[str, Any]]:
        """Return the lengths of what was trained, in tokens, and the line's own figures."""

    @abstractmethod
    def _summary(self, line: Mapping[str, Any]) -> str:
        """Return what the log says of a step's line."""


class RolloutRecords(Records):
    """The lines of a run that trains on rollouts, with samples of them."""

    def __init__(self, run: LearnerRun) -> None:
        super().__init__(run)
        self._samples = JsonLines(run.folder / SAMPLES_FILE)
        tokenizer = initial_model(run.folder) / "tokenizer.json"
        self._tokenizer, self._alarm = Tokenizer.from_file(str(tokenizer)), alarm_limit(run.spec)

    def _describe(
        self, batch: Batch, result: StepResult, held_out_nll: float | None
    ) -> tuple[list[int], dict[str, Any]]:
        step, line = batch.manifest.step, rollouts_line(batch, result.score_s, self._alarm)
        self._samples.append(step, sample_lines(batch, self._tokenizer))
        if line["sampler_logprob_alarm"]:
            self._run.log.warning(
                "step %d: the samplers' log-probs are %.2e from ours on average, %.2e at most "
                "(verify.logprob_alarm %.2e): look at their engine, its dtype and its version",
                *(step, line["sampler_logprob_diff_mean"], line["sampler_logprob_diff_max"]),
                line["sampler_logprob_limit"],
            )
        return [len(r.prompt_tokens) + len(r.output_tokens) for r in batch.rollouts], line

    def _summary(self, line: Mapping[str, Any]) -> str:
        learned = f"task reward {line['task_reward']}, loss {line['loss']:.4f}"
        return f"{learned}, gradient {line['grad_norm']:.3f}, lag {line['lag_mean']:.2f}"


class DocumentRecords(Records):
    """The lines of a run that trains on documents; docs/documents.md explains the keys.

    Args:
        run: the run.
        corpus: its documents.
    """

    def __init__(self, run: LearnerRun, corpus: Corpus) -> None:
        super().__init__(run)
        self._corpus, self._spec = corpus, run.spec

    def _describe(
        self, batch: DocumentBatch, result: StepResult, held_out_nll: float | None
    ) -> tuple[list[int], dict[str, Any]]:
        corpus, rows, held_out = self._corpus, batch.manifest.rows, held_out_nll is not None
        nll = held_out_nll or 0.0
        return document_lengths(batch.rows.batch), {
            "bits_per_byte": result.numbers["nll"] / math.log(2) / corpus.totals.bytes_per_token,
            "held_out_nll": nll / corpus.kept.trained_tokens if held_out else None,
            "held_out_bits_per_byte": nll / math.log(2) / corpus.kept.text_bytes
            if held_out
            else None,
            "learning_rate": self._learning_rate(batch.manifest.step),
            "epoch": rows.last / corpus.rows,
            "first_row": rows.first,
            "last_row": rows.last,
            "trained_tokens": int((batch.rows.weights > 0).sum()),
        }

    def _learning_rate(self, step: int) -> float:
        """That of the step's last update."""
        spec, updates = self._spec.at_step(step), self._spec.algorithm.updates_per_step
        rate = learning_rate(spec.optimizer, spec.steps * updates, rise_of(spec))
        return float(rate((step + 1) * updates - 1))

    def _summary(self, line: Mapping[str, Any]) -> str:
        held_out = line["held_out_bits_per_byte"]
        more = "" if held_out is None else f" (held out {held_out:.3f})"
        learned = f"loss {line['loss']:.4f}, {line['bits_per_byte']:.3f} bits a byte{more}"
        return f"{learned}, gradient {line['grad_norm']:.3f}, {line['tokens_per_s']:.0f} tokens/s"


def document_lengths(batch: TokenBatch) -> list[int]:
    """The lengths of the segments of packed rows, numpy int32 [R, tokens], in tokens."""
    segments, tokens = batch.segment_ids, batch.segment_ids.shape[1]
    numbered = segments + np.arange(len(segments))[:, None] * (tokens + 1)
    counts = np.bincount(numbered[segments > 0])
    return counts[counts > 0].tolist()
