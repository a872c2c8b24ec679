"""GPUs and CPUs select the same activations, each in its own way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sampler.engine.largest import Selected, by_partition, by_topk, select_largest
from verify.toploc.selection import CHUNK_ROWS, TOP_K, select

ROWS = np.array([32, 32, 1, 7, 31])


def some_chunks(hidden: int, *, distinct: int) -> torch.Tensor:
    """bf16 [C, 32, D] with so many magnitudes, of both signs."""
    rng = np.random.default_rng(hidden)
    bits = rng.integers(0, distinct, (len(ROWS), CHUNK_ROWS, hidden)) * (0x7F00 // distinct)
    bits |= rng.integers(0, 2, bits.shape) << 15
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def pairs(selected: Selected, row: int, count: int) -> set[tuple[int, int]]:
    return set(
        zip(
            selected.indices[row, :count].tolist(), selected.bits[row, :count].tolist(), strict=True
        )
    )


@pytest.mark.parametrize("distinct", [2, 50, 0x7F00])
@pytest.mark.parametrize("hidden", [2, 8, 64, 512])
def test_both_ways_select_what_the_validator_selects(hidden: int, distinct: int) -> None:
    chunks = some_chunks(hidden, distinct=distinct)
    whole = by_topk(chunks, ROWS), by_partition(chunks, ROWS), select_largest(chunks, ROWS)
    for row, rows in enumerate(ROWS):
        count = min(TOP_K, rows * hidden)
        bits = chunks[row, :rows].reshape(-1).view(torch.int16).numpy()
        expected = select([bits.view(np.uint16)]).indices[0, :count]
        for selected in whole:
            assert selected.indices.shape == selected.bits.shape == (len(ROWS), TOP_K)
            found = pairs(selected, row, count)
            assert found == {(int(i), int(bits[i])) for i in expected}
