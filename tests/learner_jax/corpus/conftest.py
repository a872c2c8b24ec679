"""A model folder with a byte-level tokenizer, and specs of runs that train on documents."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from learner_jax.corpus.tokenizer import train_tokenizer
from runspec.core.models.decoder import hf_config
from runspec.core.models.family import parse_config
from runspec.core.spec.schema import RunSpec
from tests.runspec.supervised import SPEC, supervised_spec

VOCABULARY = 280
TEXT = "the sun and the moon are red, \u00e9tait; 12 + 34 = 46\n"


def spec_of(
    *sources: dict[str, Any],
    row: int = 16,
    held_out: int = 0,
    kind: str = "pretrain",
    seed: int = 7,
) -> RunSpec:
    """A spec of such sources, named a, b, ...; `row` tokens make a row."""
    named = [{"name": name, **source} for name, source in zip("abcd", sources, strict=False)]
    return supervised_spec(
        seed=seed,
        data={"sources": named},
        algorithm={"kind": kind, "held_out": {"tokens": held_out}},
        learner={"packing": {"tokens": row, "rows": 4}},
    )


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = train_tokenizer([TEXT] * 4, VOCABULARY, "text")
    tokenizer.save(str(folder / "tokenizer.json"))
    shape = parse_config(SPEC["model"]["shape"] | {"vocab_size": VOCABULARY}, place="test")
    config = hf_config(shape, dtype="float32", eos_token_id=2, pad_token_id=0)
    (folder / "config.json").write_text(json.dumps(config))
    special = {f"{kind}_token": f"<|{kind}|>" for kind in ("pad", "bos", "eos")}
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(said | special))
    return folder


@pytest.fixture
def model_dir(tokenizer_folder: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a model folder with a chat template."""

    def made(template: str) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return made
