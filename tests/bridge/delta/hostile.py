"""Deltas as nobody writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import zstandard

from bridge.delta.container import SUFFIX, DeltaHeader, DeltaTensor
from bridge.delta.layout import read_layout
from bridge.delta.segments import FULL, SPARSE
from bridge.tensors import model_digest
from tests.bridge.delta.weights import records


def write_blocks(folder: Path, base: Path, target: Path, blocks: Mapping[str, bytes]) -> Path:
    """A delta with a sound header, from `base` to `target` of one file, and any blocks."""
    (file,) = read_layout(base)
    wanted = records(target)
    header = DeltaHeader(
        model_digest(records(base)),
        model_digest(wanted),
        file.digest,
        {name: DeltaTensor(wanted[name]["blake3"], len(block)) for name, block in blocks.items()},
    )
    folder.mkdir(exist_ok=True)
    data = header.encode() + b"".join(blocks[info.name] for info in file.tensors)
    (folder / (file.path.name + SUFFIX)).write_bytes(data)
    return folder


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def raw(data: bytes) -> bytes:
    """A stream as it is."""
    return u32(len(data)) + data


def packed(data: bytes, **options: int) -> bytes:
    """A stream as a zstd frame, be it longer."""
    return raw(zstandard.ZstdCompressor(**options).compress(data))


def sparse(changed: int, symbols: int, shift: int, *streams: bytes) -> bytes:
    """A sparse segment."""
    return bytes([SPARSE]) + u32(changed) + u32(symbols) + bytes([shift]) + b"".join(streams)


def full(*planes: bytes) -> bytes:
    """A full segment."""
    return bytes([FULL]) + b"".join(planes)
