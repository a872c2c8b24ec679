"""Whether two Hugging Face directories hold the same weights."""

from __future__ import annotations

from pathlib import Path

from bridge.safetensors_io import read_headers, read_tensor
from bridge.tensors import tensor_record


def differences(first: Path, second: Path) -> list[str]:
    """What differs between the weights of two directories, a line a tensor; empty if nothing.

    How the tensors are spread over files does not count. One tensor of each is in memory.
    """
    a, b = read_headers(first), read_headers(second)
    lines = []
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            lines.append(f"{name}: only in {first if name in a else second}")
            continue
        left, right = (tensor_record(read_tensor(tensors[name])) for tensors in (a, b))
        for field in ("dtype", "shape", "blake3"):
            if left[field] != right[field]:
                lines.append(f"{name}: {field} {left[field]} and {right[field]}")
    return lines
