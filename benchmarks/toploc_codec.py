"""Times the TOPLOC codec on one core; prints JSON, milliseconds a 32-token chunk.

    taskset -c 0 python -m benchmarks.toploc_codec

`single` is one chunk a call, `batch` many chunks a call; the best of the repeats, so that other
work on the machine counts little. Published package, same kind of machine: build 0.44-0.71 ms at
hidden 1024 and 0.60 ms at 5120, verify 0.12 and 0.27 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when numpy is first imported

import numpy as np

from verify.toploc import build_proofs_batch
from verify.toploc.statistics import verify_proofs_batch

_CHUNKS = {64: 192, 1024: 32, 5120: 16}
"""Chunks a batch by hidden size; 192 of 64 is a step of the quickstart."""


def best_ms(action: Callable[[], object], repeats: int) -> float:
    action()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return min(times) * 1e3


def activations(hidden: int, chunks: int) -> list[np.ndarray]:
    """A chunk a rollout: u16 [32, hidden] each."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(chunks, 32, hidden)).astype(np.float32)
    return list((values.view(np.uint32) >> 16).astype(np.uint16))


def measure(hidden: int, chunks: int, repeats: int) -> dict[str, Any]:
    rollouts = activations(hidden, chunks)
    proofs = build_proofs_batch(rollouts)
    one, its = rollouts[:1], proofs[:1]
    cases = {
        "build_single_ms": (lambda: build_proofs_batch(one), 1),
        "build_batch_ms": (lambda: build_proofs_batch(rollouts), chunks),
        "verify_single_ms": (lambda: verify_proofs_batch(one, its), 1),
        "verify_batch_ms": (lambda: verify_proofs_batch(rollouts, proofs), chunks),
    }
    times = {name: best_ms(action, repeats) / count for name, (action, count) in cases.items()}
    return {"hidden": hidden, "chunks": chunks, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    rows = [measure(*case, options.repeats) for case in _CHUNKS.items()]
    print(json.dumps({"benchmark": "toploc_codec", "rows": rows}))


if __name__ == "__main__":
    main()
