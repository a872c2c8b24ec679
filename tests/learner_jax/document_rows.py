"""Specs and rows of supervised runs, for the tests of their loss and of their updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from learner_jax.corpus.rows import CorpusRows
from learner_jax.packing import Sample, TokenBatch, pack
from learner_jax.step import microbatch_bound
from runspec.core.spec.schema import Mesh, Packing, Remat, RunSpec
from tests.learner_jax.conftest import changed, tiny_spec

PACKING = Packing(tokens=32, rows=4)


def supervised_spec(
    *,
    mesh: dict[str, int] | None = None,
    dtype: str = "float32",
    remat: Remat = "none",
    optimizer: dict[str, Any] | None = None,
    steps: int = 4,
    **algorithm: Any,
) -> RunSpec:
    """A run on documents, in updates of two microbatches; `dtype` of masters and products."""
    spec = tiny_spec(
        steps=steps,
        data={"sources": [{"name": "text", "kind": "text", "uri": "text.txt"}]},
        algorithm={
            "kind": "pretrain",
            "tokens_per_update": 2 * PACKING.rows * PACKING.tokens,
            **algorithm,
        },
        optimizer={"lr": 1e-3, "clip_norm": 0.5, **(optimizer or {})},
        reward=[],
        samplers=[],
        verify={"validators": 0},
    )
    learner = {
        "mesh": Mesh(**(mesh or {})),
        "packing": PACKING,
        "remat": remat,
        "compute_dtype": dtype,  # float64 is no choice of a spec
        "master_dtype": dtype,
    }
    return changed(spec, learner=learner, broadcast={"dtype": dtype})


def rows_of(
    spec: RunSpec, documents: Sequence[np.ndarray], weights: Sequence[float] | None = None
) -> CorpusRows:
    """The rows of one update, all tokens but a document's first trained.

    Args:
        spec: of `supervised_spec`.
        documents: int32 [n], at least two tokens each.
        weights: one of each document, or more, which are left out; 1 by default.
    """
    packing = spec.learner.packing
    packed = pack(
        [Sample(document[:1], document[1:]) for document in documents],
        tokens=packing.tokens,
        rows=packing.rows,
        microbatches=microbatch_bound(spec),
    )
    each = [1.0] * len(documents) if weights is None else list(weights)
    laid = packed.scatter(each[: len(documents)])
    batch = TokenBatch(*(x.reshape(-1, packing.tokens) for x in vars(packed.batch).values()))
    kind = spec.learner.master_dtype
    return CorpusRows(batch, laid.reshape(-1, packing.tokens).astype(kind))


def joined(*parts: CorpusRows) -> CorpusRows:
    """The rows of several updates, one after the other."""
    batches = zip(*(vars(part.batch).values() for part in parts), strict=True)
    batch = TokenBatch(*(np.concatenate(arrays) for arrays in batches))
    return CorpusRows(batch, np.concatenate([part.weights for part in parts]))
