"""Packing of documents into rows, and the orders that a seed gives."""

from __future__ import annotations

import numpy as np
import pytest

from learner_jax.corpus.layout import epoch_order, pack_documents, split_documents


def test_an_epoch_is_a_permutation_of_its_own() -> None:
    orders = [epoch_order(1000, seed, epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0), (2, 1))]
    for order in orders:
        assert sorted(order) == list(range(1000))
    assert len({order.tobytes() for order in orders}) == 4
    np.testing.assert_array_equal(orders[0], epoch_order(1000, 1, 0))


def test_the_order_is_the_same_on_every_machine() -> None:
    # a change of these numbers changes what every run with a corpus trains on
    assert epoch_order(8, 7, 0).tolist() == [1, 3, 2, 7, 4, 5, 0, 6]
    assert split_documents(np.full(8, 3), 4, 7)[1].tolist() == [6, 3]


@pytest.mark.parametrize("asked", [0, 1, 400, 10**6])
def test_the_fewest_documents_with_enough_tokens_are_held_out(asked: int) -> None:
    lengths = np.random.default_rng(0).integers(2, 30, 100)
    trained, held_out = split_documents(lengths, asked, 3)
    assert sorted([*trained, *held_out]) == list(range(100))
    total = lengths[held_out].sum()
    assert total >= min(asked, lengths.sum())
    assert total - (lengths[held_out[-1]] if len(held_out) else 0) < max(asked, 1)


@pytest.mark.parametrize("tokens", [2, 7, 64])
def test_rows_hold_each_document_whole_or_cut_into_pieces_that_overlap_by_one(tokens: int) -> None:
    lengths = np.random.default_rng(1).integers(2, 100, 300)
    ends = np.cumsum(lengths)
    documents = np.random.default_rng(2).permutation(300)[:250]
    rows = pack_documents(documents, ends, tokens)
    # no row holds more than it has room for
    sums = np.add.reduceat(rows.length, rows.first[:-1])
    assert sums.max() <= tokens and rows.first[-1] == len(rows.start)
    # the pieces of a document follow one another and overlap by one token
    for document in documents:
        of = np.flatnonzero(rows.document == document)
        of = of[np.argsort(rows.start[of])]
        starts, stops = rows.start[of], rows.start[of] + rows.length[of]
        assert (starts[0], stops[-1]) == (ends[document] - lengths[document], ends[document])
        assert (starts[1:] == stops[:-1] - 1).all() and rows.length[of].min() > 1
        assert len(of) == 1 or lengths[document] > tokens
    # few tokens are padding
    assert tokens < 64 or 1 - rows.length.sum() / (rows.count * tokens) < 0.03
