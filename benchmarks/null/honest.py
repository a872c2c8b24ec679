"""Honest pairs of samplers and validators, and which chunks are decided at all."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.null.judging import NullTests, compared
from verify.checks.prefill import judge_proofs
from verify.thresholds import BFLOAT16, FLOAT32, NULL_BITS, Limits
from verify.toploc import build_proofs_batch
from verify.toploc.statistics import ChunkStatistics, verify_proofs_batch

_CHUNKS_BY_LENGTH = 1000


def agreement(true: np.ndarray, claimed: np.ndarray, limits: Limits) -> dict[str, Any]:
    """Of proofs made by one side and verified by the other, by rollout and by chunk.

    Args:
        true, claimed: u16 [rollouts, 224, D].
        limits: of the validator.
    """
    tests = NullTests(limits)
    found = verify_proofs_batch(list(true), build_proofs_batch(list(claimed)))
    rollouts = [each for each in found if isinstance(each, list)]
    chunks = [chunk for rollout in rollouts for chunk in rollout]
    refused = [[r for r in judge_proofs(each, limits) if not r.passed] for each in rollouts]
    told = [chunk for chunk in chunks if tests.of(chunk).bits >= NULL_BITS]
    return {
        "rollouts": len(rollouts),
        "failed": sum(bool(r) for r in refused),
        "reasons": sorted({r.reason.rpartition(" of chunk")[0] for one in refused for r in one}),
        "chunks": len(chunks),
        "decided": len(told),
        "misses_max": max(c.misses[0] for c in chunks),
        "misses_max_decided": max((c.misses[0] for c in told), default=0),
        "room_least": min((_room(c, tests) for c in told), default=0),
        "mismatches_max": max(c.exponent_mismatches + c.sign_mismatches for c in chunks),
        "missing_terms_max": max(c.missing_terms for c in chunks),
    }


def _room(chunk: ChunkStatistics, tests: NullTests) -> int:
    test = tests.of(chunk)
    return test.allowed - chunk.misses[test.radius]


def decided_by_rows(hidden: np.ndarray) -> dict[str, dict[str, float]]:
    """Share of chunks that are decided where a chunk has fewer rows: of u16 [N, 32, D]."""
    shares: dict[str, dict[str, float]] = {"bfloat16": {}, "float32": {}}
    for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        short = hidden[:_CHUNKS_BY_LENGTH, :rows]
        found = list(compared(short, [p for [p] in build_proofs_batch(list(short))]))
        for name, limits in (("bfloat16", BFLOAT16), ("float32", FLOAT32)):
            tests = NullTests(limits)
            told = [tests.of(s).bits >= NULL_BITS for s in found]
            shares[name][str(rows)] = round(float(np.mean(told)), 3)
    return shares
