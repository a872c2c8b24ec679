"""The step compiled for TPUs that are not there: kernels, memory and refusals.

Skipped where the TPU compiler is not installed; `make test` installs it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import pytest

from learner_jax.aot import analyse, compile_programs, learner_mesh
from learner_jax.hlo import program_cost
from learner_jax.step import build_programs
from learner_jax.topology import (
    compiler_library,
    learner_topology,
    parse_topology,
    prepare_environment,
    topology_devices,
)
from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig
from runspec.core.models.family import parse_config
from runspec.core.models.hardware import DEVICES
from runspec.core.spec.schema import Learner, Model, Optimizer, RunSpec
from tests.learner_jax.conftest import tiny_spec
from tests.learner_jax.hlo_arrays import arrays

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


def tpu_spec(remat: str = "full", *, offload: bool = False, **mesh: int) -> RunSpec:
    learner = {
        "hardware": {"kind": "tpu-v5p", "topology": "2x2x2"},
        "mesh": mesh or {"fsdp": 4, "tensor": 2},
        "packing": {"tokens": TOKENS, "rows": 4},
        "remat": remat,
    }
    pool = {
        "name": "local",
        "hardware": {"kind": "cpu"},
        "max_model_len": TOKENS,
        "max_new_tokens": 1024,
    }
    return tiny_spec(
        model=Model(hf="some/model", max_context=TOKENS),
        learner=Learner.model_validate(learner),
        optimizer=Optimizer(lr=1e-6, offload=offload),
        samplers=[pool],
    )


def config() -> ModelConfig:
    return parse_config(SHAPE, place="config.json")


def devices(topology: str) -> list[jax.Device]:
    with patch.dict(os.environ):  # what the command sets for its own process
        prepare_environment()
        return topology_devices(parse_topology(topology))


def compiled(topology: str, name: str, *, remat: str = "full", offload: bool = False) -> Any:
    return _compiled(topology, name, remat, offload)


@cache
def _compiled(topology: str, name: str, remat: str, offload: bool) -> Any:
    spec = tpu_spec(remat, offload=offload)
    mesh = learner_mesh(spec, devices(topology))
    programs = build_programs(spec, config(), mesh)
    return next(compile_programs(programs, [name])).executable


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "remat"), [("v5e:2x4", "full"), ("v5p:2x2x2", "full"), ("v6e:2x4", "offload")]
)
def test_the_step_compiles_for_tpus_with_splash_attention(topology: str, remat: str) -> None:
    # When the gradient of a microbatch is compiled for a slice
    program = compiled(topology, "accumulate", remat=remat)
    # Then attention is a Pallas kernel: forward, computed again, and backward, in each layer
    kernels = program_cost(program.as_text()).custom_calls
    assert kernels["tpu_custom_call"] % SHAPE["num_hidden_layers"] == 0
    assert kernels["tpu_custom_call"] >= 3 * SHAPE["num_hidden_layers"]


@needs_libtpu
@pytest.mark.slow
def test_neither_scores_nor_logits_of_a_row_exist_on_a_tpu() -> None:
    # When all arrays of the gradient are looked at, on the chip and off it
    found = [array.shape for array in arrays(compiled("v5p:2x2x2", "accumulate").as_text())]
    assert len(found) > 1000
    # Then none has T or more in two of its dimensions: neither T x T nor T x V / 2
    assert [shape for shape in found if sum(size >= TOKENS for size in shape) > 1] == []
    # And none is as large as the logits of a row, in another shape
    assert max(map(math.prod, found)) < TOKENS * SHAPE["vocab_size"] // 2


@needs_libtpu
@pytest.mark.slow
def test_flops_of_the_compiled_forward_pass_are_those_of_its_matrices() -> None:
    # When the products of the scoring program are counted, its loops as often as they run
    chunk, chunks = 512, 5  # of a device's 2,304 positions, the last one filled up
    program = compiled("v5p:2x2x2", "score")
    cost = program_cost(program.as_text(), {"vocabulary_head": chunks})
    # Then they are 2 FLOPs for each parameter of a matrix and each token, shared by the devices
    d, f, h = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    heads, kv_heads = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    layer = d * h * (2 * heads + 2 * kv_heads) + 3 * d * f
    layers = 2 * SHAPE["num_hidden_layers"] * layer * 4 * TOKENS / 8
    head = 2 * d * SHAPE["vocab_size"] / 2 * chunk * chunks
    assert cost.flops == layers + head


@needs_libtpu
@pytest.mark.slow
def test_offloaded_moments_lie_in_the_hosts_memory() -> None:
    # When the update is compiled with the moments on the device, and in the host's memory
    here = compiled("v5p:2x2x2", "apply").memory_analysis()
    away = compiled("v5p:2x2x2", "apply", offload=True).memory_analysis()
    # Then both of them, 8 bytes a parameter, have moved
    moved = here.argument_size_in_bytes - away.argument_size_in_bytes
    assert here.host_argument_size_in_bytes == 0
    assert away.host_argument_size_in_bytes == pytest.approx(moved, rel=0.01)
    assert moved == pytest.approx(2 / 4 * here.argument_size_in_bytes, rel=0.02)


@needs_libtpu
@pytest.mark.slow
def test_offloaded_layer_inputs_lie_in_the_hosts_memory() -> None:
    # When the gradient is compiled with remat: offload
    memory = compiled("v6e:2x4", "accumulate", remat="offload").memory_analysis()
    # Then the host holds each layer's input [1, T, D] of a device in bfloat16
    inputs = SHAPE["num_hidden_layers"] * TOKENS * SHAPE["hidden_size"] * 2
    assert memory.host_temp_size_in_bytes >= inputs


@needs_libtpu
def test_a_mesh_that_does_not_match_the_topology_is_refused() -> None:
    with pytest.raises(UserError, match="is 8 devices, the topology has 4"):
        learner_mesh(tpu_spec(), devices("v5p:2x2x1"))


@needs_libtpu
def test_a_slice_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="v5p:3x5x7"):
        devices("v5p:3x5x7")


@pytest.mark.parametrize(
    "text", ["v9:2x2", "v5p", "v5p:", "v5p:4x4x4x4", "v5p:ax2", "", "v5p:99999x1"]
)
def test_what_is_no_topology_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="no TPU topology"):
        parse_topology(text)


def test_the_spec_names_the_topology() -> None:
    learner = tpu_spec().learner
    assert str(learner_topology(learner)) == "v5p:2x2x2"
    assert learner_topology(tiny_spec().learner) is None


@needs_libtpu
@pytest.mark.slow
def test_the_command_reports_a_spec_that_fits(tmp_path: Path) -> None:
    # Given the shipped spec, cut down to a small model on eight chips
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    changes = {
        "learner.hosts": 2,
        "learner.mesh.fsdp": 4,
        "learner.mesh.tensor": 2,
        "learner.packing.tokens": TOKENS,
        "learner.packing.rows": 4,
        "samplers.volunteers.max_model_len": TOKENS,
        "samplers.volunteers.max_new_tokens": 1024,
        "data.max_prompt_tokens": 512,
        "reward.length.targets": "[100, 200]",
    }
    overrides = [part for path, value in changes.items() for part in ("--set", f"{path}={value}")]
    # When two of its programs are compiled by the command for that topology
    names = ("--topology", "v5p:2x2x2", "--programs", "publish", "score")
    done = aot("specs/target_long.yaml", *names, *overrides, config=tmp_path)
    # Then the report speaks of both and of the chip's memory
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report["programs"]) == {"publish", "score"}
    assert report["memory"]["fits"] is True
    assert report["memory"]["device_bytes"] == DEVICES["tpu-v5p"].memory
    assert report["programs"]["score"]["collectives"]["all-gather"]["bytes_sent"] > 0
    # And nothing but the report: libtpu has not written of hosts and locks
    assert done.stderr == ""


def test_the_command_without_the_compiler_says_what_to_install(tmp_path: Path) -> None:
    # Given a machine without libtpu
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    # When a TPU spec is compiled
    done = aot("specs/target_long.yaml", config=tmp_path, library=tmp_path / "libtpu.so")
    # Then the error says how it is installed
    assert done.returncode == 1
    assert "make aot" in done.stderr


def aot(
    *arguments: str, config: Path, library: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA", "JAX", "TPU"))}
    if library is not None:
        environment["TPU_LIBRARY_PATH"] = str(library)
    command = [sys.executable, "-m", "learner_jax", "aot", *arguments]
    return subprocess.run(
        [*command, "--model-config", str(config / "config.json")],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )


def test_compiling_for_this_machine_counts_each_layer() -> None:
    # Given a small run on this machine's virtual devices
    spec = tiny_spec()
    shape = {**SHAPE, "vocab_size": 32, "hidden_size": 16, "head_dim": 8, "intermediate_size": 24}
    small = [
        analyse(
            spec,
            parse_config({**shape, "num_hidden_layers": layers}, place="config.json"),
            jax.devices()[:2],
            memory=None,
            names=["score"],
        )
        for layers in (2, 5)
    ]
    # When the forward pass is compiled with 2 and with 5 layers
    flops = [report["programs"]["score"]["flops"] for report in small]
    # Then three more layers cost three times a layer's products, though both loops have one body
    layer = 16 * 8 * (2 * 2 + 2 * 2) + 3 * 16 * 24
    tokens = 2 * 64  # two rows on a device
    attention = 2 * 4 * 64 * 64 * 2 * 8  # scores and values of two rows, unmasked
    assert flops[1] - flops[0] == 3 * (2 * layer * tokens + attention)
