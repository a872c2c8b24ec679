"""Where the bits of two arrays differ."""

from __future__ import annotations

import numpy as np

_WORD = np.dtype(np.uint64)
_BLOCK_WORDS = 2**16
"""Half a megabyte of each side: what is compared is still in the cache when it is looked up."""


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
    old_words, new_words = old[:whole].view(_WORD), new[:whole].view(_WORD)
    found = [
        _block(old_words[at : at + _BLOCK_WORDS], new_words[at : at + _BLOCK_WORDS], old.dtype)
        + at * per_word
        for at in range(0, len(old_words), _BLOCK_WORDS)
    ]
    found.append(np.flatnonzero(old[whole:] != new[whole:]) + whole)
    return np.concatenate(found)


def _block(old: np.ndarray, new: np.ndarray, dtype: np.dtype) -> np.ndarray:
    words = np.flatnonzero(old != new)
    per_word = _WORD.itemsize // dtype.itemsize
    # Little-endian: the first element of a word is its lowest bytes, and first in the view too.
    elements = np.flatnonzero((old[words] ^ new[words]).view(dtype))
    return words[elements // per_word] * per_word + elements % per_word
