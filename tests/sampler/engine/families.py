"""Every family that the learner trains: versions as it writes them, and what it says of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridge.conversion import export_checkpoint
from bridge.weight_map import Path as LeafPath
from bridge.weight_map import weight_map
from learner_jax.checkpoint import save_params
from learner_jax.model import init_params
from learner_jax.prefill import Policy, prefill
from learner_jax.sharding import make_mesh
from learner_jax.versions import build_probe
from runspec.core.models.decoder import hf_config
from runspec.core.models.family import parse_config
from runspec.core.run_files import PARAMS_NAME
from runspec.core.spec import schema
from tests.learner_jax.conftest import tiny_spec
from tests.sampler.engine.models import END_TOKEN, MAX_MODEL_LEN, VOCABULARY
from verify.plugins import PrefillInput

# Heads of 32: vLLM's attention on CPUs has no smaller ones. None is D / H.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "llama": {
        "model_type": "llama",
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "rope_theta": 5000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {
        "model_type": "mistral",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": MAX_MODEL_LEN,
    },
}
Change = Callable[[np.ndarray], np.ndarray]


class Learner:
    """The learner of one model: its parameters, versions of them, log-probs under them.

    Args:
        fields: of its config.json, as in `FAMILIES`.
        folder: an empty directory.
    """

    def __init__(self, fields: dict[str, Any], folder: Path) -> None:
        self.config = parse_config({**_SIZES, **fields}, place="test")
        self._folder = folder
        self._written = 0
        self._mesh = make_mesh(schema.Mesh())
        learner = {
            "hardware": {"kind": "cpu"},
            "packing": {"tokens": MAX_MODEL_LEN, "rows": 4},
            "compute_dtype": "float32",
        }
        self._spec = tiny_spec(learner=learner)
        self._probe = build_probe(self._spec, self.config, self._mesh)
        ids = {"eos_token_id": END_TOKEN, "pad_token_id": 0}
        config = hf_config(self.config, dtype="float32", **ids)
        (folder / "config.json").write_text(json.dumps(config))
        rng = np.random.default_rng(0)
        self.params = jax.tree.map(
            # Biases, which start as zeros, and norms, which start as ones, shall tell.
            lambda leaf: jnp.asarray(leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32)),
            init_params(self.config, jax.random.key(0)),
        )
        self.initial = self.publish(self.params)
        """The version of these parameters."""

    def groups(self) -> list[LeafPath]:
        """The leaves of its tree."""
        return [entry.path for entry in weight_map(self.config)]

    def changed(self, path: LeafPath, change: Change) -> Any:
        """The parameters with one leaf changed."""

        def leaf_or_changed(keys: Any, leaf: Any) -> Any:
            same = tuple(key.key for key in keys) != path
            return leaf if same else jnp.asarray(change(np.asarray(leaf)))

        return jax.tree_util.tree_map_with_path(leaf_or_changed, self.params)

    def tensor_names(self, path: LeafPath) -> list[str]:
        """The Hugging Face names of a leaf."""
        return next(e.tensor_names() for e in weight_map(self.config) if e.path == path)

    def publish(self, params: Any) -> Path:
        """A new version: parameters and probe as the learner saves them, exported by the bridge."""
        number = self._written
        self._written += 1
        save_params(self._folder, number, params, self._probe(params))()
        directory = self._folder / f"weights-v{number}"
        checkpoint = self._folder / f"v{number}" / PARAMS_NAME
        export_checkpoint(checkpoint, directory, model_dir=self._folder, dtype="float32")
        return directory

    def logprobs(self, params: Any, texts: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
        """f32 [n] of the n output tokens of each (prompt, output), at temperature 1."""
        inputs = [PrefillInput(np.array(p), np.array(o), None) for p, o in texts]
        policy = Policy(params, self.config, self._spec.learner, self._mesh)
        return [found.logprobs for found in prefill(policy, inputs, temperature=1.0)]
