"""Where the bits of two arrays differ."""

from __future__ import annotations

import numpy as np

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
