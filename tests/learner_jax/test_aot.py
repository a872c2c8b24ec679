"""The step compiled for TPUs that are not there: kernels, memory, refusals, costs, the estimate.

Tests of the TPU compiler are skipped where it is not installed; `make test` installs it.
"""

from __future__ import annotations

import json
import math
import os
from functools import cache
from typing import Any
from unittest.mock import patch

import jax
import pytest

from learner_jax.__main__ import main
from learner_jax.aot import analyse, compile_programs, learner_mesh
from learner_jax.hlo import parse, program_cost
from learner_jax.step import build_programs
from learner_jax.topology import (
    compiler_library,
    learner_topology,
    parse_topology,
    prepare_environment,
    topology_devices,
)
from runspec.core.errors import UserError
from runspec.core.models.family import parse_config
from runspec.core.spec.schema import RunSpec
from runspec.estimate.learner import learner_memory
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
    # Then attention is a Pallas kernel: forward, computed again, and backward, in each layer
    kernels = program_cost(text).custom_calls
    assert kernels["tpu_custom_call"] % SHAPE["num_hidden_layers"] == 0
    assert kernels["tpu_custom_call"] >= 3 * SHAPE["num_hidden_layers"]
    # And of all arrays, on the chip and off it, none has T or more in two of its dimensions:
    # neither T x T nor T x V / 2
    instructions = [i for computation in parse(text)[0].values() for i in computation.values()]
    found = [array.shape for instruction in instructions for array in instruction.result]
    assert len(found) > 1000
    assert [shape for shape in found if sum(size >= TOKENS for size in shape) > 1] == []
    # And none is as large as the logits of a row, in another shape
    assert max(map(math.prod, found)) < TOKENS * SHAPE["vocab_size"] // 2
    # And offloaded, each layer's input [1, T, D] of a device lies in the host's memory in bfloat16
    if remat == "offload":
        inputs = SHAPE["num_hidden_layers"] * TOKENS * SHAPE["hidden_size"] * 2
        assert memory.host_temp_size_in_bytes >= inputs


@needs_libtpu
def test_flops_of_the_compiled_forward_pass_are_those_of_its_matrices():
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


def test_compiling_for_this_machine_counts_each_layer():
    # Given a small run on this machine's virtual devices
    spec = tiny_spec()
    assert learner_topology(spec.learner) is None
    assert str(learner_topology(tpu_spec().learner)) == "v5p:2x2x2"
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


BODY = """%body (p: (s32[], f32[8,16], s32[])) -> (s32[], f32[8,16], s32[]) {
  %p = (s32[], f32[8,16]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %w = f32[16,16]{1,0} constant({...})
  %y = f32[8,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (s32[], f32[8,16]{1,0}, s32[]) tuple(%next, %y, %n)
}"""


def loop(end: str, bound: str) -> str:
    """A loop from 1 in steps of 2, with one product of 8 x 16 by 16 x 16."""
    return f"""{BODY}
%condition (p: (s32[], f32[8,16], s32[])) -> pred[] {{
  %p = (s32[], f32[8,16]{{1,0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %end = s32[] {end}
  ROOT %less = pred[] compare(%i, %end), direction=LT
}}
ENTRY %main (x: f32[8,16], n: s32[]) -> f32[8,16] {{
  %x = f32[8,16]{{1,0}} parameter(0)
  %n = s32[] parameter(1)
  %ten = s32[] constant(10)
  %one = s32[] constant(1)
  %start = (s32[], f32[8,16]{{1,0}}, s32[]) tuple(%one, %x, {bound})
  %loop = (s32[], f32[8,16]{{1,0}}, s32[]) while(%start), condition=%condition, body=%body, {NAME}
}}"""


NAME, CARRIED = 'metadata={op_name="jit(f)/head/while"}', "get-tuple-element(%p), index=2"
OF_DATA, PRODUCT = loop(CARRIED, "%n"), 2 * 8 * 16 * 16
LOOPS = {"jit(f)/head/while": 1}
CONVOLUTION = """ENTRY %main (q: bf16[16,512,128]) -> bf16[16,512,512] {
  %q = bf16[16,512,128]{2,1,0} parameter(0)
  ROOT %s = bf16[16,512,512]{2,1,0} convolution(%q, %q), WINDOW, dim_labels=0bf_0oi->0bf
}""".replace("WINDOW", "window={size=16 stride=15 lhs_dilate=16}")
SLICE = """%slice (stack: f32[64,128], i: s32[]) -> f32[1,128] {
  %stack = f32[64,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %layer = f32[1,128]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,128}
}
ENTRY %main (stack: f32[64,128], i: s32[]) -> f32[1,128] {
  %stack = f32[64,128]{1,0} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  ROOT %layer = f32[1,128]{1,0:T(8,128)S(1)} fusion(%stack, %i), kind=kLoop, calls=%slice
}"""
SCATTER = """%scatter (x: f32[64], i: s32[]) -> f32[16] {
  %x = f32[64]{0} parameter(0)
  %i = s32[] parameter(1)
  %sum = f32[64]{0} all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %own = f32[16]{0} dynamic-slice(%sum, %i), dynamic_slice_sizes={16}
}
ENTRY %main (x: f32[64], i: s32[]) -> f32[16] {
  %x = f32[64]{0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %own = f32[16]{0} fusion(%x, %i), kind=kCustom, calls=%scatter
}"""


@pytest.mark.parametrize(
    ("text", "assumed", "expected"),
    [
        # over 1, 3, 5, 7, 9, with the end in the condition, and carried along
        (loop("constant(10)", "%n"), {}, {"flops": 5 * PRODUCT, "assumed_loops": {}}),
        (loop(CARRIED, "%ten"), {}, {"flops": 5 * PRODUCT, "assumed_loops": {}}),
        # whose end is data: as often as is assumed, else once
        (OF_DATA, {"head": 7}, {"flops": 7 * PRODUCT, "assumed_loops": dict.fromkeys(LOOPS, 7)}),
        (OF_DATA, {}, {"assumed_loops": LOOPS}),
        # a batch of products as a TPU writes them: positions of padding are not counted
        (CONVOLUTION, {}, {"flops": 2 * 16 * 512 * 512 * 128}),
        # one layer of a stack, and memory that is not HBM
        (SLICE, {}, {"hbm_bytes": 128 * 4}),
        # a fused all-reduce of which a slice is kept is a reduce-scatter
        (SCATTER, {}, {"wire_bytes": {"reduce-scatter": 64 * 4 * 3 // 4}}),
    ],
)
def test_the_cost_of_a_program_is_that_of_what_it_executes(text, assumed, expected):
    cost = vars(program_cost(text, assumed))
    assert {name: cost[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("groups", "n"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['a'=2,'b'=4] {'b'}", 4),
        ("mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("mesh['a'=64,'b'=4], device_ids=([4,64]T(1,0)) {'b'}", 4),
        ("mesh['a'=8,'b'=4] {'a':(2)4}", 4),
    ],
)
def test_bytes_sent_by_collectives(groups, n):
    # Given collectives whose rings of n devices hold 4,096 bytes, each sends
    for kind, result, sent in (
        ("all-gather", "bf16[8192]", 4096 * (n - 1)),
        ("reduce-scatter", "bf16[512]", 4096 * (n - 1) // n),
        ("all-reduce", "bf16[2048]", 2 * 4096 * (n - 1) // n),
        ("collective-permute", "bf16[2048]", 4096),
    ):
        cost = program_cost(f"""ENTRY %main (x: bf16[2048]) -> {result} {{
  %x = bf16[2048]{{0}} parameter(0)
  ROOT %y = {result}{{0}} {kind}(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}
}}""")
        assert (cost.collectives, cost.wire_bytes) == ({kind: 1}, {kind: sent})
