"""A model whose family another package brings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest

from learner_jax.leaves import save_weights
from learner_jax.model import init_params
from runspec.core.models import family
from runspec.core.models.family import parse_config
from runspec.core.spec.load import SpecFiles, load_layers
from sampler.tasks.traces import build_warm_start_data
from tests.family_package.installed import family_paths
from tests.harness import TARGET_SHORT

EXAONE4 = {
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "hidden_act": "silu",
    "vocab_size": 192,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": None,
    "layer_types": ["full_attention", "full_attention"],
    "dtype": "float32",
}


@contextmanager
def installed(directory: Path) -> Iterator[None]:
    """The package, for this process and for all that it starts inside the block.

    Args:
        directory: gets the package's metadata; does not exist yet.
    """
    with pytest.MonkeyPatch.context() as patch:
        paths = family_paths(directory)
        for path in paths:
            patch.syspath_prepend(path)
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        family._offered.cache_clear()
        yield
    family._offered.cache_clear()


def write_model(directory: Path) -> None:
    """Random weights, and the tokenizer that the laptop profile makes."""
    directory.mkdir()
    data = build_warm_start_data(load_layers(SpecFiles(TARGET_SHORT, "laptop")).require())
    data.write_tokenizer(directory)
    ids = {"eos_token_id": data.eos_token_id, "pad_token_id": data.pad_token_id}
    (directory / "config.json").write_text(json.dumps(EXAONE4 | ids))
    config = parse_config(EXAONE4, place="config.json")
    save_weights(init_params(config, jax.random.key(0)), config, directory)
