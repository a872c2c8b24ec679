"""The source and the n-gram that supervised training is measured against are right themselves."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from benchmarks.references import markov
from benchmarks.references.ngram import NGram
from learner_jax.corpus.generated import GeneratedReads

SOURCE = GeneratedReads(organisms=1, reads=1000, length=1000)


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return SOURCE.tables()[0]


@pytest.fixture(scope="module")
def reads() -> list[str]:
    return [document.text for document in SOURCE.documents()]


def test_entropies_are_those_of_a_known_table():
    # given a source that repeats the third base before with probability 0.7
    table = np.full((64, 4), 0.1)
    table[np.arange(64), np.arange(64) // 16] = 0.7
    # then only the third base before says anything
    known = -(0.7 * np.log2(0.7) + 0.3 * np.log2(0.1))
    assert [markov.entropy(table, order) for order in range(4)] == pytest.approx([2, 2, 2, known])
    # and CAAGT has three uniform bases, G after CAA and T after AAG
    bits = 6 - 2 * np.log2(0.1)
    assert markov.bits(table, ["CAAGT", "ACGA"]) == pytest.approx(bits + 6 - np.log2(0.7))


def test_generated_reads_have_the_frequencies_and_the_bits_of_their_table(table, reads):
    # then triples in a million bases are as frequent as said
    triples = Counter(read[i : i + 3] for read in reads for i in range(len(read) - 2))
    found = np.array([triples["".join(t)] for t in itertools.product("ACGT", repeat=3)])
    assert np.abs(found / found.sum() - markov.stationary(table)).max() < 3e-3
    # and a base costs H(3) bits
    assert markov.bits(table, reads) / 1e6 == pytest.approx(markov.entropy(table, 3), rel=1e-2)


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


def test_an_ngram_comes_near_the_entropy_of_a_source_of_its_order(table, reads):
    # when it is fitted to 900,000 bases of an order that it spans
    texts = [read.encode() for read in reads]
    found = NGram.fitted(texts[:900]).bits_per_byte(texts[900:])
    # then it needs hardly more bits than the source does, ends included
    own = markov.bits(table, reads[900:]) / 1e5
    assert own < found < 1.02 * own
