"""Forged TOPLOC proofs against real hidden states, and honest ones; prints JSON, a line a model.

    python -m benchmarks.toploc_null [MODEL ...]

Each model is trained here on real text, in minutes (`benchmarks.null.text_model`); `crafted` is
the model of hidden size 128 with six channels of its final norm scaled by 8. Every fifth sequence
is the forger's library, the others are judged. A forgery is judged on every chunk: under the
published limits, under those with signs and the ratio to the best constant (`ratio`: the rules
before the null test), and by all rules. `decided` are the chunks where passing is worth 40 bits;
the tail is of the positions hit there. Limits are those of bfloat16, the looser.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.null import forgeries
from benchmarks.null.forgeries import Library, TokenTable, ordered, selected
from benchmarks.null.text_model import (
    CHUNKS_A_SEQUENCE,
    PROMPT,
    Size,
    held_out,
    hidden_states,
    read_text,
    rounded_weights,
    train,
    transformers_states,
    with_outliers,
)
from verify.checks.prefill import judge_proofs, null_test_of
from verify.thresholds import BFLOAT16, FLOAT32, NULL_BITS, RICH_BITS, Limits
from verify.toploc import (
    CHUNK_ROWS,
    TOP_K,
    ChunkStatistics,
    build_proofs_batch,
    verify_proofs_batch,
)
from verify.toploc.field import PRIME
from verify.toploc.null import GRANTED_CELLS, RADII

_HONEST_SEQUENCES = 60
_LIBRARY_STEP = 5
_CONFIDENCE = 0.95
MODELS: dict[str, tuple[Size, int]] = {
    "64": (Size(64, 2, 150, 8, 3e-3), 10000),
    "128": (Size(128, 4, 120, 16, 2e-3), 3700),
    "crafted": (Size(128, 4, 120, 16, 2e-3), 3700),
    "256": (Size(256, 2, 40, 4, 1.5e-3), 1000),
    "512": (Size(512, 2, 25, 4, 1e-3), 400),
}
"""Name: the model, and how many sequences of 7 chunks are computed."""


@dataclass(frozen=True)
class Chunks:
    """Real chunks of one model."""

    hidden: np.ndarray
    """u16 [N, 32, D]."""
    tokens: np.ndarray
    """i32 [N, 34]: the tokens that the rows read, and two before."""


def chunks_of(hidden: np.ndarray, tokens: np.ndarray) -> Chunks:
    """From u16 [n, 224, D] and i32 [n, 256]."""
    width = hidden.shape[2]
    starts = PROMPT + CHUNK_ROWS * np.arange(CHUNKS_A_SEQUENCE)
    windows = np.stack([tokens[:, s - 2 : s + CHUNK_ROWS] for s in starts], axis=1)
    return Chunks(hidden.reshape(-1, CHUNK_ROWS, width), windows.reshape(-1, CHUNK_ROWS + 2))


def compared(hidden: np.ndarray, proofs: Sequence[bytes]) -> Iterator[ChunkStatistics]:
    """Of u16 [N, n, D] against one proof each."""
    for start in range(0, len(hidden), 256):
        some = slice(start, start + 256)
        for found in verify_proofs_batch(list(hidden[some]), [[p] for p in proofs[some]]):
            assert isinstance(found, list), found
            yield from found


def published(s: ChunkStatistics) -> bool:
    """arXiv 2501.16007: signs are ignored."""
    return (
        s.exponent_mismatches <= 38 and s.mantissa_error_mean <= 10 and s.mantissa_error_median <= 8
    )


def with_ratio(s: ChunkStatistics) -> bool:
    """The rules before the null test."""
    return (
        s.exponent_mismatches + s.sign_mismatches <= 38
        and s.mantissa_error_mean <= 10
        and s.mantissa_error_median <= 8
        and s.error_median <= BFLOAT16.constant_ratio * s.constant_error
    )


def passes(s: ChunkStatistics, limits: Limits = BFLOAT16) -> bool:
    return all(result.passed for result in judge_proofs([s], limits))


def bits(s: ChunkStatistics, limits: Limits = BFLOAT16) -> float:
    return null_test_of(s, limits).bits


def judged(found: Sequence[ChunkStatistics]) -> dict[str, Any]:
    """Pass rates of a forgery, and how far its hits stay below what is required."""
    tests = [null_test_of(s, BFLOAT16) for s in found]
    told = np.array([test.bits >= NULL_BITS for test in tests])
    misses = np.array([s.misses[test.radius] for s, test in zip(found, tests, strict=True)])
    allowed = np.array([test.allowed for test in tests])
    accepted = np.array([passes(s) for s in found])
    return {
        "chunks": len(found),
        "pass_published": sum(published(s) for s in found),
        "pass_ratio": sum(with_ratio(s) for s in found),
        "pass": int(accepted.sum()),
        "decided": int(told.sum()),
        "pass_decided": int((told & accepted).sum()),
        **tail(TOP_K - misses[told], (misses - allowed)[told]),
    }


def tail(hits: np.ndarray, short: np.ndarray) -> dict[str, Any]:
    """Of positions hit on chunks that are decided, and how many more were required.

    `pass_null` counts those whose hits suffice. `spread` is the variance of the hits over a
    binomial's of the same mean. `tail` extrapolates the hundredth that came nearest to what was
    required, exponentially, to a pass: an assumption.
    """
    if len(hits) < 200:
        return {}
    mean = float(hits.mean())
    start = float(np.quantile(short, 0.01))
    nearest = start - short[short <= start]
    scale = max(float(nearest.mean()), 1.0)
    share = len(nearest) / len(short)
    return {
        "hits_mean": round(mean, 2),
        "hits_max": int(hits.max()),
        "short_least": int(short.min()),
        "pass_null": int((short <= 0).sum()),
        "spread": round(float(hits.var() / max(mean * (1 - mean / TOP_K), 1e-9)), 2),
        "tail": f"{share * math.exp(-max(start, 0.0) / scale):.1e}",
    }


def forged(library: Library, real: Chunks) -> Iterator[tuple[str, list[ChunkStatistics]]]:
    """Forgeries against chunks: those that modulus, degree or width refuse on a tenth of them."""
    found = selected(library.hidden)
    width = library.width
    tenth = real.hidden[::10]
    for name, proof in {
        "constant": forgeries.constant(found, 64),
        "channels": forgeries.channels(found, width, 64),
        "channels, narrow": forgeries.channels(found, width, RADII[0]),
        "cells": forgeries.cells(found, 64),
    }.items():
        yield name, list(compared(tenth, [proof] * len(tenth)))
    narrow = forgeries.cells(found, RADII[0])
    yield "cells, narrow", list(compared(real.hidden, [narrow] * len(real.hidden)))
    table = TokenTable(library)
    proofs = [table.proof(tokens) for tokens in real.tokens]
    yield "table of three tokens", list(compared(real.hidden, proofs))
    honest = [p for [p] in build_proofs_batch(list(library.hidden))]
    replays = [honest[i % len(honest)] for i in range(len(real.hidden))]
    yield "replay", list(compared(real.hidden, replays))


def granted(library: Library, real: Chunks, against: list[ChunkStatistics]) -> dict[str, Any]:
    """A forger who hits 256 cells, more than any polynomial known: hits counted without a proof."""
    known, truth = selected(library.hidden), selected(real.hidden)
    tests = [null_test_of(s, BFLOAT16) for s in against]
    hits = np.empty((len(tests), len(RADII)), np.int64)
    for column, radius in enumerate(RADII):
        guess = forgeries.likeliest(known, PRIME, GRANTED_CELLS, radius)
        value = np.full(CHUNK_ROWS * library.width, 1 << 20)
        value[guess.residues] = guess.values
        distance = np.abs(value[truth.indices] - ordered(truth.bits))
        hits[:, column] = (distance <= radius).sum(axis=1)
    told = np.array([test.bits >= NULL_BITS for test in tests])
    here = hits[np.arange(len(tests)), [test.radius for test in tests]]
    required = TOP_K - np.array([test.allowed for test in tests])
    return {"decided": int(told.sum()), **tail(here[told], (required - here)[told])}


def honest_pairs(
    params: Any, older: Any, size: Size, tokens: np.ndarray
) -> Iterator[tuple[str, np.ndarray, np.ndarray, Limits]]:
    """Sampler and validator by name, the validator's states, the sampler's, and limits.

    Those of int8 and of the older checkpoint are no honest pairs.
    """

    def states(weights: Any = params, dtype: Any = jnp.float32, rows: int = 16) -> np.ndarray:
        return hidden_states(weights, size, tokens, dtype=dtype, rows=rows)

    full, half = states(), states(dtype=jnp.bfloat16)
    yield "float32 / float32, another batch", full, states(rows=3), FLOAT32
    yield "bfloat16 / float32", full, half, BFLOAT16
    yield "float32 / bfloat16", half, full, BFLOAT16
    yield "bfloat16 / bfloat16, another batch", half, states(dtype=jnp.bfloat16, rows=3), BFLOAT16
    theirs = partial(transformers_states, params, size, tokens)
    yield "transformers float32 / float32", full, theirs("float32"), FLOAT32
    yield "transformers bfloat16 / float32", full, theirs("bfloat16"), BFLOAT16
    yield "transformers bfloat16 / bfloat16", half, theirs("bfloat16"), BFLOAT16
    fp8 = rounded_weights(params, "fp8")
    yield "fp8 weights, bfloat16 / float32", full, states(fp8, jnp.bfloat16), BFLOAT16
    yield "int8 weights / float32", full, states(rounded_weights(params, "int8")), BFLOAT16
    yield "older checkpoint / float32", full, states(older), BFLOAT16


def agreement(true: np.ndarray, claimed: np.ndarray, limits: Limits) -> dict[str, Any]:
    """Of proofs made by one side and verified by the other, by rollout and by chunk."""
    found = verify_proofs_batch(list(true), build_proofs_batch(list(claimed)))
    rollouts = [each for each in found if isinstance(each, list)]
    chunks = [chunk for rollout in rollouts for chunk in rollout]
    refused = [[r for r in judge_proofs(each, limits) if not r.passed] for each in rollouts]
    told = [chunk for chunk in chunks if bits(chunk, limits) >= NULL_BITS]
    return {
        "rollouts": len(rollouts),
        "failed": sum(bool(r) for r in refused),
        "reasons": sorted({r.reason.rpartition(" of chunk")[0] for one in refused for r in one}),
        "chunks": len(chunks),
        "decided": len(told),
        "misses_max": max(c.misses[0] for c in chunks),
        "misses_max_decided": max((c.misses[0] for c in told), default=0),
        "room_least": min((_room(c, limits) for c in told), default=0),
        "mismatches_max": max(c.exponent_mismatches + c.sign_mismatches for c in chunks),
        "missing_terms_max": max(c.missing_terms for c in chunks),
    }


def _room(chunk: ChunkStatistics, limits: Limits) -> int:
    test = null_test_of(chunk, limits)
    return test.allowed - chunk.misses[test.radius]


def by_length(hidden: np.ndarray, limits: Limits) -> dict[str, float]:
    """Share of chunks that are decided where a chunk has fewer rows."""
    shares = {}
    for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        short = hidden[:2000, :rows]
        proofs = [p for [p] in build_proofs_batch(list(short))]
        told = [bits(s, limits) >= NULL_BITS for s in compared(short, proofs)]
        shares[str(rows)] = round(float(np.mean(told)), 3)
    return shares


def zero_of(chunks: int) -> float:
    """Clopper and Pearson's upper bound of a rate of which none was seen."""
    return 1 - (1 - _CONFIDENCE) ** (1 / chunks) if chunks else 1.0


def measure(name: str, text: np.ndarray, scale: float, trained: dict[Size, Any]) -> dict[str, Any]:
    size, sequences = MODELS[name]
    if size not in trained:
        trained[size] = train(size, text)
    params, older, loss = trained[size]
    if name == "crafted":
        params, older = (with_outliers(p, 6, 8.0) for p in (params, older))
    tokens = held_out(text, max(_LIBRARY_STEP * 4, int(scale * sequences)))
    hidden = hidden_states(params, size, tokens)
    known = np.arange(len(tokens)) % _LIBRARY_STEP == 0
    library = Library(*vars(chunks_of(hidden[known], tokens[known])).values())
    real = chunks_of(hidden[~known], tokens[~known])
    rows: dict[str, Any] = {}
    last: list[ChunkStatistics] = []
    for forgery, found in forged(library, real):
        rows[forgery], last = judged(found), found
        print(f"{name}: {forgery}: {rows[forgery]}", file=sys.stderr, flush=True)
    rows["256 cells granted"] = granted(library, real, last)
    told = rows["replay"]["decided"]
    return {
        "model": name,
        "hidden": size.hidden,
        "layers": size.layers,
        "loss": round(loss, 3),
        "chunks": len(real.hidden),
        "decided": told,
        "bits_median": round(float(np.median([bits(s) for s in last])), 1),
        "lenient": sum(bits(s) >= RICH_BITS for s in last),
        "decided_by_rows": {
            "bfloat16": by_length(real.hidden, BFLOAT16),
            "float32": by_length(real.hidden, FLOAT32),
        },
        "forgeries": rows,
        "rate_a_chunk_below": f"{zero_of(told):.1e}",
        "honest": {
            pair: agreement(true, claimed, limits)
            for pair, true, claimed, limits in honest_pairs(
                params, older, size, tokens[~known][:_HONEST_SEQUENCES]
            )
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the sequences")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(MODELS)}")
    text, trained = read_text(), dict[Size, Any]()
    for name in options.models or MODELS:
        print(json.dumps(measure(name, text, options.scale, trained)), flush=True)


if __name__ == "__main__":
    main()
