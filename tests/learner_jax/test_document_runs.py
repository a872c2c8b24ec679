"""Runs that train on documents: killed anywhere, they train the same rows and end with the same
bits; what other processes are given is what process 0 read."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from learner_jax.__main__ import main
from learner_jax.corpus.packed import CorpusRows, open_corpus
from learner_jax.feed import DocumentBatch, decode, encode
from learner_jax.recipes import document_lengths
from learner_jax.train import train
from learner_jax.warm_start import draw_initial_model
from runspec.core.errors import UserError
from runspec.core.run_files import corpus_cache, params_folder, state_folder, versions_in
from runspec.core.schema import RunSpec
from runspec.core.schema.load import dump_resolved
from tests.learner_jax.conftest import Run, tiny_spec
from tests.learner_jax.test_runner import (
    StopAt,
    assert_same_weights,
    lines,
    train_to_the_end,
    weights,
)
from verify.formats.batch import RangeManifest, RowRange, sign_ranges

pytestmark = pytest.mark.slow

STEPS, ROWS = 6, 8
WORDS = ("red", "green", "blue", "one", "two", "three", "sun", "moon")

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|eos|>{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


def conversation(turns: list[tuple[str, str]]) -> str:
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})


def document_spec(
    folder: Path, lora: object = None, blocks: dict[str, Any] | None = None, **algorithm: object
) -> RunSpec:
    talk = algorithm.get("kind") == "sft"
    kind, name = ("jsonl", "talk.jsonl") if talk else ("text", "words.txt")
    shape = tiny_spec().model.shape.model_dump() | {"vocab_size": 300}
    return tiny_spec(
        steps=STEPS,
        model={"shape": shape, "max_context": 64, "tokenizer": {"hf": str(folder / "tokenizer")}},
        data={"sources": [{"name": "words", "kind": kind, "uri": str(folder / name)}]},
        algorithm={
            "kind": "pretrain",
            "tokens_per_update": 256,
            "updates_per_step": 2,
            "publish_every": 2,
            "held_out": {"tokens": 200, "every": 3},
            **algorithm,
        },
        learner={**tiny_spec().learner.model_dump(), "lora": lora},
        reward=[],
        samplers=[],
        verify={"validators": 0},
        **(blocks or {}),
    )


def ready_run(path: Path, files: Path, **changes: object) -> Run:
    """A run with its initial model and the manifests of all its steps."""
    run = Run(path, document_spec(files, **changes))
    shutil.copytree(files / "tokenizer", path / "initial")
    draw_initial_model(path, LOG)
    for step in range(STEPS):
        rows = RowRange(ROWS * step, ROWS * (step + 1))
        manifest = RangeManifest(run.spec.name, step, rows, 1, "0" * 64)
        folder = path / "rollouts" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "batch.json").write_bytes(sign_ranges(manifest, run.coordinator))
    return run


LOG = logging.getLogger("test")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("files"))


def make_files(folder: Path) -> Path:
    """Four hundred short documents, as many conversations, and a tokenizer of bytes.

    Args:
        folder: exists; gets words.txt, talk.jsonl and tokenizer/.
    """
    draw = np.random.default_rng(1)
    documents = [" ".join(draw.choice(WORDS, draw.integers(1, 9))) for _ in range(400)]
    (folder / "words.txt").write_text("".join(f"{text}\n" for text in documents))
    talk = ([("user", "Say it."), ("assistant", text)] for text in documents)
    (folder / "talk.jsonl").write_text("".join(f"{conversation(turns)}\n" for turns in talk))
    words, tokenizer = str(folder / "words.txt"), str(folder / "tokenizer")
    assert main(["tokenizer", "train", words, "--vocab", "280", "-o", tokenizer]) == 0
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def straight(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = ready_run(tmp_path_factory.mktemp("straight") / "runs" / "run", files)
    train_to_the_end(run)
    return run


def test_it_publishes_and_measures_when_the_spec_says(straight):
    rows = lines(straight, "metrics")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [row["first_row"] for row in rows] == [ROWS * step for step in range(STEPS)]
    assert [row["step"] for row in rows if row["held_out_nll"] is not None] == [2, 5]
    assert versions_in(params_folder(straight.path, straight.spec)) == [0, 2, 4, 6]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(0 < row["tokens"] <= 512 and row["bits_per_byte"] > 0 for row in rows)


@pytest.mark.parametrize("stopped", [1, 3])
def test_stopped_anywhere_it_ends_with_the_same_bits(stopped, straight, files, tmp_path):
    run = ready_run(tmp_path / "runs" / "run", files)
    train(run.path, LOG, StopAt(run, stopped))
    # a crash after the next state would leave the one before: it is trained again
    newest = state_folder(run.path, run.spec) / f"step_{stopped}"
    assert newest.exists()
    if stopped == 3:
        shutil.rmtree(newest)
    train_to_the_end(run)
    resumed, whole = (
        weights(each, STEPS, tmp_path / name) for each, name in ((run, "a"), (straight, "b"))
    )
    assert_same_weights(resumed, whole)
    assert [row["step"] for row in lines(run, "metrics")] == list(range(STEPS))


def test_sft_trains_adapters_and_nothing_else(files, tmp_path):
    # given a run on conversations that trains adapters of two matrices
    lora = {"rank": 4, "alpha": 8.0, "targets": ["q", "down"]}
    run = ready_run(tmp_path / "runs" / "run", files, kind="sft", lora=lora)
    # when it is stopped in the middle, and goes on
    train(run.path, LOG, StopAt(run, 3))
    train_to_the_end(run)
    # then it has learned the assistant's part, and those matrices alone have changed
    rows = lines(run, "metrics")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(0 < row["trained_tokens"] < row["tokens"] for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    first, last = (weights(run, version, tmp_path / str(version)) for version in (0, STEPS))
    changed = {name for name in first if (first[name] != last[name]).any()}
    assert changed == {name for name in first if ".q_proj.w" in name or ".down_proj.w" in name}


def test_other_documents_are_refused(straight, files, tmp_path):
    run = ready_run(tmp_path / "runs" / "run", files)
    train(run.path, LOG, StopAt(run, 2))
    other = tmp_path / "other"
    shutil.copytree(files, other)
    with (other / "words.txt").open("a") as file:
        file.write("one more\n")
    spec = document_spec(other)
    (run.path / "spec.json").write_bytes(dump_resolved(spec))
    with pytest.raises(UserError, match="documents are not those it was trained on"):
        train_to_the_end(run)
    assert corpus_cache(run.path).is_dir()


def test_rows_go_to_other_processes_bit_for_bit(straight):
    cache = corpus_cache(straight.path)
    corpus = open_corpus(straight.spec, straight.path / "initial", cache, LOG)
    rows = corpus.read(3, 9)
    batch = DocumentBatch(RangeManifest("tiny", 0, RowRange(3, 9), 1, "0" * 64), rows)
    back = decode(encode(batch), DocumentBatch)
    assert back.manifest == batch.manifest and back.digest == batch.digest
    for found in (back.rows, decode(encode(rows), CorpusRows)):
        np.testing.assert_array_equal(found.weights, rows.weights)
        jax.tree.map(np.testing.assert_array_equal, found.batch, rows.batch)
    assert sum(document_lengths(rows.batch)) == int((rows.batch.segment_ids > 0).sum())
    assert json.loads((straight.path / "metrics.jsonl").read_text().splitlines()[0])["epoch"] > 0
