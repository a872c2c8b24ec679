"""What each kind of run reads, trains and reports in a step. The loop (`runner`) is the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from learner_jax.batch import Batch, BatchReader
from learner_jax.document_batch import (
    DocumentBatch,
    DocumentReader,
    decode_documents,
    decode_rows,
    encode_documents,
    encode_rows,
)
from learner_jax.document_records import DocumentRecords
from learner_jax.feed import BatchFeed, Reader, decode_batch, encode_batch
from learner_jax.full_states import Start
from learner_jax.islands.mirror import MirroredReader
from learner_jax.learner_run import LearnerRun
from learner_jax.manifests import ManifestReader
from learner_jax.report import Records
from learner_jax.step import Programs, TrainState
from learner_jax.supervised import held_out_loss, supervised_step
from learner_jax.training import StepResult, compile_ahead, train_step

Waited = Callable[[str], None]
"""Called with whom or what the learner waited for since the call before."""


@dataclass(frozen=True)
class Times:
    """Where the learner's time went since the step before."""

    train_s: float
    """Seconds of work."""
    waits: Mapping[str, float]
    """Seconds of waiting, by whom or what it was for."""


@dataclass(frozen=True)
class Said:
    """Further figures of a step's line."""

    difference: float | None
    """`VersionWriter.difference`."""
    islands: dict[str, Any] | None = None
    """The commit that an island followed (`islands.island.Commit`); None for one learner."""


class Recipe(Protocol):
    """One kind of run; every method is collective over the learner's processes."""

    @property
    def reader(self) -> ManifestReader[Any] | None:
        """Reads the run's manifests, in process 0."""

    @property
    def corpus(self) -> str | None:
        """Digest of the documents; None for runs that train on rollouts."""

    def compile(self, state: TrainState, start: Start, published: Any | None) -> None:
        """Compile the large programs, while nothing is there to train."""

    def next(self, step: int, waited: Waited) -> Any | None:
        """Return the batch of a step; None when a process was told to end."""

    def train(self, state: TrainState, batch: Any, start: Start, published: Any | None) -> Any:
        """Train a batch; the result has the new `state`. Uses up the old one."""

    def weight(self, batch: Any) -> float:
        """Return the loss denominator of a batch, by which an island counts among the others."""

    def measure(self, version: int, weights: Callable[[], Any]) -> None:
        """Measure a version where that is due; `weights` gives its bits as they are published."""

    def record(self, batch: Any, result: Any, times: Times, said: Said) -> None:
        """Write the lines of a step, in process 0."""


def mirrored(run: LearnerRun, reader: Reader[Any]) -> Reader[Any]:
    """Return a reader that waits for the run's files wherever they come from."""
    return reader if run.trunk else MirroredReader(run, reader)


def recipe_of(run: LearnerRun, programs: Programs, stop: threading.Event) -> Recipe:
    """Open what the run trains on.

    Raises:
        UserError: the run's roles or its documents cannot be read.
    """
    if run.spec.supervised is None:
        return Rollouts(run, programs, stop)
    return Documents(run, programs, stop)


class Rollouts:
    """Runs of kind `grpo`: graded rollouts, which the coordinator's batch manifests name."""

    corpus = None

    def __init__(self, run: LearnerRun, programs: Programs, stop: threading.Event) -> None:
        self._run, self._programs = run, programs
        first = run.peers.first
        read = partial(BatchReader, run.folder, run.spec)
        self.reader = read(run.root_public_key(), run.island) if first else None
        feed = mirrored(run, self.reader) if self.reader else None
        self._feed = BatchFeed(feed, run.peers, stop, run.log, encode_batch, decode_batch)
        self._records = Records(run) if first else None

    def compile(self, state: TrainState, start: Start, published: Any | None) -> None:
        scored = start.reference if published is None else published
        compile_ahead(self._run.mesh, self._programs, state, scored, start.base)

    def next(self, step: int, waited: Waited) -> Batch | None:
        return self._feed.next(step, waited)

    def train(
        self, state: TrainState, batch: Batch, start: Start, published: Any | None
    ) -> StepResult:
        return train_step(
            self._run.own,
            self._run.mesh,
            self._programs,
            state,
            published=published,
            reference=start.reference,
            batch=batch,
            base=start.base,
        )

    def weight(self, batch: Batch) -> float:
        if self._run.spec.grpo.loss_normalizer == "token":
            return float(sum(len(rollout.output_tokens) for rollout in batch.rollouts))
        return float(len(batch.rollouts))

    def measure(self, version: int, weights: Callable[[], Any]) -> None:
        pass  # rewards measure a version

    def record(self, batch: Batch, result: StepResult, times: Times, said: Said) -> None:
        if self._records is not None:
            self._records.write(
                batch,
                result,
                train_s=times.train_s,
                waits=times.waits,
                replay_difference=said.difference,
                islands=said.islands,
            )


class Documents:
    """Runs of kind `pretrain` and `sft`: rows of documents, which the manifests number."""

    def __init__(self, run: LearnerRun, programs: Programs, stop: threading.Event) -> None:
        assert run.spec.supervised is not None, "a run that trains on documents"
        self._run, self._programs, self._algorithm = run, programs, run.spec.supervised
        peers = run.peers
        opened: list[DocumentReader] = []

        def open_documents() -> bytes:
            opened.append(DocumentReader(run, run.root_public_key()))
            held_out = opened[0].corpus.held_out()
            return b"" if held_out is None else encode_rows(held_out)

        # The other processes are given what process 0 reads: they need no file of the data.
        held_out = peers.from_first(open_documents)
        # Every island would find the same: the trunk's measures.
        self._held_out = decode_rows(held_out) if held_out and run.trunk else None
        self.reader = opened[0] if opened else None
        self.corpus: str = peers.json_from_first(lambda: opened[0].corpus.digest)
        feed = mirrored(run, self.reader) if self.reader else None
        self._feed = BatchFeed(feed, peers, stop, run.log, encode_documents, decode_documents)
        self._records = DocumentRecords(run, self.reader.corpus) if self.reader else None
        self._held_out_nll: float | None = None

    def compile(self, state: TrainState, start: Start, published: Any | None) -> None:
        compile_ahead(self._run.mesh, self._programs, state, None, start.base)

    def next(self, step: int, waited: Waited) -> DocumentBatch | None:
        return self._feed.next(step, waited)

    def train(
        self, state: TrainState, batch: DocumentBatch, start: Start, published: Any | None
    ) -> StepResult:
        run = self._run
        return supervised_step(
            run.own, run.mesh, self._programs, state, batch.rows, base=start.base
        )

    def weight(self, batch: DocumentBatch) -> float:
        return float(batch.rows.weights.sum(dtype=np.float64))

    def measure(self, version: int, weights: Callable[[], Any]) -> None:
        due = version % self._algorithm.held_out.every == 0 or version == self._run.spec.steps
        self._held_out_nll = None
        if due and self._held_out is not None:
            self._held_out_nll = held_out_loss(
                self._run.own, self._run.mesh, self._programs, weights(), self._held_out
            )

    def record(self, batch: DocumentBatch, result: StepResult, times: Times, said: Said) -> None:
        if self._records is not None:
            self._records.write(
                batch,
                result,
                train_s=times.train_s,
                waits=times.waits,
                replay_difference=said.difference,
                held_out_nll=self._held_out_nll,
                islands=said.islands,
            )
