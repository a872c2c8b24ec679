"""The largest activations of chunks, which a TOPLOC proof speaks of, selected where they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from verify.toploc import CHUNK_ROWS, TOP_K
from verify.toploc.selection import MAGNITUDE, blocks, select

_PORTION_ELEMENTS = 1 << 23
"""Selected from at once on a device: some 200 MB of keys, however many chunks there are."""


@dataclass(frozen=True)
class Selected:
    """The k = min(128, 32 x D) largest of C chunks, padded to 128; on their way to the host."""

    indices: torch.Tensor
    """i32 [C, 128]: positions in the flattened chunk, in any order."""
    bits: torch.Tensor
    """i16 [C, 128]: bf16 bits there."""


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies an array to a device, without waiting for what the device has still to do."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from other memory a copy may wait
    return tensor.to(device, non_blocking=True)


def select_largest(chunks: torch.Tensor, rows: np.ndarray) -> Selected:
    """Selects by magnitude, then position: no two are equal, so every device selects the same.

    Args:
        chunks: bf16 [C, 32, D].
        rows: i64 [C]: how many rows of each count, the first ones.
    """
    if chunks.device.type == "cpu":
        return by_partition(chunks, rows)
    step = max(1, _PORTION_ELEMENTS // chunks[0].numel())
    found = [
        by_topk(chunks[at : at + step], rows[at : at + step]) for at in range(0, len(rows), step)
    ]
    return Selected(
        torch.cat([part.indices for part in found]).to("cpu", non_blocking=True),
        torch.cat([part.bits for part in found]).to("cpu", non_blocking=True),
    )


def by_topk(chunks: torch.Tensor, rows: np.ndarray) -> Selected:
    """By keys of magnitude and position; what a GPU is good at."""
    bits = chunks.view(torch.int16)
    magnitudes = (bits & MAGNITUDE).long()
    if (rows < CHUNK_ROWS).any():
        beyond = on_device(np.arange(CHUNK_ROWS) >= rows[:, None], chunks.device)
        magnitudes = magnitudes.masked_fill(beyond[:, :, None], -1)
    elements = chunks[0].numel()
    backwards = torch.arange(elements - 1, -1, -1, device=chunks.device)
    keys = magnitudes.flatten(1) * elements + backwards
    best = keys.topk(min(TOP_K, elements), dim=1).values
    indices = elements - 1 - best % elements
    unused = (0, TOP_K - indices.shape[1])
    return Selected(
        torch.nn.functional.pad(indices.to(torch.int32), unused),
        torch.nn.functional.pad(bits.flatten(1).gather(1, indices), unused),
    )


def by_partition(chunks: torch.Tensor, rows: np.ndarray) -> Selected:
    """The same by `verify.toploc`'s own way, in a quarter of topk's time on a CPU."""
    bits = chunks.view(torch.int16).numpy().view(np.uint16)
    flat = [chunk[:count].reshape(-1) for chunk, count in zip(bits, rows, strict=True)]
    found = [select(block) for block in blocks(flat)]
    indices = np.concatenate([part.indices for part in found]).astype(np.int32)
    chosen = np.concatenate([part.bits for part in found]).astype(np.uint16).view(np.int16)
    return Selected(torch.from_numpy(indices), torch.from_numpy(chosen))
