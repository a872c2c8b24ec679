"""Shapes of named models, as they ship with runspec."""

from __future__ import annotations

import json
import subprocess
import sys

from runspec.core.models.named_models import model_names, named_model


def test_the_reference_models_ship_by_the_name_that_a_spec_gives_them() -> None:
    # given the names in `model.hf` of the reference run and of the models in the documents
    expected = [
        "Qwen/Qwen2.5-32B",
        "Qwen/Qwen3-4B",
        "Qwen/QwQ-32B",
        "meta-llama/Llama-3.1-8B",
        "metagene-ai/METAGENE-1",
    ]
    # when they are looked up, then each is there, and no other
    assert sorted(model_names()) == sorted(expected)
    hidden = {name: (named_model(name) or {})["hidden_size"] for name in expected}
    assert list(hidden.values()) == [5120, 2560, 5120, 4096, 4096]


def test_a_name_is_no_path() -> None:
    # given names that are no model's, one of them of a file that exists
    # when they are looked up, then nothing is found
    for name in ("Qwen/None", "../models/Qwen--QwQ-32B", "Qwen--QwQ-32B", ""):
        assert named_model(name) is None, name


def test_a_shape_is_known_without_jax() -> None:
    # given a process that has imported nothing
    code = (
        "import sys, json; from runspec.core.models.named_models import named_model; "
        "print(json.dumps([named_model('Qwen/QwQ-32B')['num_hidden_layers'], "
        "sorted({'jax', 'torch', 'bridge'} & set(sys.modules))]))"
    )
    # when it looks up a shape
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    # then it is there, and no engine came with it
    assert json.loads(done.stdout) == [64, []]
