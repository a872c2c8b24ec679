"""One supervised step on the mesh: rows of documents in, updated state and its numbers out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from learner_jax.corpus.packed import CorpusRows
from learner_jax.packing import TokenBatch
from learner_jax.sharding import shard_batch
from learner_jax.step import Programs, TrainState, microbatch_bound
from learner_jax.supervised_loss import DocumentInputs, DocumentMetrics
from learner_jax.training import SkippedUpdate, make_updates, refuse_skipping, step_numbers
from runspec.core.errors import UserError
from runspec.core.spec.schema import RunSpec


@dataclass(frozen=True)
class SupervisedResult:
    """Result of a supervised step."""

    state: TrainState
    numbers: dict[str, float]
    """`DocumentMetrics.means` over the updates that were made (not finite where none was),
    `grad_norm`, their mean before clipping; of all of them `nonfinite_tokens` and
    `skipped_updates`."""
    skipped: tuple[SkippedUpdate, ...]
    tokens: int
    """Tokens of the documents."""
    trained_tokens: int
    """Those in the loss."""
    positions: int
    """Positions of the rows, padding included."""
    update_s: float
    """Seconds of the updates: loss, gradients, optimizer."""


def supervised_step(
    spec: RunSpec,
    mesh: Mesh,
    programs: Programs,
    state: TrainState,
    rows: CorpusRows,
    *,
    base: Any | None = None,
) -> SupervisedResult:
    """Makes `updates_per_step` optimizer updates, each from its contiguous share of the rows.

    Args:
        spec, mesh, programs: of the run.
        state: of the version being trained; used up.
        rows: int32 [R, tokens], R = updates_per_step * tokens_per_update / packing.tokens.
        base: the frozen weights under adapters; None where the weights are trained.

    Raises:
        RunStopped: more than `optimizer.max_skipped` updates in a row were not finite.
        UserError: the rows of an update train no token.
    """
    begun = time.perf_counter()
    shares = list(_shares(spec, rows))
    on_mesh = (
        (*shard_batch((tokens, DocumentInputs(weights)), mesh), _real(weights))
        for tokens, weights in shares
    )
    state, outcomes, logprobs = make_updates(programs, state, on_mesh, base)
    skipped = tuple(
        _skipped(number, current, len(rows.weights) // len(shares))
        for number, (current, (_, update)) in enumerate(zip(logprobs, outcomes, strict=True))
        if update.skipped
    )
    refuse_skipping(spec, "a step", outcomes, skipped)
    return SupervisedResult(
        state,
        step_numbers(outcomes, DocumentMetrics.zeros(), ("loss",)),
        skipped,
        tokens=int((rows.batch.segment_ids > 0).sum()),
        trained_tokens=int((rows.weights > 0).sum()),
        positions=rows.weights.size,
        update_s=time.perf_counter() - begun,
    )


def compile_supervised(
    mesh: Mesh, programs: Programs, state: TrainState, base: Any | None = None
) -> None:
    """Compiles the large programs, on no microbatch, while the first manifest is signed."""
    tokens, inputs = shard_batch(
        jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), programs.abstract_batch), mesh
    )
    total = jax.block_until_ready(programs.accumulate(state.params, tokens, inputs, 0, base))
    # Into the compile cache alone: a call would use up the state.
    programs.apply.lower(state, total).compile()  # type: ignore[attr-defined]


def held_out_loss(
    spec: RunSpec, mesh: Mesh, programs: Programs, weights: Any, rows: CorpusRows
) -> float:
    """Sum of -log p over the trained tokens of rows, in nats, whatever their weight.

    Args:
        spec, mesh, programs: of the run.
        weights: parameters in `broadcast.dtype`, as they are published.
        rows: int32 [R, tokens], any number of them.
    """
    scores = score_rows(spec, mesh, programs, weights, rows.batch)
    return -float(scores[rows.weights > 0].sum(dtype=np.float64))


def score_rows(
    spec: RunSpec, mesh: Mesh, programs: Programs, weights: Any, batch: TokenBatch
) -> np.ndarray:
    """Log-probs of the targets of rows, float32 [R, tokens]; 0 where no target is.

    Args:
        spec, mesh, programs: of the run.
        weights: parameters.
        batch: numpy int32 [R, tokens], any number of rows.
    """
    packing, bound = spec.learner.packing, microbatch_bound(spec)
    at_once, count = bound * packing.rows, len(batch.tokens)
    missing = -count % at_once
    filled = TokenBatch(
        *(
            np.pad(x, ((0, missing), (0, 0)), constant_values=fill)
            for x, fill in zip(vars(batch).values(), (0, -1, 0, 0), strict=True)
        )
    )
    cut = jax.tree.map(lambda x: x.reshape(-1, bound, packing.rows, packing.tokens), filled)
    found = []
    for part in range(len(cut.tokens)):
        real = min(bound, -(-(count - part * at_once) // packing.rows))
        on_mesh = shard_batch(jax.tree.map(lambda x, at=part: x[at], cut), mesh)
        scores = programs.score(weights, on_mesh, real)
        found.append(multihost_utils.process_allgather(scores, tiled=True))
    return np.concatenate(found).reshape(-1, packing.tokens)[:count]


def _shares(spec: RunSpec, rows: CorpusRows) -> Iterator[tuple[TokenBatch, np.ndarray]]:
    """The microbatches of each update, [M, rows, tokens], and their weights, which sum to 1.

    The last microbatches of an update may train no token: they are not computed.

    Raises:
        UserError: an update trains no token.
    """
    updates, packing = spec.algorithm.updates_per_step, spec.learner.packing
    shape = (updates, microbatch_bound(spec), packing.rows, packing.tokens)
    batch = jax.tree.map(lambda x: x.reshape(shape), rows.batch)
    weights = rows.weights.reshape(shape)
    for update in range(updates):
        total = float(weights[update].sum(dtype=np.float64))
        if total == 0.0:
            raise UserError(
                "the rows of an update train no token",
                place="data.sources",
                remedy="see that the conversations have an assistant's part",
            )
        share = (weights[update] / total).astype(weights.dtype)
        yield jax.tree.map(lambda x, at=update: x[at], batch), share


def _real(weights: np.ndarray) -> int:
    """How many microbatches there are up to the last one that trains a token."""
    return int(np.flatnonzero(weights.any(axis=(1, 2)))[-1]) + 1


def _skipped(update: int, logprobs: jax.Array, rows: int) -> SkippedUpdate:
    """Looks for the rows that made an update not finite; collective over processes."""
    finite = np.isfinite(multihost_utils.process_allgather(logprobs, tiled=True))
    whole = finite.reshape(rows, -1).all(axis=1)
    bad = [f"row {number} of the update" for number in np.flatnonzero(~whole).tolist()]
    return SkippedUpdate(update, tuple(bad or ["all its rows"]), identified=bool(bad))
