"""`python -m learner_jax tokenizer train`: what it writes, as transformers and vLLM load it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from learner_jax.__main__ import main

RELEASED = ["[PAD]", "[UNK]", "[SEP]", "[BOS]", "[EOS]", "[MASK]", "_", "A", "C", "G", "T", "N"]
"""Ids 0 to 11 of METAGENE-1's released tokenizer.json."""


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reads of 150 bases."""
    draw = random.Random(7)
    path = tmp_path_factory.mktemp("reads") / "reads.fa"
    path.write_text("".join(f">{i}\n{''.join(draw.choices('ACGT', k=150))}\n" for i in range(2000)))
    return path


def train(files: Path, out: Path, *options: str) -> int:
    return main(["tokenizer", "train", str(files), "-o", str(out), *options])


def test_nucleotides_have_the_ids_of_the_release(reads: Path, tmp_path: Path) -> None:
    # given a tokenizer of METAGENE-1's scheme
    assert train(reads, tmp_path / "dna", "--vocab", "512", "--scheme", "nucleotides") == 0
    # when transformers loads it
    loaded = AutoTokenizer.from_pretrained(tmp_path / "dna")
    # then special tokens and bases have the released ids, and a read comes back
    assert loaded.convert_ids_to_tokens(list(range(12))) == RELEASED
    assert len(loaded) == 512
    ids = loaded("ACGTNNACGT_TAC")["input_ids"]
    assert (ids[0], ids[-1]) == (loaded.bos_token_id, loaded.eos_token_id) == (3, 4)
    assert loaded.decode(ids, skip_special_tokens=True) == "ACGTNNACGT_TAC"
    assert len(ids) < 14


def test_equal_input_gives_equal_bytes(reads: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert train(reads, tmp_path / name, "--vocab", "300", "--scheme", "nucleotides") == 0
    first, second = ((tmp_path / n / "tokenizer.json").read_bytes() for n in ("one", "two"))
    assert first == second


def test_text_is_bytes_with_single_digits(tmp_path: Path) -> None:
    # given a vocabulary that would merge 12 and 34
    source = tmp_path / "sums.txt"
    source.write_text("12 + 34 = 46 caf\u00e9\n" * 50)
    assert train(source, tmp_path / "text", "--vocab", "265") == 0
    # when it encodes a sum
    loaded = AutoTokenizer.from_pretrained(tmp_path / "text")
    pieces = loaded.tokenize("1234+5")
    # then each digit is a token, and any text comes back
    assert [p for p in pieces if p.isdigit()] == list("12345")
    text = "caf\u00e9 \u4e2d\U0001f600 12"
    assert loaded.decode(loaded.encode(text)) == text


@pytest.mark.slow
def test_vllm_loads_it(reads: Path, tmp_path: Path) -> None:
    from vllm.tokenizers import get_tokenizer

    assert train(reads, tmp_path / "dna", "--vocab", "300", "--scheme", "nucleotides") == 0
    ours = AutoTokenizer.from_pretrained(tmp_path / "dna")
    assert get_tokenizer(str(tmp_path / "dna")).encode("ACGTACGT") == ours.encode("ACGTACGT")


def test_reading_stops_at_the_limit(
    reads: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--vocab", "64", "--scheme", "nucleotides", "--max-characters", "3000")
    assert train(reads, tmp_path / "dna", *options) == 0
    assert "read 20 documents of 3,000 characters" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("vocab", "message"),
    [("11", "special tokens and alphabet of nucleotides are 12"), ("90000", "the documents give")],
)
def test_a_vocabulary_that_does_not_fit_leaves_nothing(
    reads: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], vocab: str, message: str
) -> None:
    out = tmp_path / "dna"
    assert train(reads, out, "--vocab", vocab, "--scheme", "nucleotides") == 1
    assert f"--vocab: {vocab} tokens; {message}" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_not_overwritten(reads: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    assert train(reads, tmp_path / "mine", "--vocab", "64", "--scheme", "nucleotides") == 1
    assert (tmp_path / "mine" / "notes").read_text() == "keep"
