"""Rows of a corpus: which documents go where, as tables on disk, and the order of an epoch.

All is a function of the documents' lengths and of the seed, on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from learner_jax.packing import first_fit

WINDOW = 8192
"""Pieces that are packed together: all but the window's last rows come out nearly full."""
_DOCUMENT_STREAM, _ROW_STREAM = 0, 1
"""Streams of random numbers."""


@dataclass(frozen=True)
class Rows:
    """The pieces of each row, in the order of the rows."""

    first: np.ndarray
    """int64 [rows + 1]: the first piece of each row, and the number of pieces."""
    start: np.ndarray
    """int64 [pieces]: first token of a piece in the corpus."""
    length: np.ndarray
    """int64 [pieces]: in tokens, at least 2."""
    document: np.ndarray
    """int64 [pieces]: number of its document."""

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.first) - 1

    @classmethod
    def load(cls, folder: Path) -> Rows:
        """Map the arrays that `RowsWriter` wrote.

        Raises:
            OSError: a file is missing.
            ValueError: a file is damaged.
        """
        rows = cls(*(mapped(folder / name) for name in cls.__dataclass_fields__))
        if {len(rows.start), len(rows.length), len(rows.document)} != {int(rows.first[-1])}:
            raise ValueError("pieces of rows are missing")
        return rows


class RowsWriter:
    """Writes the rows of shard after shard into a new folder, a file for each array.

    Args:
        folder: is made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._files = {name: (folder / name).open("wb") for name in Rows.__dataclass_fields__}
        self._pieces = 0

    def add(self, rows: Rows) -> None:
        """Append the rows of a shard."""
        for name, values in vars(rows).items():
            values = values[:-1] + self._pieces if name == "first" else values
            self._files[name].write(values.astype("<i8").tobytes())
        self._pieces += len(rows.start)

    def close(self) -> None:
        """Write the end of the last row, and close the files."""
        self._files["first"].write(np.int64(self._pieces).tobytes())
        for file in self._files.values():
            file.close()


def mapped(path: Path) -> np.ndarray:
    """Map a file of int64; numpy maps no empty one."""
    size = path.stat().st_size
    return np.memmap(path, "<i8", "r") if size else np.zeros(0, np.int64)


def split_documents(
    lengths: np.ndarray, held_out_tokens: int, seed: int, shard: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Draw an order of the documents of a shard; the first of them are held out.

    Args:
        lengths: int64 [documents], in tokens.
        held_out_tokens: the fewest documents with so many tokens are held out.
        seed: of the run.
        shard: number of the shard.

    Returns:
        the numbers of the documents to train on and of those held out, int64, in drawn order.
    """
    order = _permutation(len(lengths), seed, _DOCUMENT_STREAM, *([shard] if shard else []))
    before = np.cumsum(lengths[order]) - lengths[order]
    held_out = before < held_out_tokens
    return order[~held_out], order[held_out]


def pack_documents(documents: np.ndarray, ends: np.ndarray, tokens: int) -> Rows:
    """Pack documents into rows of `tokens`, whole; those that are longer are cut.

    The pieces of a cut document overlap by one token, so that each token but the first is predicted
    exactly once. Pieces are packed by first-fit decreasing, a window of them at a time.

    Args:
        documents: int64 [documents], numbers of documents in the order of packing; each has two
            tokens or more.
        ends: int64 [all documents], where each ends among the tokens of the corpus.
        tokens: length of a row, at least 2.
    """
    starts = np.where(documents > 0, ends[documents - 1], 0)
    lengths = ends[documents] - starts
    # n tokens make n - 1 predictions, of which a piece has at most tokens - 1.
    pieces = -(-(lengths - 1) // (tokens - 1))
    document = np.repeat(documents, pieces)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = number * (tokens - 1)
    start = np.repeat(starts, pieces) + offset
    length = np.minimum(tokens, np.repeat(lengths, pieces) - offset)
    row = np.empty(len(start), np.int64)
    used = 0
    for begin in range(0, len(start), WINDOW):
        window = length[begin : begin + WINDOW]
        order = np.argsort(-window, kind="stable")
        found = np.empty(len(window), np.int64)
        found[order] = first_fit(window[order].tolist(), tokens)
        row[begin : begin + WINDOW] = used + found
        used += int(found.max()) + 1
    by_row = np.argsort(row, kind="stable")
    first = np.searchsorted(row[by_row], np.arange(used + 1))
    return Rows(first, start[by_row], length[by_row], document[by_row])


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the rows in an epoch, int64 [rows]."""
    return _permutation(rows, seed, _ROW_STREAM, epoch)


def _permutation(count: int, *key: int) -> np.ndarray:
    """Draw a permutation, int64 [count]."""
    # numpy promises the raw bits of a bit generator for ever, and those of `permutation` it does
    # not: https://numpy.org/neps/nep-0019-rng-policy.html
    draws = np.random.PCG64(list(key)).random_raw(count)
    return np.argsort(draws, kind="stable")
