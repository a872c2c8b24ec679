"""One supervised step on the mesh: rows of documents in, updated state and its numbers out."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from learner_jax.corpus.packed import CorpusRows
from learner_jax.packing import LossInputs, TokenBatch
from learner_jax.sharding import shard_batch
from learner_jax.step import Programs, TrainState, microbatch_bound
from learner_jax.training import Share, StepResult, make_updates
from runspec.core.errors import UserError
from runspec.core.schema import RunSpec


def supervised_step(
    spec: RunSpec,
    mesh: Mesh,
    programs: Programs,
    state: TrainState,
    rows: CorpusRows,
    *,
    base: Any | None = None,
) -> StepResult:
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
    updates, packing = spec.algorithm.updates_per_step, spec.learner.packing
    shape = (updates, microbatch_bound(spec), packing.rows, packing.tokens)
    batch = jax.tree.map(lambda x: x.reshape(shape), rows.batch)
    names = [f"row {number} of the update" for number in range(shape[1] * shape[2])]
    shares = []
    for update, weights in enumerate(rows.weights.reshape(shape)):
        total = float(weights.sum(dtype=np.float64))
        if total == 0.0:
            raise UserError(
                "the rows of an update train no token",
                place="data.sources",
                remedy="see that the conversations have an assistant's part",
            )
        own = (weights / total).astype(weights.dtype)
        # The last microbatches of an update may train no token: they are not computed.
        real = int(np.flatnonzero(own.any(axis=(1, 2)))[-1]) + 1
        tokens = jax.tree.map(lambda x, at=update: x[at], batch)
        on_mesh = shard_batch((tokens, LossInputs(own)), mesh)
        shares.append(
            Share(*on_mesh, real, names, lambda values: [*values.reshape(-1, packing.tokens)])
        )
    return make_updates(
        *(spec, "a step", programs, state, shares, base),
        tokens=int((rows.batch.segment_ids > 0).sum()),
        positions=rows.weights.size,
        begun=begun,
    )


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
