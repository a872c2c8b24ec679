"""What the campaign `linear_probe` computes, on few reads."""

from __future__ import annotations

import numpy as np
import pytest

from learner_jax.corpus.generated import GeneratedReads
from tests.campaigns.linear_probe import area, counts, likeliest, panels, probe


def test_the_area_is_the_share_of_pairs_in_order() -> None:
    draw = np.random.default_rng(0)
    lower, higher = draw.integers(0, 9, 40), draw.integers(3, 12, 30)
    pairs = [(high > low) + (high == low) / 2 for low in lower for high in higher]
    assert area(lower, higher) == pytest.approx(np.mean(pairs))


def test_the_probe_finds_what_is_linear_and_is_tested_on_reads_that_it_has_not_seen() -> None:
    # given labels that are linear in the features of most reads
    draw = np.random.default_rng(1)
    features, labels = draw.normal(size=(2000, 6)), draw.integers(0, 3, 2000)
    features[np.arange(2000), labels] += 6
    # then the odd reads have theirs, and where features say nothing they have one by chance
    assert (probe(features, labels) == labels[1::2]).mean() > 0.99
    guessed = probe(draw.normal(size=(2000, 6)), labels)
    assert 0.25 < (guessed == labels[1::2]).mean() < 0.42


def test_tables_tell_organisms_apart_and_counts_are_of_every_place() -> None:
    source = GeneratedReads(organisms=4, reads=200, length=100)
    documents = list(source.documents())
    texts = [document.text for document in documents]
    organisms = [int(document.name.partition("-")[0]) for document in documents]
    assert (likeliest(source.tables(), texts) == organisms).mean() > 0.98
    found = counts(["ACGTACGT", "AAAAA"])
    assert found.shape == (2, 256) and found.sum(axis=1).tolist() == [5, 2]
    assert (found[0, 0b00011011], found[1, 0]) == (2, 2)


def test_the_known_panel_has_the_organisms_of_the_profile_in_new_reads() -> None:
    (tables, reads, organisms), (others, unseen, _) = panels(reads=50).values()
    trained = GeneratedReads(organisms=8, reads=100_000, length=100, seed=0)
    np.testing.assert_array_equal(tables, trained.tables())
    assert (likeliest(tables, reads) == organisms).mean() > 0.9
    assert len(reads) == len(unseen) == 50 and not np.isin(others, tables).any()
