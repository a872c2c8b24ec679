"""Deltas as nobody writes them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import zstandard

from bridge.delta.container import SUFFIX, DeltaHeader, DeltaTensor
from bridge.delta.layout import read_layout
from bridge.delta.segments import FULL, SPARSE
from bridge.safetensors_io import SINGLE_NAME
from bridge.tensors import model_digest
from tests.bridge.delta.weights import records


def write_blocks(folder: Path, base: Path, target: Path, blocks: Mapping[str, bytes]) -> Path:
    """A delta with a sound header, from `base` to `target` of one file, and any blocks."""
    names, header = sound_header(base, target)
    sizes = {name: replace(header.tensors[name], nbytes=len(blocks[name])) for name in names}
    folder.mkdir(exist_ok=True)
    data = replace(header, tensors=sizes).encode() + b"".join(blocks[name] for name in names)
    (folder / (SINGLE_NAME + SUFFIX)).write_bytes(data)
    return folder


@cache
def sound_header(base: Path, target: Path) -> tuple[list[str], DeltaHeader]:
    """Names in the order of the weights file, and a header that lacks the blocks' sizes."""
    (file,) = read_layout(base)
    wanted = records(target)
    digests = model_digest(records(base)), model_digest(wanted), file.digest
    tensors = {name: DeltaTensor(record["blake3"], 0) for name, record in wanted.items()}
    return [info.name for info in file.tensors], DeltaHeader(*digests, tensors)


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
