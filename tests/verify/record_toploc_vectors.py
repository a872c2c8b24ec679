"""Records what the published package makes of fixed activations: vectors/toploc.json.

python -m tests.verify.record_toploc_vectors      # where `toploc` 0.1.6 can be imported
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from verify.toploc.selection import MAGNITUDE, TOP_K

PATH = Path(__file__).parent / "vectors" / "toploc.json"
CASES = [
    {"name": "hidden 64, whole chunk", "rows": 32, "hidden": 64, "seed": 1},
    {"name": "hidden 64, 5 rows", "rows": 5, "hidden": 64, "seed": 2},
    {"name": "hidden 256, whole chunk", "rows": 32, "hidden": 256, "seed": 3},
    {"name": "k is every element", "rows": 2, "hidden": 64, "seed": 4},
    {"name": "two positions 65497 apart", "rows": 32, "hidden": 4096, "seed": 5, "collide": True},
    {
        "name": "the three largest moduli collide",
        "rows": 32,
        "hidden": 5120,
        "seed": 6,
        "collide": True,
        "moduli": 3,
    },
]


def activations(case: dict[str, Any]) -> np.ndarray:
    """u16 [rows, hidden] of distinct large magnitudes, so that no tie is at the kth."""
    size = case["rows"] * case["hidden"]
    index = np.arange(size, dtype=np.int64)
    bits = 0x2000 + (index * 40503 + case["seed"]) % 4096  # the many small ones
    spread = (np.arange(600) * 7919 + case["seed"] * 31) % size
    large = np.unique(spread)[: min(512, size)]
    if case.get("collide"):
        extra = [large[100 + j] + 65497 - j for j in range(case.get("moduli", 1))]
        large = np.unique(np.append(large, extra))
        order = np.argsort((large * 48271) % 65521, kind="stable")
        first = np.isin(large[order], [*extra, *(e - 65497 + j for j, e in enumerate(extra))])
        order = np.concatenate([order[first], order[~first]])  # those that collide rank first
    else:
        order = np.argsort((large * 48271) % 65521, kind="stable")
    bits[large[order]] = 0x4300 - 3 * np.arange(large.size)
    sign = (index * index >> 3 & 1) << 15
    return (bits | sign).astype(np.uint16).reshape(case["rows"], case["hidden"])


def perturbed(bits: np.ndarray) -> np.ndarray:
    """The same, off by up to one unit in the last place (ranks stay) with some exponents wrong."""
    index = np.arange(bits.size, dtype=np.int64).reshape(bits.shape)
    moved = bits.astype(np.int64) + (index * 31 % 3) - 1
    return np.where(index % 11 == 0, moved + 0x80, moved).astype(np.uint16)


def record() -> list[dict[str, Any]]:
    import torch
    from toploc import build_proofs_bytes, verify_proofs_bytes

    vectors = []
    for case in CASES:
        bits = activations(case)
        rows = [torch.from_numpy(row.copy()).view(torch.bfloat16)[None] for row in bits]
        others = [torch.from_numpy(r.copy()).view(torch.bfloat16)[None] for r in perturbed(bits)]
        proof = build_proofs_bytes(rows, 32, TOP_K, True)[0]
        found = verify_proofs_bytes(torch.cat(others), [proof], 32, TOP_K, True)[0]
        vectors.append(
            {
                **case,
                "proof": base64.b64encode(proof).decode(),
                "exponent_mismatches": found.exp_mismatches,
                "mantissa_error_mean": found.mant_err_mean,
                "mantissa_error_median": found.mant_err_median,
            }
        )
    return vectors


def untied(bits: np.ndarray) -> bool:
    """Whether the choice of the k largest leaves nothing open."""
    ordered = np.sort(bits.reshape(-1) & MAGNITUDE)[::-1]
    return ordered.size <= TOP_K or bool(ordered[TOP_K - 1] > ordered[TOP_K])


if __name__ == "__main__":
    PATH.write_text(json.dumps(record(), indent=1) + "\n")
