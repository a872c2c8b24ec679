"""Generated reads: what they follow from, how they are distributed, and their shipped tokenizer."""

from __future__ import annotations

from itertools import islice

import numpy as np

from learner_jax.corpus.generated import GeneratedReads
from learner_jax.corpus.tokenizer import train_tokenizer
from runspec.core.spec.load import SpecFiles
from runspec.lint.check import check_spec
from tests.harness import ROOT


def test_a_read_follows_from_the_seed_and_its_number_alone() -> None:
    # given many reads, fewer of them, and reads of another seed
    many = list(GeneratedReads(organisms=3, reads=5000, length=20, seed=4).documents())
    few = list(GeneratedReads(organisms=3, reads=4500, length=20, seed=4).documents())
    other = next(GeneratedReads(organisms=3, reads=10, length=20, seed=5).documents())
    # then the first reads are the same, and all have the length
    assert few == many[:4500]
    assert other != many[0]
    assert {len(read.text) for read in many} == {20}
    assert len({read.name for read in many}) == 5000


def test_bases_follow_the_table_of_their_organism() -> None:
    # given reads of one organism
    reads = GeneratedReads(organisms=1, reads=4000, length=100, seed=0)
    texts = [read.text for read in reads.documents()]
    codes = np.array([[b"ACGT".index(base) for base in text.encode()] for text in texts])
    context = 16 * codes[:, :-3] + 4 * codes[:, 1:-2] + codes[:, 2:-1]
    # when the bases after each context are counted
    counts = np.zeros((64, 4))
    np.add.at(counts, (context, codes[:, 3:]), 1)
    # then their shares are the table's, to four standard errors
    total = counts.sum(axis=-1, keepdims=True)
    table = reads.tables()[0]
    error = np.sqrt(table * (1 - table) / np.maximum(total, 1))
    assert (np.abs(counts / np.maximum(total, 1) - table) <= 4 * error + 1e-9)[
        total[:, 0] > 0
    ].all()
    assert (total > 0).sum() > 32


def test_the_shipped_tokenizer_is_that_of_the_first_reads_of_the_laptop_profile() -> None:
    # given the reads of the laptop's source
    spec = check_spec(SpecFiles(ROOT / "specs" / "metagene.yaml", "laptop"), environ={}).require()
    (source,) = spec.data.sources
    texts = [read.text for read in islice(GeneratedReads.of(source.params).documents(), 4096)]
    # when a tokenizer is trained on them
    tokenizer = train_tokenizer(texts, 1024, "nucleotides")
    # then it is the shipped one
    shipped = ROOT / "specs" / "tokenizers" / "metagene" / "tokenizer.json"
    assert shipped.read_text(encoding="utf-8") == tokenizer.to_str() + "\n"
