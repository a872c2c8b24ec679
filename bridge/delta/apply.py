"""Deltas onto the weights of a directory, in place."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from bridge.delta.container import SUFFIX, DeltaFile, read_delta_file
from bridge.delta.layout import FileLayout, read_layout, tensor_shapes
from bridge.delta.segments import SEGMENT_ELEMENTS, MalformedSegment, overwrite
from bridge.safetensors_io import TensorInfo, listed
from bridge.tensors import model_digest
from runspec.common.errors import UserError


def delta_tensors(directory: Path, delta: Path) -> dict[str, dict[str, Any]]:
    """The records {dtype, shape, blake3} of the version that a delta makes of a directory.

    Raises:
        UserError: malformed weights or delta, or one of another layout.
    """
    layout = read_layout(directory)
    digests = {
        name: tensor.blake3
        for file in layout
        for name, tensor in _open(file, delta).header.tensors.items()
    }
    return {name: {**shape, "blake3": digests[name]} for name, shape in tensor_shapes(layout)}


def apply_deltas(
    directory: Path, deltas: Sequence[Path], tensors: Mapping[str, Mapping[str, Any]]
) -> None:
    """Turns the weights in a directory into a later version's, in place.

    What is there may be the base, the target, or a mixture that a crash left: the deltas overwrite.
    At the end every tensor's digest is compared, those included that no delta touches.

    Args:
        directory: Hugging Face directory that holds the first delta's base.
        deltas: delta directories, each made against what the one before it makes.
        tensors: records {dtype, shape, blake3} of the version that the last delta makes.

    Raises:
        UserError: names file and tensor. A delta of another layout, base or target is refused
            before a byte is written; a malformed one, or a base that was damaged, leaves weights
            that are of no use and must be removed.
    """
    layout = read_layout(directory)
    shapes = {name: {"dtype": r["dtype"], "shape": list(r["shape"])} for name, r in tensors.items()}
    if dict(tensor_shapes(layout)) != shapes:
        raise UserError("holds other tensors than the version has", place=str(directory))
    chains = [[_open(file, delta) for delta in deltas] for file in layout]
    _check_chain(chains, model_digest({n: dict(r) for n, r in tensors.items()}))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for file, chain in zip(layout, chains, strict=True):
            _apply_file(file, chain, tensors, pool)


def _open(file: FileLayout, delta: Path) -> DeltaFile:
    opened = read_delta_file(delta / (file.path.name + SUFFIX))
    if opened.header.layout != file.digest:
        raise UserError(
            f"made for weights of another layout than {file.path}", place=str(opened.path)
        )
    names = {info.name for info in file.tensors}
    if set(opened.header.tensors) != names:
        odd = listed(names ^ set(opened.header.tensors))
        raise UserError(f"tensors {odd[:500]} are not those of {file.path}", place=str(opened.path))
    return opened


def _check_chain(chains: list[list[DeltaFile]], target: str) -> None:
    for chain in chains:
        for delta, after in zip(chain, chain[1:], strict=False):
            if delta.header.target != after.header.base:
                raise UserError(f"does not continue {delta.path}", place=str(after.path))
        if chain and chain[-1].header.target != target:
            raise UserError("makes another version", place=str(chain[-1].path))


def _apply_file(
    file: FileLayout,
    chain: list[DeltaFile],
    tensors: Mapping[str, Mapping[str, Any]],
    pool: ThreadPoolExecutor,
) -> None:
    with file.path.open("r+b") as weights:
        mapped = mmap.mmap(weights.fileno(), 0)
        blocks = [_blocks(delta, file.tensors) for delta in chain]
        list(
            pool.map(
                lambda info: _apply_tensor(
                    info, mapped, [b[info.name] for b in blocks], tensors[info.name]["blake3"]
                ),
                file.tensors,
            )
        )


def _blocks(delta: DeltaFile, tensors: Sequence[TensorInfo]) -> dict[str, memoryview]:
    data = memoryview(mmap.mmap(os.open(delta.path, os.O_RDONLY), 0, prot=mmap.PROT_READ))
    at = delta.start
    blocks = {}
    for info in tensors:
        size = delta.header.tensors[info.name].nbytes
        blocks[info.name] = data[at : at + size]
        at += size
    return blocks


def _apply_tensor(
    info: TensorInfo, mapped: mmap.mmap, blocks: list[memoryview], digest: str
) -> None:
    dtype = np.dtype(f"<u{info.dtype.itemsize}")
    target = np.frombuffer(mapped, dtype, info.nbytes // dtype.itemsize, info.offset)
    hasher = blake3()
    blocks = [block for block in blocks if len(block)]
    try:
        for at in range(0, len(target), SEGMENT_ELEMENTS):
            segment = target[at : at + SEGMENT_ELEMENTS]
            blocks = [block[overwrite(segment, block) :] for block in blocks]
            hasher.update(segment.view(np.uint8).data)
        if any(len(block) for block in blocks):
            raise MalformedSegment("bytes after the last segment")
    except MalformedSegment as error:
        raise UserError(
            f"tensor {info.name}: malformed delta: {error}", place=str(info.file)
        ) from error
    if hasher.hexdigest() != digest:
        raise UserError(f"tensor {info.name}: digest differs", place=str(info.file))
