"""Bytes and milliseconds of a submission's table, beside the same rows as Parquet with zstd.

    python -m benchmarks.table_bytes

Prints a line of JSON for each size. Rollouts are of groups of eight that share a prompt. Tokens are
drawn by Zipf's law from a vocabulary of 151,936, lengths and log-probs from log-normal
distributions. Proofs are random bytes, which nothing compresses.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verify.formats.submission import Rollout, decode_rollouts, encode_rollouts
from verify.toploc import CHUNK_ROWS, PROOF_BYTES

VOCAB, GROUP_SIZE, REPEATS = 151_936, 8, 5
SIZES = ((16, 8, 10), (16, 30, 60), (64, 200, 150), (64, 1000, 300), (64, 1000, 2000))
SIZES += ((64, 8000, 500), (64, 200, 8000))
"""Rollouts, mean output tokens, prompt tokens."""


def rollouts(count: int, tokens: int, prompt: int) -> list[Rollout]:
    rng = np.random.default_rng(0)
    weights = 1 / (np.arange(VOCAB) + 2.7) ** 1.05
    weights /= weights.sum()

    def drawn(size: int) -> np.ndarray:
        return rng.choice(VOCAB, size=size, p=weights).astype(np.int32)

    rows = []
    for group in range(count // GROUP_SIZE):
        shared = drawn(prompt)
        for sample in range(GROUP_SIZE):
            size = max(4, int(rng.lognormal(np.log(tokens), 0.5)))
            rows.append(
                Rollout(
                    run="a-run",
                    step=12,
                    worker="ab" * 32,
                    lease="cd" * 32,
                    problem_id=f"gsm8k/{group}",
                    group=group,
                    sample=sample,
                    version=11,
                    prompt_tokens=shared,
                    output_tokens=drawn(size),
                    logprobs=-np.exp(rng.normal(-3, 3, size)).astype(np.float32),
                    finish_reason="stop",
                    temperature=1.0,
                    top_p=1.0,
                    top_k=-1,
                    target=None,
                    task_reward=1.0,
                    length_penalty=0.0,
                    proofs=[rng.bytes(PROOF_BYTES) for _ in range(-(-size // CHUNK_ROWS))],
                )
            )
    return rows


def parquet(rows: list[Rollout]) -> bytes:
    narrow = {pa.int64(): pa.int32(), pa.float64(): pa.float32(), pa.null(): pa.int32()}
    table = pa.Table.from_pylist([vars(row) for row in rows])
    fields = [pa.field(f.name, narrow.get(f.type, f.type)) for f in table.schema]
    sink = io.BytesIO()
    pq.write_table(table.cast(pa.schema(fields)), sink, compression="zstd")
    return sink.getvalue()


def best_ms(action: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return round(1e3 * min(times), 2)


def measured(count: int, tokens: int, prompt: int) -> dict[str, Any]:
    rows = rollouts(count, tokens, prompt)
    table, before = encode_rollouts(rows), parquet(rows)
    return {
        "rollouts": count,
        "tokens": tokens,
        "prompt": prompt,
        "bytes_a_rollout": len(table) // count,
        "parquet_bytes_a_rollout": len(before) // count,
        "ratio": round(len(table) / len(before), 3),
        "write_ms": best_ms(lambda: encode_rollouts(rows)),
        "read_ms": best_ms(lambda: decode_rollouts(table, max_rows=count, max_bytes=len(table))),
    }


if __name__ == "__main__":
    for size in SIZES:
        print(json.dumps(measured(*size)), flush=True)
