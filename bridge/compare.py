"""Whether two Hugging Face directories hold the same weights."""

from __future__ import annotations

from pathlib import Path

from bridge.safetensors_io import TensorInfo, read_headers, stored_digest
from bridge.tensors import dtype_name


def differences(first: Path, second: Path) -> list[str]:
    """What differs between the weights of two directories, a line a tensor; empty if nothing.

    How the tensors are spread over files does not count. Nothing is read whole.
    """
    a, b = read_headers(first), read_headers(second)
    lines = []
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            lines.append(f"{name}: only in {first if name in a else second}")
            continue
        left, right = (_said(tensors[name]) for tensors in (a, b))
        lines += [
            f"{name}: {field} {value} and {right[field]}"
            for field, value in left.items()
            if value != right[field]
        ]
    return lines


def _said(info: TensorInfo) -> dict[str, object]:
    shape = list(info.shape)
    return {"dtype": dtype_name(info.dtype), "shape": shape, "blake3": stored_digest(info)}
