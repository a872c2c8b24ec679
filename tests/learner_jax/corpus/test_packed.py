"""The corpus of a run: what its rows hold, how they are laid out and read, and what is refused."""

from __future__ import annotations

import gzip
import json
import logging
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from learner_jax.corpus import Document, encoding, packed, processes
from learner_jax.corpus.packed import Corpus, CorpusRows
from learner_jax.corpus.rows import epoch_order, pack_documents, split_documents
from learner_jax.corpus.sources import GeneratedReads
from learner_jax.corpus.tokenizer import train_tokenizer
from runspec.core.errors import UserError
from runspec.core.files import temporary_name
from runspec.core.schema.load import SpecFiles
from runspec.lint.check import check_spec
from tests.harness import ROOT
from tests.learner_jax.corpus.corpora import (
    ROW,
    SPECIAL,
    VOCABULARY,
    document_spec,
    model_dir,
    opened,
    segments,
    tokenizer_of,
)

TEXTS = [
    "the sun",
    "naïve 数学 🙂",
    "the moon and the red rose",
    "x" * 90,
    *("and the sun " * n for n in range(1, 40)),
]
READS = ["ACGTNACG", "TTTACG"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "a.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    reads = "".join(f">read {i}\n{read}\n" for i, read in enumerate(READS))
    (folder / "reads.fa.gz").write_bytes(gzip.compress(reads.encode()))
    return folder


def sources(files: Path) -> list[dict[str, Any]]:
    return [
        {"name": "texts", "kind": "text", "uri": str(files / "a.txt")},
        {"name": "reads", "kind": "fasta", "uri": str(files / "reads.fa.gz"), "weight": 2.5},
    ]


def ids_of(model: Path, texts: list[str]) -> list[tuple[int, ...]]:
    """Each text as the tokenizer alone encodes it, and the end token."""
    tokenizer = tokenizer_of(model)
    end = tokenizer.token_to_id("<eos>")
    return [(*tokenizer.encode(text).ids, end) for text in texts]


def assert_equal(one: CorpusRows, other: CorpusRows) -> None:
    np.testing.assert_array_equal(one.weights, other.weights)
    for ours, theirs in zip(*map(jax.tree.leaves, (one.batch, other.batch)), strict=True):
        assert ours.dtype == np.int32
        np.testing.assert_array_equal(ours, theirs)


def predicted(corpus: Corpus, rows: CorpusRows) -> Counter[tuple[int, ...]]:
    """Pairs of token and target, with the weight, of all positions that predict."""
    return Counter(
        (token, target, weight)
        for tokens, targets, weights in segments(rows)
        for token, target, weight in zip(tokens, targets, weights, strict=True)
        if target >= 0
    )


def test_every_token_but_the_first_is_predicted_once_an_epoch(
    model: Path, files: Path, tmp_path: Path
) -> None:
    # given documents shorter and longer than a row, of sources of two weights
    corpus = opened(tmp_path, document_spec(sources(files)), model)
    expected = [
        Counter((*pair, weight) for ids in ids_of(model, texts) for pair in pairwise(ids))
        for texts, weight in ((TEXTS, 1.0), (READS, 2.5))
    ]
    # when an epoch is read
    for epoch in range(2):
        rows = corpus.read(epoch * corpus.rows, (epoch + 1) * corpus.rows)
        # then each token is predicted from the one before it, once, with its source's weight
        assert predicted(corpus, rows) == expected[0] + expected[1]
    assert corpus.totals.trained_tokens == sum(map(Counter.total, expected))
    assert corpus.totals.documents == len(TEXTS) + len(READS)
    assert corpus.totals.tokens == sum(map(len, ids_of(model, TEXTS + READS)))
    assert corpus.totals.cut == sum(len(ids) > ROW for ids in ids_of(model, TEXTS)) > 0


def test_rows_are_read_alone_and_again_in_another_process(
    model: Path, files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = document_spec(sources(files))
    corpus = opened(tmp_path, spec, model)
    last = 2 * corpus.rows + 3
    whole = corpus.read(0, last)
    # when it is found in the cache, and made once more elsewhere
    caplog.clear()
    with caplog.at_level(logging.INFO):
        again = opened(tmp_path, spec, model)
    assert "tokenizing" not in caplog.text
    elsewhere = opened(tmp_path, spec, model, "other")
    for each in (again, elsewhere):
        assert each.digest == corpus.digest
        # then parts of any size are the whole, over the end of an epoch too
        for bounds in ([0, last], [0, 1, 5, corpus.rows + 2, last], list(range(last + 1))):
            parts = [each.read(a, b) for a, b in pairwise(bounds)]
            joined = jax.tree.map(lambda *x: np.concatenate(x), *[part.batch for part in parts])
            assert_equal(CorpusRows(joined, np.concatenate([p.weights for p in parts])), whole)


def test_held_out_documents_are_never_trained_on(model: Path, files: Path, tmp_path: Path) -> None:
    # given 60 tokens to hold out
    corpus = opened(tmp_path, document_spec(sources(files), held_out={"tokens": 60}), model)
    held_out = corpus.held_out()
    assert held_out is not None
    # then whole documents of about as many are left out of the rows that are trained
    kept, trained = predicted(corpus, held_out), predicted(corpus, corpus.read(0, corpus.rows))
    everything = opened(tmp_path, document_spec(sources(files)), model)
    assert kept + trained == predicted(everything, everything.read(0, everything.rows))
    assert kept.total() == corpus.kept.trained_tokens
    assert corpus.totals.documents < everything.totals.documents
    assert everything.held_out() is None
    # another seed holds others out, and its tokens are not made again
    other = opened(tmp_path, document_spec(sources(files), held_out={"tokens": 60}, seed=8), model)
    assert predicted(other, other.held_out()) != kept
    assert len(list((tmp_path / "cache").glob("*/tokens.bin"))) == 1


def test_bytes_are_those_of_the_trained_text(model: Path, files: Path, tmp_path: Path) -> None:
    # the first token of a document is not predicted, and its text does not count
    spec = document_spec(sources(files))
    corpus = opened(tmp_path, spec, model)
    tokenizer = tokenizer_of(model)
    expected = sum(
        len(text.encode()) - len(tokenizer.encode(text).tokens[0]) for text in TEXTS + READS
    )
    assert corpus.totals.bytes_per_token * corpus.totals.trained_tokens == pytest.approx(expected)


def test_documents_are_made_a_few_at_a_time_and_come_out_the_same(
    model: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = document_spec(sources(files))
    whole = opened(tmp_path, spec, model)
    for name, value in (("_BATCH", 3), ("_BATCH_SIZE", 40)):
        monkeypatch.setattr(encoding, name, value)
        parts = opened(tmp_path, spec, model, name)
        assert_equal(parts.read(0, parts.rows), whole.read(0, whole.rows))


@pytest.mark.slow
def test_several_processes_make_the_same_corpus(
    model: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given files, and reads that are generated, and what one process makes of them
    generated = {"kind": "generated_reads", "params": {"reads": 9000, "length": 30}}
    spec = document_spec([*sources(files), {"name": "made", **generated}])
    whole = opened(tmp_path, spec, model)
    # when two processes encode all but the first documents
    monkeypatch.setattr(encoding, "_BATCH", 3)
    monkeypatch.setattr(processes, "ALONE", 1)
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda _: {0, 1})
    parts = opened(tmp_path / "again", spec, model)
    # then rows and numbers are the same
    assert_equal(parts.read(0, parts.rows), whole.read(0, whole.rows))
    assert parts.counts == whole.counts and whole.counts.documents > 9000
    # and what is wrong with a document is said where it lies
    bad = tmp_path / "bad.jsonl"
    rows = [{"ids": [3, 4]}] * 11 + [{"ids": [3, VOCABULARY]}]
    bad.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = {"name": "ids", "kind": "jsonl", "uri": str(bad), "params": {"tokens": "ids"}}
    with pytest.raises(UserError, match=f"bad.jsonl:12: token id {VOCABULARY}") as caught:
        opened(tmp_path, document_spec([source]), model)
    assert caught.value.remedy.startswith("name the tokenizer")


@pytest.mark.slow
def test_an_end_of_a_process_that_encodes_is_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ALONE", 0)
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda _: {0, 1})
    spec = document_spec([])
    encoder, nowhere = encoding.Encoder.of(spec, model, VOCABULARY), (spec, tmp_path, VOCABULARY)
    with (
        pytest.raises(UserError, match="a process that tokenizes documents has ended"),
        processes.encoding(encoder, nowhere) as encode_all,
    ):
        list(encode_all([[Document("1", "1", "the sun")]]))


def test_what_a_corpus_follows_from_changes_its_digest(
    model: Path, files: Path, tmp_path: Path
) -> None:
    changed = sources(files)
    changed[1] = {**changed[1], "weight": 1.0}
    specs = [
        document_spec(sources(files)),
        document_spec(sources(files), seed=8),
        document_spec(sources(files), row=32),
        document_spec(sources(files), held_out={"tokens": 9}),
        document_spec(sources(files)[:1]),
        document_spec(changed),
    ]
    assert len({opened(tmp_path, spec, model).digest for spec in specs}) == len(specs)
    # and what it does not follow from does not
    again = document_spec(sources(files), updates_per_step=4)
    assert opened(tmp_path, again, model).digest == opened(tmp_path, specs[0], model).digest


def test_a_corpus_that_fails_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 600 + b"\xff\n")
    source = {"name": "a", "kind": "text", "uri": str(tmp_path / "a.txt")}
    with pytest.raises(UserError, match=r"a\.txt:601: not UTF-8"):
        opened(tmp_path, document_spec([source]), model)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_what_a_killed_process_left_is_removed(model: Path, files: Path, tmp_path: Path) -> None:
    left = temporary_name(tmp_path / "cache" / "tokens")
    left.mkdir(parents=True)
    assert opened(tmp_path, document_spec(sources(files)), model).rows > 0
    assert not left.exists()


def test_special_tokens_alone_stand_for_no_text(model: Path, tmp_path: Path) -> None:
    special = [tokenizer_of(model).token_to_id(name) for name in SPECIAL]
    (tmp_path / "a").write_text(json.dumps({"ids": special}))
    spec = document_spec([{"name": "a", "uri": str(tmp_path / "a"), **TOKENS}])
    # one byte stands in for none, so that bits a byte is a number
    assert opened(tmp_path, spec, model).totals.bytes_per_token == 1 / (len(special) - 1)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "meta.json", "trained/start"])
def test_a_damaged_corpus_is_named(name: str, model: Path, files: Path, tmp_path: Path) -> None:
    spec = document_spec(sources(files))
    opened(tmp_path, spec, model)
    [path] = (
        (tmp_path / "cache").glob(f"*/{name}")
        if name != "meta.json"
        else [tokens.with_name(name) for tokens in (tmp_path / "cache").glob("*/tokens.bin")]
    )
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match="damaged corpus") as caught:
        opened(tmp_path, spec, model)
    folder = path.parents[name.count("/")]
    assert str(folder) in str(caught.value) and "remove it" in str(caught.value)


JSONL, TEXT = {"kind": "jsonl"}, {"kind": "text"}
TOKENS = {**JSONL, "params": {"tokens": "ids"}}
CASES = {
    "cut gzip of a whole file": (
        {**TEXT, "params": {"whole": True}},
        gzip.compress(b"one two\n" * 50_000)[:-20],
        "a: damaged gzip",
    ),
    "deep": (JSONL, b'{"text": ' + b"[" * 100_000 + b"\n", "a:1: not a JSON object"),
    "ids of two lengths": (TOKENS, b'{"ids": [[1], [2, 3]]}\n', "a:1: 'ids' holds no list"),
    "id beyond": (
        TOKENS,
        b'{"ids": [1, 2]}\n{"ids": [300, 5]}\n',
        "a:2: token id 300, the model has 300",
    ),
    "id below": (
        {**JSONL, "params": {"tokens": "ids", "id_offset": -1}},
        b'{"ids": [1, 2]}\n{"ids": [1, 0]}\n',
        "a:2: token id -1, the model has 300",
    ),
    "all of one token": (TOKENS, b'{"ids": [1]}\n', "data.sources: no document can be trained on"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named_with_file_and_line(case: str, model: Path, tmp_path: Path) -> None:
    source, data, message = CASES[case]
    (tmp_path / "a").write_bytes(data)
    spec = document_spec([{"name": "a", "uri": str(tmp_path / "a"), **source}])
    with pytest.raises(UserError) as caught:
        opened(tmp_path, spec, model)
    place = "" if message.startswith("data.") else f"{tmp_path}/"
    assert f"{place}{message}" in str(caught.value)
    assert "remedy: " in str(caught.value)


def test_a_whole_file_over_the_limit_is_refused_before_it_is_read_whole(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner_jax.corpus.MAX_DOCUMENT_BYTES", 32)
    (tmp_path / "a").write_bytes(b"one\n" * 20)
    source = {"name": "a", "kind": "text", "uri": str(tmp_path / "a"), "params": {"whole": True}}
    with pytest.raises(UserError, match=r"/a:9: more than 32 bytes"):
        opened(tmp_path, document_spec([source]), model)


IDS = [[1, 2, 3], [], [4], [5, 6], [7, 8, 9, 10]]


@pytest.mark.parametrize("zipped", [False, True])
def test_token_ids_of_parquet_are_those_of_json_lines(
    model: Path, tmp_path: Path, zipped: bool
) -> None:
    lines = "".join(json.dumps({"ids": ids}) + "\n" for ids in IDS)
    (tmp_path / "a.jsonl").write_text(lines)
    pq.write_table(pa.table({"ids": IDS}), tmp_path / "a.parquet", row_group_size=2)
    if zipped:
        whole = (tmp_path / "a.parquet").read_bytes()
        (tmp_path / "a.parquet").write_bytes(gzip.compress(whole))
    params = {"params": {"tokens": "ids", "id_offset": -1}}
    one, other = (
        opened(
            tmp_path,
            document_spec([{"name": "a", "uri": str(tmp_path / f"a.{kind}"), **form}]),
            model,
        )
        for kind in ("jsonl", "parquet")
        for form in [{"kind": kind, **params}]
    )
    assert (one.counts, one.totals) == (other.counts, other.totals)
    assert_equal(one.read(0, one.rows), other.read(0, other.rows))


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([[1, 2], [], [3, 300]], "a.parquet, row 3: token id 300, the model has 300"),
        ([[1, 2], None], "a.parquet, row group 0: 'ids' holds no list of token ids"),
        ([[1, None]], "a.parquet, row group 0: 'ids' holds no list of token ids"),
        ([[], []], "a.parquet: holds no document"),
    ],
)
def test_bad_token_ids_of_parquet_are_named(
    model: Path, tmp_path: Path, ids: list[Any], error: str
) -> None:
    table = pa.table({"ids": pa.array(ids, pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "a.parquet")
    source = {"name": "a", "kind": "parquet", "uri": str(tmp_path / "a.parquet")}
    spec = document_spec([{**source, "params": {"tokens": "ids"}}])
    with pytest.raises(UserError) as caught:
        opened(tmp_path, spec, model)
    assert str(caught.value).startswith(str(tmp_path / error))


def test_many_documents_are_packed_a_shard_at_a_time(
    model: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given the rows of one shard, and of shards of a few documents
    spec = document_spec(sources(files), held_out={"tokens": 30})
    whole = opened(tmp_path, spec, model)
    monkeypatch.setattr(packed, "SHARD", 5)
    cut = opened(tmp_path / "again", spec, model)
    # then both hold every document once, and out of each shard are held its part and no more
    found = []
    for corpus in (whole, cut):
        held_out = corpus.held_out()
        assert held_out is not None
        found.append(predicted(corpus, corpus.read(0, corpus.rows)) + predicted(corpus, held_out))
    assert found[0] == found[1]
    assert whole.totals + whole.kept == cut.totals + cut.kept
    assert 30 <= whole.kept.tokens <= cut.kept.tokens < whole.totals.tokens


def test_nothing_left_to_train_on_is_an_error(model: Path, files: Path, tmp_path: Path) -> None:
    spec = document_spec(sources(files), held_out={"tokens": 10**6})
    with pytest.raises(UserError, match=r"held_out\.tokens: no token can be trained") as caught:
        opened(tmp_path, spec, model)
    assert "add documents, or lower it" in str(caught.value)


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
