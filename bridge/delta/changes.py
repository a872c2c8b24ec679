"""Where the bits of two arrays, or of two versions on a disk, differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridge.delta.layout import mapped_bits, tensor_segments
from bridge.safetensors_io import TensorInfo, read_headers
from runspec.core.errors import UserError

_WORD = np.dtype("<u8")
_BLOCK_WORDS = 2**17
"""A megabyte of each side: what is compared is still in the cache when it is looked up."""
_FEW = 1 / 16
"""Share of words that differ above which it is quicker to compare all elements (measured)."""


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
