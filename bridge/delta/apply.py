"""Deltas onto the weights of a directory, in place."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bridge.delta.container import SUFFIX, DeltaFile, read_delta_file
from bridge.delta.layout import (
    FileLayout,
    Records,
    mapped_bits,
    read_layout,
    read_records,
    tensor_segments,
    tensor_shapes,
)
from bridge.delta.segments import MalformedSegment, overwrite
from bridge.safetensors_io import TENSORS_NAME, TensorInfo
from bridge.tensors import model_digest, tensor_digest
from runspec.core.errors import UserError

_MAX_THREADS = 8
"""More of them wait for memory."""
Check = Callable[[TensorInfo, np.ndarray], None]
"""Looks at a tensor's bits after the last delta."""


def delta_tensors(directory: Path, delta: Path) -> Records:
    """The records {dtype, shape, blake3} of the version that a delta makes of a directory's.

    Args:
        directory: holds the version that the delta was made against.
        delta: what `write_delta` wrote.

    Raises:
        UserError: malformed weights or delta, or one that was made against another version, as far
            as layout and `tensors.json` tell.
    """
    layout = read_layout(directory)
    chains = [[open_delta(file, delta)] for file in layout]
    digests = {name: t.blake3 for (file,) in chains for name, t in file.header.tensors.items()}
    records = {
        name: {**shape, "blake3": digests[name]} for name, shape in tensor_shapes(layout).items()
    }
    _check_versions(directory, layout, chains, model_digest(records))
    return records


def apply_deltas(
    directory: Path, deltas: Sequence[Path], tensors: Mapping[str, Mapping[str, Any]]
) -> None:
    """Turns the weights in a directory into a later version's, in place on the mapped files.

    What lies there may be the base, the target, or a mixture that a crash left: deltas overwrite.
    At the end the digest of every tensor is compared, of those too that no delta touches. In
    memory are one segment (`bridge.delta.segments`) a thread and the headers.

    Args:
        directory: holds the weights that the first delta was made against.
        deltas: delta directories, each made against what the one before it makes.
        tensors: records {dtype, shape, blake3} of the version that the last delta makes.

    Raises:
        UserError: names the file, and the tensor where it is one. A delta of another layout, base
            or target is refused before a byte is written. After a malformed block or a digest that
            differs the weights are of no version, and the directory must be removed.
    """
    layout = read_layout(directory)
    target = {name: dict(record) for name, record in tensors.items()}
    shapes = {n: {k: v for k, v in r.items() if k != "blake3"} for n, r in target.items()}
    if tensor_shapes(layout) != shapes:
        raise UserError("holds other tensors than the version to be made", place=str(directory))
    chains = [[open_delta(file, delta) for delta in deltas] for file in layout]
    _check_versions(directory, layout, chains, model_digest(target))

    def check(info: TensorInfo, bits: np.ndarray) -> None:
        if tensor_digest(bits) != target[info.name]["blake3"]:
            raise UserError(
                f"tensor {info.name}: its bits are not those of the version to be made",
                place=str(info.file),
                remedy="the weights that the delta was applied to were others, or damaged: "
                "remove them and fetch the version whole",
            )

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        for file, chain in zip(layout, chains, strict=True):
            overwrite_file(file, chain, check, pool)


def overwrite_file(
    file: FileLayout, chain: Sequence[DeltaFile], check: Check, pool: ThreadPoolExecutor
) -> None:
    """Applies a chain of delta files to one weights file, a tensor a task of the pool.

    Raises:
        UserError: a malformed block, by delta file and tensor, or what `check` raises.
    """
    try:
        with file.path.open("r+b") as weights:
            deltas = [(delta.path, _blocks(delta, file.tensors)) for delta in chain]

            def work(info: TensorInfo) -> None:
                whole = slice(info.offset, info.offset + info.nbytes)
                bits = mapped_bits(weights, info, whole, writable=True)
                for path, blocks in deltas:
                    _overwrite_tensor(info, bits, path, blocks[info.name])
                check(info, bits)

            largest_first = sorted(file.tensors, key=lambda info: info.nbytes, reverse=True)
            for _ in pool.map(work, largest_first):
                pass
    except OSError as error:
        raise UserError(f"cannot apply a delta: {error.strerror}", place=str(file.path)) from error


def open_delta(file: FileLayout, delta: Path) -> DeltaFile:
    """The delta of a weights file, whose header has been checked against the file's.

    Raises:
        UserError: malformed, or made for another layout.
    """
    path = delta / (file.path.name + SUFFIX)
    opened = read_delta_file(path, [info.name for info in file.tensors])
    if opened.header.layout != file.digest:
        raise UserError(f"made for weights that lie otherwise than {file.path}", place=str(path))
    return opened


def _check_versions(
    directory: Path, layout: list[FileLayout], chains: list[list[DeltaFile]], target: str
) -> None:
    """Refuses deltas that do not lead from what the directory says it holds to the target."""
    for files in zip(*chains, strict=True):
        if len({(file.header.base, file.header.target) for file in files}) > 1:
            folder = files[0].path.parent
            raise UserError("its files are of different deltas", place=str(folder))
    chain = chains[0] if chains else []
    for delta, after in pairwise(chain):
        if delta.header.target != after.header.base:
            raise UserError(f"not made against what {delta.path} makes", place=str(after.path))
    if not chain:
        return
    if chain[-1].header.target != target:
        raise UserError("makes another version than the one asked for", place=str(chain[-1].path))
    if (directory / TENSORS_NAME).exists():
        # A later version than the first's base too: applying again does no harm.
        held = model_digest(read_records(directory, layout))
        if held not in {target, *(delta.header.base for delta in chain)}:
            raise UserError(
                f"made against another version than the one in {directory}",
                place=str(chain[0].path),
            )


def _blocks(delta: DeltaFile, tensors: Sequence[TensorInfo]) -> dict[str, memoryview]:
    with delta.path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    at = delta.start
    blocks = {}
    for info in tensors:
        blocks[info.name] = data[at : at + delta.header.tensors[info.name].nbytes]
        at += len(blocks[info.name])
    return blocks


def _overwrite_tensor(info: TensorInfo, bits: np.ndarray, path: Path, block: memoryview) -> None:
    """Applies one tensor's block of the delta file at `path`."""
    at = 0
    try:
        for cut in tensor_segments(info):
            size = (cut.stop - cut.start) // info.dtype.itemsize
            block = block[overwrite(bits[at : at + size], block) :]
            at += size
        if block:
            raise MalformedSegment(f"{len(block)} bytes after the last segment")
    except MalformedSegment as error:
        raise UserError(
            f"tensor {info.name}: malformed delta: {error} (element {at} and after)",
            place=str(path),
        ) from error
