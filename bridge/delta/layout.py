"""How the weights of a directory lie in its files, and where the bits of two versions differ."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from bridge.delta.container import SEGMENT_ELEMENTS
from bridge.safetensors_io import (
    MAX_RECORDS_BYTES,
    TENSORS_NAME,
    TensorInfo,
    read_headers,
    stored_record,
)
from runspec.core.canonical import MalformedJson, digest_bytes, is_digest
from runspec.core.errors import UserError
from runspec.core.files import read_object

# Linux: all pages at once. Written ones would come one a fault; read ones come by sixteen, and not
# while Python's lock is held.
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
Records = dict[str, dict[str, Any]]
"""For each tensor {dtype, shape, blake3}, as a manifest says them."""
_WORD = np.dtype("<u8")
_BLOCK_WORDS = 2**17
"""A megabyte of each side: what is compared is still in the cache when it is looked up."""
_FEW = 1 / 16
"""Share of words that differ above which it is quicker to compare all elements (measured)."""


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
    for info in read_headers(directory).values():
        by_file.setdefault(info.file, []).append(info)
    return [_file_layout(path, by_file[path]) for path in sorted(by_file)]


def _file_layout(path: Path, tensors: list[TensorInfo]) -> FileLayout:
    tensors.sort(key=lambda info: (info.offset, info.nbytes, info.name))
    with path.open("rb") as file:
        length = file.read(8)
        header = length + file.read(int.from_bytes(length, "little"))
        size = file.seek(0, 2)
    ends = [len(header), *(info.offset + info.nbytes for info in tensors)]
    if [*(info.offset for info in tensors), size] != ends:
        raise UserError("its tensors do not lie one after the other", place=str(path))
    return FileLayout(path, digest_bytes(header), tuple(tensors))


def tensor_segments(info: TensorInfo) -> list[slice]:
    """Where in its file the segments of a tensor lie, in bytes."""
    step, end = SEGMENT_ELEMENTS * info.dtype.itemsize, info.offset + info.nbytes
    return [slice(at, min(at + step, end)) for at in range(info.offset, end, step)]


def mapped_bits(
    file: IO[bytes], info: TensorInfo, cut: slice, *, writable: bool = False
) -> np.ndarray:
    """[elements] bits of a tensor's part as they lie in its file, without a copy.

    Args:
        file: open, for writing too where `writable`.
        info: the tensor.
        cut: which bytes of the file.
        writable: what is written to the array is written to the file.

    Raises:
        UserError: it cannot be mapped, as where the file has become shorter.
    """
    dtype = np.dtype(f"<u{info.dtype.itemsize}")
    if cut.start == cut.stop:  # nothing cannot be mapped
        return np.empty(0, dtype)
    before = cut.start % mmap.ALLOCATIONGRANULARITY
    try:
        pages = mmap.mmap(
            file.fileno(),
            cut.stop - cut.start + before,
            flags=mmap.MAP_SHARED | (_POPULATE if writable else 0),
            prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
            offset=cut.start - before,
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"tensor {info.name}: cannot be mapped: {error}", place=file.name
        ) from error
    return np.frombuffer(pages, dtype, offset=before)


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
        return {info.name: stored_record(info) for file in layout for info in file.tensors}
    try:
        records = read_object(path, MAX_RECORDS_BYTES)["tensors"]
        said = {name: {k: v for k, v in r.items() if k != "blake3"} for name, r in records.items()}
        if said != shapes or not all(is_digest(r["blake3"]) for r in records.values()):
            raise MalformedJson("not of the weights beside it")
    except (OSError, MalformedJson, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not the tensors' records: {error}", place=str(path)) from error
    return records


def changed_indices(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Indices of the elements whose bits differ, ascending.

    Compares eight bytes at a time and looks for elements only in the words that differ.

    Args:
        old, new: [n] of the same unsigned type of 2 or 4 bytes.

    Returns:
        [changed] intp.
    """
    per_word = _WORD.itemsize // old.itemsize
    whole = len(old) - len(old) % per_word
    step = _BLOCK_WORDS * per_word
    found = [
        _changed_in_words(old[at : min(at + step, whole)], new[at : min(at + step, whole)]) + at
        for at in range(0, whole, step)
    ]
    found.append(np.flatnonzero(old[whole:] != new[whole:]) + whole)
    return np.concatenate(found)


def _changed_in_words(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    old_words, new_words = old.view(_WORD), new.view(_WORD)
    differs = old_words != new_words
    if np.count_nonzero(differs) > len(differs) * _FEW:
        return np.flatnonzero(old != new)
    words = np.flatnonzero(differs)
    per_word = _WORD.itemsize // old.itemsize
    elements = np.flatnonzero((old_words[words] ^ new_words[words]).view(old.dtype))
    return words[elements // per_word] * per_word + elements % per_word


@dataclass(frozen=True)
class ChangedElements:
    """Elements of one tensor whose bits differ."""

    info: TensorInfo
    """The tensor, in the newer version."""
    indices: np.ndarray
    """intp [changed], ascending: in the flattened tensor."""
    bits: np.ndarray
    """u16 or u32 [changed]: the newer version's."""


def changed_elements(base_dir: Path, new_dir: Path) -> Iterator[ChangedElements]:
    """Yield the elements whose bits differ, a segment of a tensor at a time, in file order.

    Memory: the pages of one segment (2**21 elements) of both versions, and its changes.

    Args:
        base_dir: Hugging Face directory of the older version.
        new_dir: of the newer one.

    Raises:
        UserError: other tensors, types or shapes, or files that cannot be read.
    """
    base, new = read_headers(base_dir), read_headers(new_dir)
    shapes = [{n: (i.dtype, i.shape) for n, i in infos.items()} for infos in (base, new)]
    if shapes[0] != shapes[1]:
        raise UserError(f"holds other tensors than {base_dir}", place=str(new_dir))
    for name, info in sorted(new.items(), key=lambda item: (item[1].file, item[1].offset)):
        with base[name].file.open("rb") as old_file, info.file.open("rb") as new_file:
            at = 0
            cuts = zip(tensor_segments(base[name]), tensor_segments(info), strict=True)
            for old_cut, new_cut in cuts:
                bits = mapped_bits(new_file, info, new_cut)
                changed = changed_indices(mapped_bits(old_file, base[name], old_cut), bits)
                if len(changed):
                    yield ChangedElements(info, changed + at, bits[changed])
                at += len(bits)
