"""Two directories of weights -> a directory of deltas."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from bridge.delta.changes import changed_indices
from bridge.delta.container import SUFFIX, DeltaHeader, DeltaTensor
from bridge.delta.layout import FileLayout, read_layout, tensor_shapes
from bridge.delta.segments import SEGMENT_ELEMENTS, encode
from bridge.safetensors_io import TensorInfo, listed, read_tensor
from bridge.tensors import model_digest, tensor_digest
from runspec.common.canonical import MalformedJson, parse_object
from runspec.common.errors import UserError
from runspec.common.files import new_directory, read_bounded

TENSORS_NAME = "tensors.json"
_MAX_TENSORS_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class TensorChange:
    """What a delta says of one tensor."""

    name: str
    elements: int
    changed: int
    nbytes: int
    """Encoded; 0 where nothing changed."""


@dataclass(frozen=True)
class DeltaSummary:
    """What was written."""

    tensors: tuple[TensorChange, ...]
    weights_bytes: int
    """Of all tensors, whole."""
    delta_bytes: int
    """Of all delta files, headers included."""

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def changed(self) -> int:
        """Elements whose bits differ, of all tensors."""
        return sum(tensor.changed for tensor in self.tensors)


def write_delta(base_dir: Path, new_dir: Path, out_dir: Path, *, threads: int = 1) -> DeltaSummary:
    """Writes what turns the weights of `base_dir` into those of `new_dir`.

    The bytes are a function of both directories' weights alone. Model digests are taken from
    `tensors.json` where one lies there, else computed. In memory are the segments under work.

    Args:
        base_dir: Hugging Face directory of the older version.
        new_dir: of the newer one, its weights in the same layout.
        out_dir: gets `<weights file>.delta` for each safetensors file; appears by one rename.
        threads: that compare and compress.

    Raises:
        UserError: unreadable weights, another layout (names, types, shapes, files), `out_dir`
            exists or cannot be written.
    """
    base, new = read_layout(base_dir), read_layout(new_dir)
    _check_same_layout(base, new)
    base_records, new_records = _records(base_dir, base), _records(new_dir, new)
    digests = model_digest(base_records), model_digest(new_records)
    changes: list[TensorChange] = []
    delta_bytes = 0
    try:
        with new_directory(out_dir) as folder, ThreadPoolExecutor(threads) as pool:
            for old_file, new_file in zip(base, new, strict=True):
                path = folder / (new_file.path.name + SUFFIX)
                changes += _write_file(path, old_file, new_file, digests, new_records, pool)
                delta_bytes += path.stat().st_size
    except FileExistsError as error:
        raise UserError("exists already", place=str(out_dir), remedy="name a new one") from error
    except OSError as error:
        raise UserError(
            f"cannot write a delta: {error.strerror or error}",
            place=str(out_dir),
            remedy="free disk space or mend the permissions, then start again",
        ) from error
    weights = sum(info.nbytes for file in new for info in file.tensors)
    return DeltaSummary(tuple(changes), weights, delta_bytes)


def _check_same_layout(base: list[FileLayout], new: list[FileLayout]) -> None:
    names = [[file.path.name for file in side] for side in (base, new)]
    changed = [a.path.name for a, b in zip(base, new, strict=False) if a.digest != b.digest]
    if names[0] == names[1] and not changed:
        return
    what = f"the header of {listed(changed)}" if names[0] == names[1] else "the names of the files"
    raise UserError(
        f"no delta from {base[0].path.parent}: {what} differ",
        place=str(new[0].path.parent),
        remedy="publish this version whole, as an anchor",
    )


def _records(directory: Path, layout: list[FileLayout]) -> dict[str, dict[str, Any]]:
    """Each tensor's {dtype, shape, blake3}, as `tensors.json` says or from the tensors."""
    path = directory / TENSORS_NAME
    shapes = dict(tensor_shapes(layout))
    if not path.exists():
        infos = {info.name: info for file in layout for info in file.tensors}
        return {
            name: {**shape, "blake3": tensor_digest(read_tensor(infos[name]))}
            for name, shape in shapes.items()
        }
    try:
        records = parse_object(
            read_bounded(path, _MAX_TENSORS_BYTES), max_bytes=_MAX_TENSORS_BYTES
        )["tensors"]
        said = {name: {"dtype": r["dtype"], "shape": r["shape"]} for name, r in records.items()}
    except (OSError, MalformedJson, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not a list of tensors: {error}", place=str(path)) from error
    if said != shapes:
        raise UserError("lists other tensors than the weights beside it", place=str(path))
    return records


def _write_file(
    path: Path,
    base: FileLayout,
    new: FileLayout,
    digests: tuple[str, str],
    records: dict[str, dict[str, Any]],
    pool: ThreadPoolExecutor,
) -> list[TensorChange]:
    changes = []
    # Blocks first, beside: the header that precedes them says how long they are.
    with tempfile.TemporaryFile(dir=path.parent) as blocks:
        for old_info, new_info in zip(base.tensors, new.tensors, strict=True):
            changes.append(_write_block(blocks, old_info, new_info, pool))
        header = DeltaHeader(
            *digests,
            new.digest,
            {c.name: DeltaTensor(records[c.name]["blake3"], c.nbytes) for c in changes},
        )
        blocks.seek(0)
        with path.open("xb") as file:
            file.write(header.encode())
            while piece := blocks.read(2**20):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    return changes


def _write_block(
    blocks: IO[bytes], base: TensorInfo, new: TensorInfo, pool: ThreadPoolExecutor
) -> TensorChange:
    elements = new.nbytes // new.dtype.itemsize
    with bits(base) as old_bits, bits(new) as new_bits:
        starts = range(0, elements, SEGMENT_ELEMENTS)
        parts = [
            (old_bits[at : at + SEGMENT_ELEMENTS], new_bits[at : at + SEGMENT_ELEMENTS])
            for at in starts
        ]
        coded = list(pool.map(lambda part: _code(*part), parts))
        del parts, old_bits, new_bits
    changed = sum(count for count, _ in coded)
    if not changed:
        return TensorChange(new.name, elements, 0, 0)
    return TensorChange(new.name, elements, changed, sum(blocks.write(data) for _, data in coded))


def _code(old: np.ndarray, new: np.ndarray) -> tuple[int, bytes]:
    changed = changed_indices(old, new)
    return len(changed), encode(new, changed)


@contextmanager
def bits(info: TensorInfo) -> Iterator[np.ndarray]:
    """[elements] unsigned integers of the element's size: a tensor's bits, mapped, read-only."""
    dtype = np.dtype(f"<u{info.dtype.itemsize}")
    count = info.nbytes // dtype.itemsize
    if not count:
        yield np.empty(0, dtype)
        return
    yield np.memmap(info.file, dtype, "r", info.offset, (count,))
