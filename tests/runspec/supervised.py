"""Specs of runs: small ones that train on documents, and the shipped fleet with changes."""

from __future__ import annotations

from typing import Any

from runspec.core.models import ModelConfig
from runspec.core.models.family import model_config
from runspec.core.schema import RunSpec
from runspec.core.schema.load import SpecFiles, load_layers
from tests.runspec.core.schema.spec_files import SPECS

SPEC: dict[str, Any] = {
    "version": "runspec/v1",
    "name": "reads",
    "seed": 7,
    "steps": 25,
    "model": {
        "shape": {
            "model_type": "llama",
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        "max_context": 64,
    },
    "data": {"sources": [{"name": "reads", "kind": "fasta", "uri": "reads.fa"}]},
    "algorithm": {
        "kind": "pretrain",
        "tokens_per_update": 1024,
        "updates_per_step": 2,
        "publish_every": 10,
        "held_out": {"tokens": 4096, "every": 5},
    },
    "optimizer": {"lr": 1e-3},
    "learner": {
        "hardware": {"kind": "cpu", "count": 2, "peak_flops": 1e9},
        "mesh": {"fsdp": 2},
        "packing": {"tokens": 64, "rows": 4},
        "compute_dtype": "float32",
    },
}


def supervised_spec(**blocks: dict[str, Any] | int) -> RunSpec:
    """The spec; a map is laid over its block, any other value replaces it."""
    merged = SPEC | {
        name: SPEC.get(name, {}) | value if isinstance(value, dict) else value
        for name, value in blocks.items()
    }
    return RunSpec.model_validate(merged)


def shipped(*overrides: str, profile: str | None = None) -> tuple[RunSpec, ModelConfig]:
    """`specs/target_long.yaml` and its shape, without the linter's word on them."""
    spec = load_layers(
        SpecFiles(SPECS / "target_long.yaml", profile, overrides=overrides)
    ).require()
    config = model_config(spec)
    assert config is not None
    return spec, config
