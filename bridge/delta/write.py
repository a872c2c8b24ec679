"""Two directories of weights -> a directory of deltas."""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bridge.delta.changes import changed_indices
from bridge.delta.container import SUFFIX, DeltaHeader, DeltaTensor
from bridge.delta.layout import (
    FileLayout,
    Records,
    mapped_bits,
    read_layout,
    read_records,
    tensor_segments,
)
from bridge.delta.segments import encode
from bridge.model_files import output_directory
from bridge.safetensors_io import TENSORS_NAME, TensorInfo, listed, stored_digest
from bridge.tensors import model_digest
from runspec.core.errors import UserError

_AHEAD = 8
"""Segments a thread that may be coded before the first of them is written."""


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
    segments (`bridge.delta.segments`) a thread.

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
                path = folder / (new_file.path.name + SUFFIX)
                _write_file(path, DeltaHeader(*digests, new_file.digest, sizes), blocks)
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


def _write_file(path: Path, header: DeltaHeader, blocks: IO[bytes]) -> None:
    blocks.seek(0)
    with path.open("xb") as file:
        file.write(header.encode())
        shutil.copyfileobj(blocks, file, 2**20)
        file.flush()
        os.fsync(file.fileno())


def _check(info: TensorInfo, expected: str) -> None:
    if stored_digest(info) != expected:
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
            return len(where), encode(new_bits, where)

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
