"""The source and the n-gram that supervised training is measured against are right themselves."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from benchmarks.references.markov import LEAST_GAP, PROBABILITIES, MarkovSource
from benchmarks.references.ngram import NGram


@pytest.fixture(scope="module")
def source() -> MarkovSource:
    return MarkovSource.drawn(0)


def test_the_third_base_before_says_more_than_two_do(source):
    # then H(3) is the entropy of the four probabilities, and H falls with every base known
    p = np.array(PROBABILITIES)
    entropies = [source.entropy(order) for order in range(4)]
    assert entropies[3] == pytest.approx(-(p * np.log2(p)).sum(), abs=1e-12)
    assert entropies == sorted(entropies, reverse=True) and entropies[0] <= 2
    assert entropies[2] - entropies[3] >= LEAST_GAP


def test_its_documents_have_its_frequencies_and_its_bits(source):
    # given a million sampled bases
    documents = source.documents(1000, 1000, seed=3)
    # then triples are as frequent as said, also at the start, and a base costs H(3) bits
    for texts in (documents, [each[:3] for each in source.documents(60_000, 3, seed=4)]):
        triples = Counter(text[i : i + 3] for text in texts for i in range(len(text) - 2))
        found = np.array([triples["".join(t)] for t in itertools.product("ACGT", repeat=3)])
        assert np.abs(found / found.sum() - source.stationary()).max() < 3e-3
    assert source.bits(documents) / 1e6 == pytest.approx(source.entropy(3), rel=5e-3)
    # and the same seed gives the same documents
    assert source.documents(2, 9, seed=5) == source.documents(2, 9, seed=5)


def test_bits_are_the_product_of_the_probabilities(source):
    # given the probability of CAAGT by hand: CAA from the stationary state, then two bases
    p = source.stationary()[0b010000] * source.table[0b010000, 2] * source.table[0b000010, 3]
    assert source.bits(["CAAGT"]) == pytest.approx(-np.log2(p))


def kneser_ney(documents: list[bytes], order: int, context: tuple[int, ...], symbol: int) -> float:
    """The formula of the module, from dictionaries."""
    padded = [[256] * (order - 1) + list(document) + [256] for document in documents]
    grams = Counter(tuple(d[i : i + order]) for d in padded for i in range(len(d) - order + 1))
    for _ in range(order - 1 - len(context)):
        grams = Counter(gram[1:] for gram in grams)
    once, twice = (sum(count == n for count in grams.values()) for n in (1, 2))
    discount = once / (once + 2 * twice) if once else 0.5
    shorter = kneser_ney(documents, order, context[1:], symbol) if context else 1 / 257
    after = {gram[-1]: count for gram, count in grams.items() if gram[:-1] == context}
    if not after:
        return shorter
    own = max(after.get(symbol, 0) - discount, 0) + discount * len(after) * shorter
    return own / sum(after.values())


def test_an_ngram_has_the_probabilities_of_the_formula():
    # given documents, and others with contexts that they lack
    documents, held_out = [b"abracadabra", b"a banana", b""], [b"bra ana", b"xyz", b""]
    model = NGram.fitted(documents, order=3)
    # then p of each byte and end is the formula's
    expected = [
        kneser_ney(documents, 3, tuple(padded[i : i + 2]), padded[i + 2])
        for padded in ([256, 256, *each, 256] for each in held_out)
        for i in range(len(padded) - 2)
    ]
    np.testing.assert_allclose(model.probabilities(held_out), expected, rtol=1e-12)
    # and those of all symbols after a context add up to 1
    after = [kneser_ney(documents, 3, (98, 114), symbol) for symbol in range(257)]
    assert sum(after) == pytest.approx(1)


def test_an_ngram_comes_near_the_entropy_of_a_source_of_its_order(source):
    # when it is fitted to 400,000 bases of an order that it spans
    train, held_out = source.documents(400, 1000, seed=1), source.documents(100, 1000, seed=2)
    found = NGram.fitted([text.encode() for text in train]).bits_per_byte(
        [text.encode() for text in held_out]
    )
    # then it needs hardly more bits than the source does, ends included
    assert source.bits(held_out) / 1e5 < found < 1.02 * source.bits(held_out) / 1e5
