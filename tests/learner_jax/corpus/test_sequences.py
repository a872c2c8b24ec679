"""`tokenizer train`, `score --sequences` and `embed`, against transformers and vLLM."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from learner_jax.__main__ import main

pytestmark = pytest.mark.slow

CONTEXT = 64


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty reads of 20 to 400 bases; some are longer than the context."""
    draw = random.Random(3)
    path = tmp_path_factory.mktemp("reads") / "reads.fa"
    path.write_text(
        "".join(
            f">read{i} sample\n{''.join(draw.choices('ACGT', k=20 * (i + 1)))}\n" for i in range(20)
        )
    )
    return path


@pytest.fixture(scope="module")
def model(reads: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama over a tokenizer of nucleotides."""
    folder = tmp_path_factory.mktemp("model") / "dna"
    options = ("--vocab", "40", "--scheme", "nucleotides", "-o", str(folder))
    assert main(["tokenizer", "train", str(reads), *options]) == 0
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def windows(model: Path, reads: Path) -> list[tuple[str, list[list[int]], int]]:
    """Name, windows of ids and number of bases of each read, by transformers' tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = []
    for record in reads.read_text().split(">")[1:]:
        header, bases = record.split("\n")[:2]
        ids = tokenizer(bases, add_special_tokens=False)["input_ids"]
        cut = [ids[i : i + CONTEXT - 2] for i in range(0, len(ids), CONTEXT - 2)]
        found.append((header.split()[0], [[3, *part, 4] for part in cut], len(bases)))
    return found


@pytest.mark.parametrize("mesh", ["fsdp=1", "fsdp=2,tensor=2"])
def test_bits_are_those_of_transformers(
    model: Path, reads: Path, tmp_path: Path, mesh: str
) -> None:
    # when the reads are scored
    out = tmp_path / "bits.tsv"
    command = ["score", str(model), "--sequences", str(reads), "--mesh", mesh, "--out", str(out)]
    assert main(command) == 0
    # then each has the bits of its bases, without the end token, in every window
    theirs = AutoModelForCausalLM.from_pretrained(model).eval()
    heading, *lines = out.read_text().splitlines()
    assert heading.split("\t") == ["name", "tokens", "characters", "bits_per_character"]
    for line, (name, cut, bases) in zip(lines, windows(model, reads), strict=True):
        nats = 0.0
        for ids in cut:
            with torch.no_grad():
                logits = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
            nats -= sum(float(logits[i, ids[i + 1]]) for i in range(len(ids) - 2))
        said = line.split("\t")
        tokens = sum(len(ids) - 2 for ids in cut)
        assert said[:3] == [name, str(tokens), str(bases)]
        assert float(said[3]) == pytest.approx(nats / math.log(2) / bases, rel=2e-5)


def test_embeddings_are_means_of_transformers_hidden_states(
    model: Path, reads: Path, tmp_path: Path
) -> None:
    # when the reads are embedded
    out, names = tmp_path / "out.npy", tmp_path / "names"
    command = ["embed", str(model), "--sequences", str(reads), "--out", str(out)]
    assert main([*command, "--names", str(names)]) == 0
    # then numpy reads one row a read, in order: the mean over all tokens of all windows
    found = np.load(out)
    theirs = AutoModelForCausalLM.from_pretrained(model).eval().model
    expected, said = [], []
    for name, cut, _ in windows(model, reads):
        with torch.no_grad():
            states = [theirs(torch.tensor([ids])).last_hidden_state[0] for ids in cut]
        expected.append(torch.cat(states).mean(0).numpy())
        said.append(name)
    assert found.dtype == np.float32
    assert found.shape == (20, 32)
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-5)
    assert names.read_text().split() == said


def test_characters_of_several_bytes_count_once(tmp_path: Path) -> None:
    # given a byte-level tokenizer, which has no token for most characters
    text = tmp_path / "text.txt"
    text.write_text("caf\u00e9 \u4e2d\u6587 \U0001f600\n" * 20)
    folder = tmp_path / "model"
    assert main(["tokenizer", "train", str(text), "--vocab", "262", "-o", str(folder)]) == 0
    config = LlamaConfig(
        vocab_size=262,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    out = tmp_path / "bits.tsv"
    options = ("--context", "256", "--out", str(out))
    assert main(["score", str(folder), "--sequences", str(text), *options]) == 0
    # then the nine characters count once each, but for the first token's, which has no log-prob
    first = AutoTokenizer.from_pretrained(folder).tokenize(text.read_text())[0]
    expected = str(9 - len(first))
    assert {line.split("\t")[2] for line in out.read_text().splitlines()[1:]} == {expected}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--context", "2"], "--context: 2 tokens; a window has at least 3"),
        (["--sequences", "none.fa"], "none.fa: cannot read"),
        (["--mesh", "what"], "'what' is not a mesh"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(
    model: Path,
    reads: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    change: list[str],
    message: str,
) -> None:
    out = tmp_path / "out.npy"
    command = ["embed", str(model), "--sequences", str(reads), "--out", str(out), *change]
    assert main(command) == 1
    assert message in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_of_another_model_is_refused(
    model: Path, reads: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {base: 40 + i for i, base in enumerate("ACGT")}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    command = ["score", str(other), "--sequences", str(reads), "--out", str(tmp_path / "x")]
    assert main(command) == 1
    assert "of a vocabulary of 40" in capfd.readouterr().err


RELEASED = ["[PAD]", "[UNK]", "[SEP]", "[BOS]", "[EOS]", "[MASK]", "_", "A", "C", "G", "T", "N"]
"""Ids 0 to 11 of METAGENE-1's released tokenizer.json."""


@pytest.fixture(scope="module")
def many_reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reads of 150 bases."""
    draw = random.Random(7)
    path = tmp_path_factory.mktemp("reads") / "reads.fa"
    path.write_text("".join(f">{i}\n{''.join(draw.choices('ACGT', k=150))}\n" for i in range(2000)))
    return path


def train(files: Path, out: Path, *options: str) -> int:
    return main(["tokenizer", "train", str(files), "-o", str(out), *options])


def test_nucleotides_have_the_ids_of_the_release(many_reads: Path, tmp_path: Path) -> None:
    # given a tokenizer of METAGENE-1's scheme
    assert train(many_reads, tmp_path / "dna", "--vocab", "512", "--scheme", "nucleotides") == 0
    # when transformers loads it
    loaded = AutoTokenizer.from_pretrained(tmp_path / "dna")
    # then special tokens and bases have the released ids, and a read comes back
    assert loaded.convert_ids_to_tokens(list(range(12))) == RELEASED
    assert len(loaded) == 512
    ids = loaded("ACGTNNACGT_TAC")["input_ids"]
    assert (ids[0], ids[-1]) == (loaded.bos_token_id, loaded.eos_token_id) == (3, 4)
    assert loaded.decode(ids, skip_special_tokens=True) == "ACGTNNACGT_TAC"
    assert len(ids) < 14


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


def test_vllm_loads_it(many_reads: Path, tmp_path: Path) -> None:
    from vllm.tokenizers import get_tokenizer

    assert train(many_reads, tmp_path / "dna", "--vocab", "300", "--scheme", "nucleotides") == 0
    ours = AutoTokenizer.from_pretrained(tmp_path / "dna")
    assert get_tokenizer(str(tmp_path / "dna")).encode("ACGTACGT") == ours.encode("ACGTACGT")


@pytest.mark.parametrize(
    ("vocab", "message"),
    [("11", "special tokens and alphabet of nucleotides are 12"), ("90000", "the documents give")],
)
def test_a_vocabulary_that_does_not_fit_leaves_nothing(
    many_reads: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], vocab: str, message: str
) -> None:
    out = tmp_path / "dna"
    assert train(many_reads, out, "--vocab", vocab, "--scheme", "nucleotides") == 1
    assert f"--vocab: {vocab} tokens; {message}" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_not_overwritten(many_reads: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    assert train(many_reads, tmp_path / "mine", "--vocab", "64", "--scheme", "nucleotides") == 1
    assert (tmp_path / "mine" / "notes").read_text() == "keep"
