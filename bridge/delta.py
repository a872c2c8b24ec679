"""Deltas between versions of weights: the elements whose bits changed, and their new bits.

A delta is a directory with one `<weights file>.delta` for each safetensors file. It overwrites, so
that applying it again, after a crash or by mistake, is harmless. docs/deltas.md has the format.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from bridge import delta_file, safetensors_io
from bridge.delta_file import DeltaFile, DeltaTensor, changed_indices, mapped_bits, tensor_segments
from bridge.model_files import output_directory
from bridge.safetensors_io import TensorInfo, listed
from bridge.tensors import model_digest, tensor_digest
from broadcast.layout import TENSORS_NAME
from runspec.core.canonical import MalformedJson, digest_bytes, is_digest
from runspec.core.errors import UserError
from runspec.core.files import read_object

_AHEAD = 8
"""Segments a thread that may be coded before the first of them is written."""
_MAX_THREADS = 8
"""More of them wait for memory."""
Check = Callable[[TensorInfo, np.ndarray], None]
"""Looks at a tensor's bits after the last delta."""
Records = dict[str, dict[str, Any]]
"""For each tensor {dtype, shape, blake3}, as a manifest says them."""


@dataclass(frozen=True)
class FileLayout:
    """One safetensors file."""

    path: Path
    digest: str
    """BLAKE3 of the file's bytes before its first tensor: names, shapes, types, offsets."""
    tensors: tuple[TensorInfo, ...]
    """In the order in which they lie."""


def read_layout(directory: Path) -> list[FileLayout]:
    """The weights files of a Hugging Face directory, by name.

    Raises:
        UserError: no weights, malformed ones, tensors that overlap or leave gaps.
    """
    by_file: dict[Path, list[TensorInfo]] = {}
    for info in safetensors_io.read_headers(directory).values():
        by_file.setdefault(info.file, []).append(info)
    layout = []
    for path, tensors in sorted(by_file.items()):
        tensors.sort(key=lambda info: (info.offset, info.nbytes, info.name))
        with path.open("rb") as file:
            length = file.read(8)
            header = length + file.read(int.from_bytes(length, "little"))
            size = file.seek(0, 2)
        ends = [len(header), *(info.offset + info.nbytes for info in tensors)]
        if [*(info.offset for info in tensors), size] != ends:
            raise UserError("its tensors do not lie one after the other", place=str(path))
        layout.append(FileLayout(path, digest_bytes(header), tuple(tensors)))
    return layout


def tensor_shapes(layout: list[FileLayout]) -> Records:
    """{dtype, shape} of every tensor."""
    return {
        info.name: {"dtype": info.dtype.name, "shape": list(info.shape)}
        for file in layout
        for info in file.tensors
    }


def read_records(directory: Path, layout: list[FileLayout]) -> Records:
    """Each tensor's record, as `tensors.json` says, or computed where there is none.

    Raises:
        UserError: `tensors.json` is malformed or speaks of other tensors.
    """
    path = directory / TENSORS_NAME
    shapes = tensor_shapes(layout)
    if not path.exists():
        return {
            info.name: safetensors_io.stored_record(info)
            for file in layout
            for info in file.tensors
        }
    try:
        records = read_object(path, safetensors_io.MAX_RECORDS_BYTES)["tensors"]
        said = {name: {k: v for k, v in r.items() if k != "blake3"} for name, r in records.items()}
        if said != shapes or not all(is_digest(r["blake3"]) for r in records.values()):
            raise MalformedJson("not of the weights beside it")
    except (OSError, MalformedJson, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not the tensors' records: {error}", place=str(path)) from error
    return records


class DamagedWeights(UserError):
    """The newer weights are not what their `tensors.json` says."""


@dataclass(frozen=True)
class TensorChange:
    """One tensor in a delta, in numbers."""

    name: str
    elements: int
    changed: int
    nbytes: int
    """Bytes of its block in the delta."""


@dataclass(frozen=True)
class DeltaSummary:
    """Summary of a delta that was written."""

    tensors: tuple[TensorChange, ...]
    weights_bytes: int
    """Bytes of all tensors, whole."""
    delta_bytes: int
    """Bytes of all delta files, headers included."""

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def changed(self) -> int:
        """Elements whose bits differ, of all tensors."""
        return sum(tensor.changed for tensor in self.tensors)


def write_delta(base_dir: Path, new_dir: Path, out_dir: Path, *, threads: int = 1) -> DeltaSummary:
    """Writes what turns the weights of `base_dir` into those of `new_dir`.

    The bytes are a function of both directories' weights alone, whatever `threads` is. Digests are
    taken from `tensors.json` where one lies beside the weights, else computed. The newer tensors
    are held against them: what damaged ones give nobody could apply. The older need not be: a wrong
    bit there is one more change, unless it should happen to be the new one. In memory are a few
    segments (`SEGMENT_ELEMENTS`) a thread.

    Args:
        base_dir: Hugging Face directory of the older version.
        new_dir: of the newer one, its weights in the same layout.
        out_dir: gets `<weights file>.delta` for each safetensors file; appears by one rename.
        threads: that compare and compress.

    Raises:
        DamagedWeights: the newer ones.
        UserError: unreadable weights, another layout (names, types, shapes, files), `out_dir`
            exists or cannot be written.
    """
    base, new = read_layout(base_dir), read_layout(new_dir)
    _check_same_layout(base, new)
    records = read_records(new_dir, new)
    digests = model_digest(read_records(base_dir, base)), model_digest(records)
    changes: list[TensorChange] = []
    delta_bytes = 0
    with output_directory(out_dir) as folder, ThreadPoolExecutor(threads) as pool:
        for old_file, new_file in zip(base, new, strict=True):
            with tempfile.TemporaryFile(dir=folder) as blocks:
                written = _write_blocks(blocks, old_file, new_file, records, pool, _AHEAD * threads)
                sizes = {c.name: DeltaTensor(records[c.name]["blake3"], c.nbytes) for c in written}
                path = folder / (new_file.path.name + delta_file.SUFFIX)
                blocks.seek(0)
                with path.open("xb") as file:
                    file.write(delta_file.DeltaHeader(*digests, new_file.digest, sizes).encode())
                    shutil.copyfileobj(blocks, file, 2**20)
                    file.flush()
                    os.fsync(file.fileno())
            changes += written
            delta_bytes += path.stat().st_size
    weights = sum(info.nbytes for file in new for info in file.tensors)
    return DeltaSummary(tuple(changes), weights, delta_bytes)


def _check_same_layout(base: list[FileLayout], new: list[FileLayout]) -> None:
    names = [[file.path.name for file in side] for side in (base, new)]
    if names[0] != names[1]:
        what = f"its weights lie in {listed(names[1])}, not in {listed(names[0])}"
    else:
        other = [a.path.name for a, b in zip(base, new, strict=True) if a.digest != b.digest]
        if not other:
            return
        what = f"other names, types, shapes or order of tensors in {listed(other)}"
    raise UserError(
        f"no delta from {base[0].path.parent}: {what}",
        place=str(new[0].path.parent),
        remedy="publish this version whole, as an anchor",
    )


def _check(info: TensorInfo, expected: str) -> None:
    if safetensors_io.stored_digest(info) != expected:
        raise DamagedWeights(
            f"tensor {info.name}: its bits are not those that {TENSORS_NAME} names",
            place=str(info.file),
            remedy="the file is damaged: export this version again",
        )


def _write_blocks(
    blocks: IO[bytes],
    base: FileLayout,
    new: FileLayout,
    records: Records,
    pool: ThreadPoolExecutor,
    ahead: int,
) -> list[TensorChange]:
    """Writes each tensor's segments, `ahead` of them coded at a time. Meanwhile the new tensors are
    checked, each while what was read of it is still in memory.
    """
    segments = [(info, cut) for info in new.tensors for cut in tensor_segments(info)]
    changed = dict.fromkeys((info.name for info in new.tensors), 0)
    nbytes = dict(changed)
    checks: list[Future[None]] = []
    with base.path.open("rb") as old_file, new.path.open("rb") as new_file:

        def code(segment: tuple[TensorInfo, slice]) -> tuple[int, bytes]:
            old_bits, new_bits = (mapped_bits(file, *segment) for file in (old_file, new_file))
            where = changed_indices(old_bits, new_bits)
            return len(where), delta_file.encode(new_bits, where)

        for first in range(0, len(segments), ahead):
            window = segments[first : first + ahead]
            coding = pool.map(code, window)
            begun = [info for info, cut in window if cut.start == info.offset]
            checks += [pool.submit(_check, info, records[info.name]["blake3"]) for info in begun]
            for (info, _), (count, coded) in zip(window, coding, strict=True):
                changed[info.name] += count
                nbytes[info.name] += blocks.write(coded)
        for check in checks:
            check.result()
    return [
        TensorChange(
            info.name, info.nbytes // info.dtype.itemsize, changed[info.name], nbytes[info.name]
        )
        for info in new.tensors
    ]


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
    memory are one segment (`SEGMENT_ELEMENTS`) a thread and the headers.

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
    path = delta / (file.path.name + delta_file.SUFFIX)
    opened = delta_file.read_delta_file(path, [info.name for info in file.tensors])
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
            block = block[delta_file.overwrite(bits[at : at + size], block) :]
            at += size
        if block:
            raise delta_file.MalformedSegment(f"{len(block)} bytes after the last segment")
    except delta_file.MalformedSegment as error:
        raise UserError(
            f"tensor {info.name}: malformed delta: {error} (element {at} and after)",
            place=str(path),
        ) from error
