"""Which pieces of which documents lie in which row: pure functions of lengths and a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from learner_jax.packing import first_fit

WINDOW = 8192
"""Pieces that are packed together: all but the window's last rows come out nearly full."""
_DOCUMENTS, _ROWS = 0, 1
"""Streams of random numbers."""


@dataclass(frozen=True)
class Rows:
    """The pieces of each row, in the order of the rows."""

    row: np.ndarray
    """int64 [pieces]: the row of each piece, ascending."""
    start: np.ndarray
    """int64 [pieces]: its first token in the corpus."""
    length: np.ndarray
    """int64 [pieces]: in tokens, at least 2."""
    document: np.ndarray
    """int64 [pieces]: number of its document."""

    @property
    def count(self) -> int:
        """Rows."""
        return int(self.row[-1]) + 1 if len(self.row) else 0


def split_documents(lengths: np.ndarray, held_out_tokens: int, seed: int) -> tuple[np.ndarray, ...]:
    """Draw an order of the documents; the first of them are held out.

    Documents of one token are left out: nothing predicts them.

    Args:
        lengths: int64 [documents], in tokens.
        held_out_tokens: the fewest documents with so many tokens are held out.
        seed: of the run.

    Returns:
        the numbers of the documents to train on and of those held out, int64, in drawn order.
    """
    order = np.random.default_rng([seed, _DOCUMENTS]).permutation(len(lengths))
    order = order[lengths[order] > 1]
    before = np.cumsum(lengths[order]) - lengths[order]
    held_out = before < held_out_tokens
    return order[~held_out], order[held_out]


def pack_documents(documents: np.ndarray, ends: np.ndarray, tokens: int) -> Rows:
    """Pack documents into rows of `tokens`, whole; those that are longer are cut.

    The pieces of a cut document overlap by one token, so that each token but the first is predicted
    exactly once. Pieces are packed by first-fit decreasing, a window of them at a time.

    Args:
        documents: int64 [documents], numbers of documents in the order of packing.
        ends: int64 [all documents], where each ends among the tokens of the corpus.
        tokens: length of a row.
    """
    starts = np.concatenate([[0], ends[:-1]])[documents]
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
    return Rows(row[by_row], start[by_row], length[by_row], document[by_row])


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the rows in an epoch, int64 [rows]."""
    return np.random.default_rng([seed, _ROWS, epoch]).permutation(rows)
