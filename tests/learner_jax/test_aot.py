"""The step compiled for TPUs that are not there: kernels, memory, refusals, costs, the estimate.

Tests of the TPU compiler are skipped where it is not installed; `make test` installs it.
"""

from __future__ import annotations

import json
import math
import os
import re
from functools import cache
from typing import Any
from unittest.mock import patch

import jax
import pytest

from learner_jax.__main__ import main
from learner_jax.aot import analyse, compile_programs, learner_mesh
from learner_jax.aot_command import (
    compiler_library,
    learner_topology,
    parse_topology,
    prepare_environment,
    topology_devices,
)
from learner_jax.step import build_programs
from runspec.core.errors import UserError
from runspec.core.models.family import parse_config
from runspec.core.schema import RunSpec
from runspec.estimate import learner_memory
from tests.harness import ROOT
from tests.learner_jax.conftest import tiny_spec

pytestmark = pytest.mark.slow

TOKENS = 2304
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32768,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": TOKENS,
}
"""Positions x vocabulary are more than the head keeps; only T x T and T x V reach T twice."""
needs_libtpu = pytest.mark.skipif(compiler_library() is None, reason="libtpu is not installed")


def tpu_spec(
    mesh: dict[str, int] | None = None,
    *,
    tokens: int = TOKENS,
    kl: float = 1e-3,
    kind: str = "adamw",
    offload: bool = False,
    **learner: Any,
) -> RunSpec:
    """A run of long rows, a row to each shard of the batch."""
    mesh = mesh or {"fsdp": 4, "tensor": 2}
    hardware = {"kind": "tpu-v5p", "topology": "2x2x2"}
    packing = {"tokens": tokens, "rows": mesh.get("data", 1) * mesh.get("fsdp", 1)}
    pool = {"name": "local", "hardware": {"kind": "cpu"}, "max_model_len": tokens}
    algorithm = tiny_spec().algorithm.model_dump(mode="json")
    return tiny_spec(
        model={"hf": "some/model", "max_context": tokens},
        algorithm={**algorithm, "kl": {"coef": kl}},
        optimizer={"lr": 3e-7, "kind": kind, "offload": offload},
        samplers=[{**pool, "max_new_tokens": 1024}],
        broadcast={"dtype": "bfloat16", "keep_versions": 5},
        learner={"hardware": hardware, "mesh": mesh, "packing": packing, **learner},
    )


def devices(topology: str) -> list[jax.Device]:
    with patch.dict(os.environ):  # what the command sets for its own process
        prepare_environment()
        return topology_devices(parse_topology(topology))


@cache
def compiled(topology: str, name: str, remat: str = "full", offload: bool = False) -> Any:
    spec = tpu_spec(remat=remat, offload=offload)
    mesh = learner_mesh(spec, devices(topology))
    programs = build_programs(spec, parse_config(SHAPE, place="config.json"), mesh)
    return next(compile_programs(programs, [name])).executable


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "remat"),
    [
        ("v5p:2x2x2", "full"),
        pytest.param("v5e:2x4", "full", marks=pytest.mark.nightly),
        pytest.param("v6e:2x4", "offload", marks=pytest.mark.nightly),
    ],
)
def test_the_step_compiles_for_tpus_with_splash_attention(topology, remat):
    # When the gradient of a microbatch is compiled for a slice
    program = compiled(topology, "accumulate", remat)
    text, memory = program.as_text(), program.memory_analysis()
    # Then attention is a Pallas kernel: forward, computed again and backward, in loops over layers
    assert text.count('custom_call_target="tpu_custom_call"') >= 3
    # And of all arrays, on the chip and off it, none has T or more in two of its dimensions:
    # neither T x T nor T x V / 2
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]*)\]", text)
    found = [tuple(int(size) for size in shape.split(",") if size) for shape in shapes]
    assert len(found) > 1000
    assert [shape for shape in found if sum(size >= TOKENS for size in shape) > 1] == []
    # And none is as large as the logits of a row, in another shape
    assert max(map(math.prod, found)) < TOKENS * SHAPE["vocab_size"] // 2
    # And offloaded, each layer's input [1, T, D] of a device lies in the host's memory in bfloat16
    if remat == "offload":
        inputs = SHAPE["num_hidden_layers"] * TOKENS * SHAPE["hidden_size"] * 2
        assert memory.host_temp_size_in_bytes >= inputs


@needs_libtpu
@pytest.mark.nightly
def test_offloaded_moments_lie_in_the_hosts_memory():
    # When the update is compiled with the moments on the device, and in the host's memory
    here = compiled("v5p:2x2x2", "apply").memory_analysis()
    away = compiled("v5p:2x2x2", "apply", offload=True).memory_analysis()
    # Then both of them, 8 bytes a parameter, have moved
    moved = here.argument_size_in_bytes - away.argument_size_in_bytes
    assert here.host_argument_size_in_bytes == 0
    assert away.host_argument_size_in_bytes == pytest.approx(moved, rel=0.01)
    assert moved == pytest.approx(2 / 4 * here.argument_size_in_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("v5p:2x2x1", "is 8 devices, the topology has 4", marks=needs_libtpu),
        pytest.param("v5p:3x5x7", "v5p:3x5x7", marks=needs_libtpu),
        *((text, "no TPU topology") for text in ("v9:2x2", "v5p:", "v5p:4x4x4x4", "v5p:99999x1")),
    ],
)
def test_a_topology_that_is_none_or_does_not_match_the_mesh_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        learner_mesh(tpu_spec(), devices(text))


def test_the_command_without_the_compiler_says_what_to_install(tmp_path, capfd):
    # Given a machine without libtpu
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SHAPE))
    # When a TPU spec is compiled, then the error says how it is installed
    with patch.dict(os.environ, TPU_LIBRARY_PATH=str(tmp_path / "libtpu.so")):
        spec = str(ROOT / "specs" / "target_long.yaml")
        assert main(["aot", spec, "--model-config", str(config)]) == 1
    assert "make aot" in capfd.readouterr().err


def test_compiling_for_this_machine_reports_memory_and_cost():
    # Given a small run on this machine's virtual devices
    spec = tiny_spec()
    assert learner_topology(spec.learner) is None
    assert str(learner_topology(tpu_spec().learner)) == "v5p:2x2x2"
    shape = {**SHAPE, "vocab_size": 32, "hidden_size": 16, "head_dim": 8, "intermediate_size": 24}
    config, local = parse_config(shape, place="config.json"), jax.devices()[:2]
    # When its forward pass is compiled
    report = analyse(spec, config, local, memory=None, names=["score"])["programs"]["score"]
    # Then XLA's own figures are there
    assert report["argument_bytes"] > 0 and report["own_bytes"] > 0
    assert report["flops"] > 0 and report["bytes_accessed"] > 0


LONG = 8192
QWEN: dict[str, Any] = {
    **SHAPE,
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": LONG,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("mesh", "shape", "changes"),
    [
        ({"data": 2, "context": 2}, {"tie_word_embeddings": False}, {}),
        ({"fsdp": 4, "tensor": 2}, {"num_key_value_heads": 1}, {"kl": 0.0}),  # K whole on each
        ({"fsdp": 3}, {"model_type": "qwen2"}, {"lora": {"rank": 8, "targets": ["q", "o"]}}),
        ({"fsdp": 2}, {"model_type": "qwen2"}, {"master_dtype": "bfloat16", "offload": True}),
        ({"fsdp": 2}, {}, {"kind": "sgd"}),
        ({"fsdp": 2, "tensor": 2}, {"model_type": "qwen2"}, {"kind": "muon", "offload": True}),
    ],
)
def test_the_estimate_of_what_a_step_holds_is_exact(mesh, shape, changes):
    # Given a run whose arrays are known by shape, type and sharding
    spec = tpu_spec(mesh, tokens=LONG, **changes)
    model = parse_config({**QWEN, **shape}, place="config.json")
    local = jax.devices()[: math.prod(mesh.values())]
    report, estimate = (
        analyse(spec, model, local, memory=None, names=())["memory"],
        learner_memory(spec, model),
    )
    # Then the estimate of what stays on a device is right to the byte, but for a few counters
    found = report["resident_bytes"]
    assert 0 <= found["state"] - estimate.state <= 64
    held = ("gradients", "published", "reference")
    assert {name: getattr(estimate, name) for name in held} == {name: found[name] for name in held}
    if spec.optimizer.offload:
        assert estimate.host == report["host_bytes"]


@needs_libtpu
@pytest.mark.nightly
def test_the_estimate_of_what_a_step_needs_is_within_15_percent_of_the_compiler():
    # Given the gradient of a microbatch, compiled for a slice (more: benchmarks.estimate_accuracy)
    spec = tpu_spec({"fsdp": 2, "tensor": 2}, tokens=LONG, remat="dots")
    model = parse_config(QWEN, place="config.json")
    report = analyse(spec, model, devices("v5e:2x2"), memory=None, names=["accumulate"])
    # Then the closed form comes near to what it needs of a device
    assert learner_memory(spec, model).total == pytest.approx(
        report["memory"]["needed_bytes"]["accumulate"], rel=0.15
    )
