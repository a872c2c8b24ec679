"""A model directory with a tokenizer of bytes and a few words, and runs that train on documents."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from learner_jax.corpus.packed import Corpus, CorpusRows, open_corpus
from runspec.core.models.family import hf_config, model_config
from runspec.core.schema import RunSpec
from tests.learner_jax.conftest import tiny_spec

LOG = logging.getLogger("corpus")
VOCABULARY = 300
ROW = 16
SPECIAL = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>")
WORDS = "the sun and the moon and the red rose " * 4


def model_dir(folder: Path, template: str | None = None, end: str = "<eos>") -> Path:
    """Write tokenizer.json, tokenizer_config.json and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [WORDS], BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    # as files of other people have it: a corpus neither cuts nor pads by it
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    spec = document_spec([])
    (folder / "config.json").write_text(
        json.dumps(hf_config(model_config(spec), dtype="float32", eos_token_id=1, pad_token_id=0))
    )
    return folder


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer alone, which neither cuts nor pads."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def document_spec(
    sources: list[dict[str, Any]], *, row: int = ROW, seed: int = 7, **algorithm: Any
) -> RunSpec:
    """A run on `sources`; nothing is held out unless `held_out` says so."""
    shape = tiny_spec().model.shape
    assert shape is not None
    algorithm = {"kind": "pretrain", "held_out": {"tokens": 0}, **algorithm}
    learner = {**tiny_spec().learner.model_dump(), "packing": {"tokens": row, "rows": 2}}
    return tiny_spec(
        seed=seed,
        model={"shape": shape.model_dump() | {"vocab_size": VOCABULARY}, "max_context": 64},
        data={"sources": sources or [{"name": "none", "kind": "text"}]},
        algorithm={"tokens_per_update": 2 * row, **algorithm},
        learner=learner,
        reward=[],
        samplers=[],
        verify={"validators": 0},
    )


def opened(folder: Path, spec: RunSpec, model: Path, cache: str = "cache") -> Corpus:
    return open_corpus(spec, model, folder / cache, LOG)


def segments(rows: CorpusRows) -> list[tuple[list[int], list[int], list[float]]]:
    """Tokens, targets and weights of each segment, in order of row and place."""
    batch, found = rows.batch, []
    for row, numbers in enumerate(batch.segment_ids):
        for number in range(1, int(numbers.max()) + 1):
            at = np.flatnonzero(numbers == number)
            assert (np.diff(at) == 1).all() and len(at)
            assert batch.positions[row, at].tolist() == list(range(len(at)))
            found.append(
                tuple(
                    each[row, at].tolist() for each in (batch.tokens, batch.targets, rows.weights)
                )
            )
        padding = numbers == 0
        for array, value in ((batch.tokens, 0), (batch.targets, -1), (batch.positions, 0)):
            assert (array[row, padding] == value).all()
        assert not rows.weights[row, padding].any()
    return found
