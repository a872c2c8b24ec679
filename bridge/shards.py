"""How the tensors of a version are cut into safetensors files, and the header of such a file.

Imports no numpy: what a version will weigh is known from its shapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name, in the order of the file."""

MAX_SHARD_BYTES = 5 * 10**9


def plan_shards(
    shapes: Shapes, itemsize: int, max_bytes: int = MAX_SHARD_BYTES
) -> list[dict[str, tuple[int, ...]]]:
    """Cuts the tensors, in order, into files of at most `max_bytes` (or of one tensor)."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * itemsize
        if shards[-1] and size + nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += nbytes
    return shards


def file_header(shapes: Shapes, code: str, itemsize: int) -> bytes:
    """Return the start of a safetensors file: the header's length, and the header.

    Args:
        shapes: name and shape of every tensor, in the order in which they will come.
        code: their type as the format writes it, `F32` or `BF16`.
        itemsize: bytes of a number.
    """
    # transformers refuses a file without this note of the framework that wrote it.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors start aligned
    return len(text).to_bytes(8, "little") + text
