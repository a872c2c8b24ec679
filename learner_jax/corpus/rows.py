"""Packed rows of documents: what a supervised update trains on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from learner_jax.packing import TokenBatch


@dataclass(frozen=True)
class CorpusRows:
    """Rows of whole documents, each document a segment of its own."""

    batch: TokenBatch
    """numpy int32 [R, tokens] each; a target is -1 where its token is not trained."""
    weights: np.ndarray
    """float32 [R, tokens]: loss weight of the target at each position, its source's `weight`; 0
    where none is trained."""
