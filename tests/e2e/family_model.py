"""A run of a model whose family another package brings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from learner_jax.leaves import save_weights
from learner_jax.model import init_params
from runspec.core.models import family
from runspec.core.models.config import parse_config
from runspec.core.spec.load import SpecFiles, load_layers
from sampler.tasks.traces import build_warm_start_data
from tests.e2e.quick import QuickRun
from tests.family_package.installed import family_paths
from tests.harness import TARGET_SHORT

pytestmark = pytest.mark.slow

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


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package, for this process and for all that it starts."""
    paths = family_paths(tmp_path / "site")
    for path in paths:
        monkeypatch.syspath_prepend(path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
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


def test_a_family_from_a_package_is_sampled_judged_and_trained(
    runs_dir: Path, tmp_path: Path, installed: None
) -> None:
    # given a model of a family that the repository does not have
    write_model(tmp_path / "model")
    overrides = {
        "steps": 3,
        "warm_start": "null",
        "model.shape": "null",
        "model.hf": tmp_path / "model",
    }
    # when vLLM samples it, a validator prefills it and the learner trains it
    with QuickRun(runs_dir, "family", overrides) as run:
        summary = run.finish()
    # then every rollout is accepted, for all three compute the same log-probs, and weights move
    assert (summary["steps"], summary["rollouts_rejected"]) == (3, 0)
    assert max(line["logprob_diff"] for line in run.metrics()) < 1e-4
    assert all(line["grad_norm"] > 0 for line in run.metrics())
