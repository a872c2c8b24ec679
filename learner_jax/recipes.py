"""What each kind of run reads, trains and reports in a step. The loop (`train`) is the same."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from learner_jax.batch import Batch, BatchReader
from learner_jax.corpus.packed import CorpusRows
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
from learner_jax.report import DocumentRecords, Records, RolloutRecords
from learner_jax.step import Programs, TrainState
from learner_jax.training import StepResult, held_out_loss, supervised_step, train_step


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
            return float(sum(len(rollout.output_tokens) for rollout in batch.rollouts))
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
