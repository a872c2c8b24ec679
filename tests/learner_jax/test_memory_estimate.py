"""The closed-form estimate of memory against the programs that it speaks of."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest

from learner_jax.aot import analyse
from learner_jax.topology import compiler_library
from runspec.core.models.config import ModelConfig
from runspec.core.models.family import parse_config
from runspec.core.spec.schema import RunSpec
from runspec.estimate.learner import LearnerMemory, learner_memory
from tests.learner_jax.conftest import tiny_spec
from tests.learner_jax.test_aot import devices

SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "max_window_layers": 12,
    "sliding_window": None,
}
TOKENS = 8192
HELD = ("state", "gradients", "published", "reference")


def config(**changes: Any) -> ModelConfig:
    return parse_config({**SHAPE, **changes}, place="config.json")


def spec_of(
    mesh: dict[str, int],
    *,
    kl: float = 1e-3,
    kind: str = "adamw",
    offload: bool = False,
    **learner: Any,
) -> RunSpec:
    """A run of long rows, `rows` to each shard of the batch."""
    pool = {"name": "local", "hardware": {"kind": "cpu"}, "max_model_len": TOKENS}
    packing = {"tokens": TOKENS, "rows": mesh.get("data", 1) * mesh.get("fsdp", 1)}
    algorithm = tiny_spec().algorithm.model_dump(mode="json")
    blocks = {
        "hardware": {"kind": "tpu-v5p", "topology": "2x2x1"},
        "mesh": mesh,
        "packing": packing,
        **learner,
    }
    return tiny_spec(
        model={"hf": "some/model", "max_context": TOKENS},
        algorithm={**algorithm, "kl": {"coef": kl}},
        optimizer={"lr": 3e-7, "kind": kind, "offload": offload},
        samplers=[{**pool, "max_new_tokens": 1024}],
        broadcast={"dtype": "bfloat16", "keep_versions": 5},
        learner=blocks,
    )


def resident(estimate: LearnerMemory) -> dict[str, float]:
    """What the estimate says of what `analyse` knows without a compiler."""
    return {name: getattr(estimate, name) for name in HELD}


@pytest.mark.parametrize(
    ("mesh", "shape", "changes"),
    [
        ({"fsdp": 2, "tensor": 2}, {}, {}),
        ({"data": 2, "context": 2}, {"tie_word_embeddings": False}, {}),
        ({"fsdp": 4, "tensor": 2}, {"num_key_value_heads": 1}, {"kl": 0.0}),  # K whole on each
        ({"fsdp": 3}, {"model_type": "qwen2"}, {"lora": {"rank": 8, "targets": ["q", "o"]}}),
        ({"fsdp": 2}, {"model_type": "qwen2"}, {"master_dtype": "bfloat16", "offload": True}),
        ({"fsdp": 2}, {}, {"kind": "sgd"}),
        ({"fsdp": 2, "tensor": 2}, {"model_type": "qwen2"}, {"kind": "muon"}),
        ({"fsdp": 2}, {}, {"kind": "muon", "offload": True}),
    ],
)
def test_what_a_step_holds_is_exact(
    mesh: dict[str, int], shape: dict[str, Any], changes: dict[str, Any]
) -> None:
    # given a run whose arrays are known by shape, type and sharding
    spec, model = spec_of(mesh, **changes), config(**shape)
    local = jax.devices()[: math.prod(mesh.values())]
    report = analyse(spec, model, local, memory=None, names=())["memory"]
    # then the estimate of what stays on a device is right to the byte, but for a few counters
    found, estimate = report["resident_bytes"], resident(learner_memory(spec, model))
    assert 0 <= found["state"] - estimate.pop("state") <= 64
    assert estimate == {name: found[name] for name in estimate}
    if spec.optimizer.offload:
        assert learner_memory(spec, model).host == report["host_bytes"]


@pytest.mark.skipif(compiler_library() is None, reason="libtpu is not installed")
@pytest.mark.slow
def test_what_a_step_needs_is_within_15_percent_of_the_compiler() -> None:
    # given the gradient of a microbatch, compiled for a slice (more: benchmarks.estimate_accuracy)
    spec = spec_of({"fsdp": 2, "tensor": 2}, remat="dots")
    report = analyse(spec, config(), devices("v5e:2x2"), memory=None, names=["accumulate"])
    # then the closed form comes near to what it needs of a device
    assert learner_memory(spec, config()).total == pytest.approx(
        report["memory"]["needed_bytes"]["accumulate"], rel=0.15
    )
