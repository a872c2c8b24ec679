"""The gradient of an optimizer batch: the formula's, the same however it is computed.

And meshes: what they cut and send, and what cannot be built on them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.decoder import embed
from learner_jax.model import abstract_params, bind, init_params
from learner_jax.packing import Sample, pack
from learner_jax.sharding import Execution, make_mesh, shard_batch, shard_params
from learner_jax.shared_prompts import pack_samples, pack_shared
from learner_jax.step import build_programs, policy_logprobs
from runspec.core import schema
from runspec.core.errors import UserError
from runspec.core.models import ModelConfig
from runspec.core.schema import Grpo, Mesh, Packing, RunSpec
from tests.learner_jax.conftest import changed, tiny_spec
from tests.learner_jax.reference import (
    MAX_NEW_TOKENS,
    Rollout,
    inputs_of,
    loss_of,
    make_rollouts,
    relative_errors,
)

pytestmark = pytest.mark.slow

CONFIG = ModelConfig("qwen2", 24, 16, 24, 2, 4, 2, 8, 64, 10000.0, 1e-6, False, True)
TEMPERATURE = 0.7
MICROBATCHES = 16
ALGORITHM = Grpo(kl={"coef": 0.1}, entropy_coef=0.3, importance={"cap": 1.5})
"""What the other switches change is in test_loss."""


@cache
def rollouts() -> list[Rollout]:
    """Of two prompts, five each."""
    made = make_rollouts(np.random.default_rng(0), CONFIG.vocab_size, 10, longest=30)
    return [replace(each, prompt=made[n % 2].prompt) for n, each in enumerate(made)]


def params_of(dtype: Any, config: ModelConfig = CONFIG) -> Any:
    """Parameters with biases and norms that matter; the same in every type."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda s: jnp.asarray(
            s.initial.mean + rng.normal(size=s.shape) * (s.initial.std or 0.1), dtype
        ),
        abstract_params(config),
    )


def spec_of(
    mesh: dict[str, int], tokens: int, rows: int, remat: str = "full", shared: bool = False
) -> RunSpec:
    packing = Packing(tokens=tokens, rows=rows, shared_prompts=shared)
    learner = {"mesh": Mesh(**mesh), "packing": packing, "remat": remat}
    spec = changed(tiny_spec(), learner=learner)
    sampling = spec.samplers[0].sampling.model_copy(update={"temperature": TEMPERATURE})
    pool = spec.samplers[0].model_copy(update={"sampling": sampling})
    return spec.model_copy(update={"samplers": [pool], "algorithm": ALGORITHM})


def program_gradient(spec: RunSpec) -> tuple[Any, dict[str, float]]:
    """The gradient and metrics by the jitted programs, in float32."""
    mesh = make_mesh(spec.learner.mesh)
    programs = build_programs(spec, CONFIG, mesh)
    params = shard_params(params_of(jnp.float32), abstract_params(CONFIG), mesh)
    samples = [Sample(r.prompt, r.output) for r in rollouts()]
    packed = pack_samples(samples, spec, mesh, MICROBATCHES)
    inputs = jax.tree.map(
        lambda x: x.astype(np.float32), inputs_of(packed, rollouts(), spec.algorithm)
    )
    total = programs.accumulate(
        params, shard_batch(packed.batch, mesh), shard_batch(inputs, mesh), packed.microbatches
    )
    total = jax.device_get(total)
    return total.grads, total.metrics.means()


@pytest.fixture(scope="module")
def expected() -> tuple[Any, dict[str, float]]:
    return program_gradient(spec_of({}, tokens=64, rows=4))


@pytest.mark.parametrize(
    ("mesh", "tokens", "rows", "remat", "shared"),
    [
        ({}, 200, 1, "none", False),
        ({"data": 2, "fsdp": 2, "slices": 2}, 48, 4, "dots", False),
        ({"fsdp": 2, "context": 2, "tensor": 2}, 64, 4, "attention", False),
        ({"data": 2, "context": 4}, 64, 2, "offload", False),
        ({}, 64, 4, "full", True),  # by blocks
        ({"data": 2, "fsdp": 2, "tensor": 2}, 48, 4, "attention", True),
    ],
    ids=str,
)
def test_gradient_is_the_same_on_every_mesh_and_packing(
    mesh, tokens, rows, remat, shared, expected
):
    # given one optimizer batch, when it is packed and sharded another way
    grads, metrics = program_gradient(spec_of(mesh, tokens, rows, remat, shared))
    # then gradients and metrics are those of one device
    assert max(relative_errors(grads, expected[0]).values()) <= 1e-5
    assert metrics == pytest.approx(expected[1], rel=1e-5)


def test_gradient_is_that_of_the_formula(expected):
    # given the gradient by the plain formula in float64, one sample at a time
    with jax.enable_x64(True):
        truth = jax.grad(loss_of)(
            params_of(jnp.float64),
            CONFIG,
            rollouts(),
            ALGORITHM,
            temperature=TEMPERATURE,
            max_new_tokens=MAX_NEW_TOKENS,
        )
    # then the programs' is that but for float32's rounding
    assert max(relative_errors(expected[0], truth).values()) < 1e-4


def turned(rng: np.random.Generator, prompt: np.ndarray, length: int) -> Sample:
    """A sample of some length, of which the policy sampled two thirds."""
    own = rng.random(length) < 2 / 3
    own[0] = own[-1] = True
    return Sample(prompt, rng.integers(0, CONFIG.vocab_size, length).astype(np.int32), own)


@pytest.mark.parametrize(("tokens", "rows"), [(64, 1), (64, 2), (150, 2)], ids=str)
def test_shared_prompts_give_the_gradient_of_plain_rows(tokens, rows):
    # given groups of unlike prompts and lengths, with turns, which do not all fit into one part
    rng = np.random.default_rng(tokens)
    prompts = [rng.integers(0, CONFIG.vocab_size, n).astype(np.int32) for n in (1, 30, 17)]
    samples = [turned(rng, p, int(n)) for p in prompts for n in rng.integers(1, 33, 6)]
    weights = [rng.normal(size=sample.targets) for sample in samples]
    found = []
    with jax.enable_x64(True):
        for how in (pack, pack_shared):
            packed = how(samples, tokens=tokens, rows=rows, shards=1, microbatches=18)
            on = packed.scatter(weights)
            scored = np.zeros(on.shape)

            def loss(params, part, at, on=on):
                policy, how = bind(CONFIG, params), Execution(jnp.float64)
                logprobs, entropy = policy_logprobs(policy, part, how, temperature=0.7)
                return ((logprobs + 0.3 * entropy) * on[at]).sum(), logprobs

            grads = []
            for at in range(packed.microbatches):
                run = jax.value_and_grad(loss, has_aux=True)
                (_, scored[at]), one = run(params_of(jnp.float64), packed.token_batch(at), at)
                grads.append(one)
            total = jax.tree.map(lambda *each: sum(each), *grads)
            found.append((total, packed.gather(scored), packed))
    # then log-probs and gradients are those of rows in which every sample has its prompt
    (plain, expected, rows_of), (shared, logprobs, parts) = found
    assert max(relative_errors(shared, plain).values()) <= 1e-10
    for ours, theirs in zip(logprobs, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)
    # and a prompt has positions once in each part where it is needed
    assert parts.used < rows_of.used / 1.3


DEEP = ModelConfig("qwen2", 32, 32, 96, 6, 2, 1, 16, 2048, 1e4, 1e-6, False, True)
ROWS, TOKENS = 2, 512  # long enough that attention goes by blocks
KEPT_INPUTS = 6 * ROWS * TOKENS * 32 * 4
"""Bytes of the inputs of all layers."""


def test_each_remat_policy_keeps_less_than_the_one_before_and_gives_the_same_gradient():
    # given the gradient of a model of six layers, compiled under each policy
    weights = np.linspace(0.0, 1.0, 32, dtype=np.float32)

    def compiled(remat: schema.Remat) -> jax.stages.Compiled:
        def objective(params: Any, tokens: jax.Array) -> jax.Array:
            ids, positions = jnp.ones_like(tokens), jnp.cumsum(jnp.ones_like(tokens), axis=1)
            execution = Execution(jnp.float32, remat=remat)
            return jnp.sum(bind(DEEP, params)(tokens, ids, positions, execution) * weights)

        return jax.jit(jax.grad(objective)).lower(params, tokens).compile()

    params = params_of(jnp.float32, DEEP)
    tokens = np.random.default_rng(0).integers(0, 32, (ROWS, TOKENS)).astype(np.int32)
    programs = {remat: compiled(remat) for remat in get_args(schema.Remat)}
    # then what it needs beside arguments and results shrinks
    kept = {name: p.memory_analysis().temp_size_in_bytes for name, p in programs.items()}
    assert kept["none"] > kept["dots"] > kept["attention"] > kept["full"] > KEPT_INPUTS
    # and `attention` keeps of each layer, beside its input, an output of that size and little more
    assert KEPT_INPUTS <= kept["attention"] - kept["full"] < 1.5 * KEPT_INPUTS
    # and the gradient is that of keeping everything
    expected = programs["none"](params, tokens)
    for remat, program in programs.items():
        assert max(relative_errors(program(params, tokens), expected).values()) <= 1e-5, remat


SMALL = ModelConfig("qwen2", 32, 16, 24, 2, 2, 1, 8, 64, 1e4, 1e-6, False, True)


WINDOW = replace(SMALL, model_type="mistral", sliding_window=63)
"""Shorter than the rows of a run."""


@pytest.mark.parametrize(
    ("packing", "mesh", "message"),
    [
        ({"tokens": 32, "rows": 3}, {"data": 2}, r"learner\.packing\.rows: 3"),
        ({"tokens": 31, "rows": 2}, {"context": 2}, r"learner\.packing\.tokens: 31"),
        ({"tokens": 32, "rows": 2}, {"fsdp": 8, "tensor": 2}, r"16 devices, here are"),
        ({"tokens": 64, "rows": 2}, {}, r"learner\.packing\.tokens: 64 tokens in a row"),
        ({"tokens": 32, "rows": 2}, {"data": 3, "slices": 2}, r"2 slices do not divide data = 3"),
        ({"tokens": 32, "rows": 2}, {"data": 1}, "different temperatures"),
    ],
)
def test_rows_meshes_and_pools_that_do_not_fit_are_refused(packing, mesh, message):
    spec = changed(tiny_spec(), learner={"mesh": Mesh(**mesh), "packing": Packing(**packing)})
    if "temperatures" in message:
        pool = spec.samplers[0]
        warm = pool.sampling.model_copy(update={"temperature": 1.5})
        other = pool.model_copy(update={"name": "warm", "sampling": warm})
        spec = spec.model_copy(update={"samplers": [pool, other]})
    with pytest.raises(UserError, match=message):
        build_programs(spec, SMALL if mesh else WINDOW, make_mesh(spec.learner.mesh))


@pytest.mark.parametrize(("asked", "chunk"), [(4, 4), (4096, 128)])
def test_logits_exist_of_as_many_positions_as_the_spec_says(asked, chunk):
    # given two shards of 128 positions, and a vocabulary of 32
    spec = changed(tiny_spec(), learner={"logits_chunk": asked})
    programs = build_programs(spec, SMALL, make_mesh(spec.learner.mesh))
    # when log-probs and gradients are lowered
    params, (tokens, inputs) = programs.abstract_state.params, programs.abstract_batch
    for lowered in (
        programs.score.lower(params, tokens, 1),
        programs.accumulate.lower(params, tokens, inputs, 1),
    ):
        # then the largest logits [shards, positions, vocabulary] are of so many positions
        sizes = {int(n) for n in re.findall(r"tensor<2x(\d+)x32xf32>", lowered.as_text())}
        assert max(sizes - {SMALL.hidden_size}) == chunk  # less the gradient of the head


@dataclass(frozen=True)
class Device:
    """What a mesh asks of a device; there are no slices to be had here."""

    id: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = ""
    process_index: int = 0


def ids(mesh: jax.sharding.Mesh) -> list[Any]:
    return np.vectorize(lambda device: device.id)(mesh.devices).reshape(-1, 2).tolist()


def test_only_the_slice_axis_crosses_slices():
    # given eight devices in two slices, the first four and the last
    # then data runs from slice to slice, and fsdp stays inside one
    assert ids(make_mesh(Mesh(data=4, fsdp=2, slices=2))) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    mesh = make_mesh(Mesh(fsdp=4, tensor=2, slices=2, slice_axis="fsdp"))
    assert mesh.shape == {"data": 1, "fsdp": 4, "context": 1, "tensor": 2}
    assert ids(mesh) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # given devices of two slices that are listed in turn, then data's outer part crosses them
    devices, uneven = (
        [Device(i, slice_index=of(i)) for i in range(4)]
        for of in (lambda i: i % 2, lambda i: i // 3)
    )
    assert ids(make_mesh(Mesh(data=2, fsdp=2, slices=2), devices)) == [[0, 2], [1, 3]]
    # and a mesh that needs more of a slice than there is is refused
    with pytest.raises(UserError, match=r"slices of \[3, 1\] devices, the mesh needs 2 of each"):
        make_mesh(Mesh(data=2, fsdp=2, slices=2), uneven)


def test_a_dimension_that_the_mesh_does_not_divide_is_whole():
    # given one key/value head on two tensor devices
    mesh = make_mesh(Mesh(tensor=2))
    params = shard_params(init_params(SMALL, jax.random.key(0)), abstract_params(SMALL), mesh)
    # then it is on both, and what divides is cut
    assert params["layers"]["attention"]["k"]["weight"].sharding.is_fully_replicated
    assert params["layers"]["mlp"]["gate"]["weight"].addressable_shards[0].data.shape == (2, 16, 12)


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 2}, {"data": 2, "context": 2}], ids=str)
def test_embedding_is_a_look_up_and_its_gradient_a_sum_in_float32(mesh):
    # given a token that comes a thousand times, and activations in bfloat16
    made = make_mesh(Mesh(**mesh))
    rng = np.random.default_rng(0)
    table = rng.normal(size=(12, 8)).astype(np.float32)
    tokens = np.where(rng.random((4, 512)) < 0.5, 3, rng.integers(0, 12, (4, 512)))
    tokens = tokens.astype(np.int32)
    weights = rng.random((4, 512, 8)).astype(np.float32)
    execution = Execution(jnp.bfloat16, mesh=made)

    def objective(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = embed(table, tokens, execution)
        return jnp.sum(x.astype(jnp.float32) * weights), x

    # when looked up and differentiated
    gradient, x = jax.jit(jax.grad(objective, has_aux=True))(table, shard_batch(tokens, made))
    # then the rows are the table's, rounded, and the gradient is the sum to float32's exactness
    np.testing.assert_array_equal(x, table.astype(jnp.bfloat16)[tokens])
    expected = np.zeros((12, 8))
    np.add.at(expected, tokens, weights.astype(jnp.bfloat16).astype(np.float64))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


# Every size its own, so that a shape tells what an array is.
VOCABULARY, HIDDEN, MLP, HEAD_DIM, B, T = 320, 64, 192, 16, 8, 48
WIDE = ModelConfig("qwen2", VOCABULARY, HIDDEN, MLP, 3, 4, 2, HEAD_DIM, 64, 1e4, 1e-6, False, True)
COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(mesh: Mesh) -> list[tuple[str, str, tuple[int, ...]]]:
    """(kind, operation, shape) of what `accumulate` sends between devices."""
    packing = Packing(tokens=T, rows=B)
    spec = changed(tiny_spec(), learner={"mesh": mesh, "packing": packing})
    programs = build_programs(spec, WIDE, make_mesh(mesh))
    count = jax.ShapeDtypeStruct((), jnp.int32)
    arguments = programs.abstract_state.params, *programs.abstract_batch, count
    lowered = programs.accumulate.lower(*arguments)  # type: ignore[attr-defined]
    found = []
    for line in lowered.compile().as_text().splitlines():
        match = COLLECTIVE.search(line)
        # Groups of one device, which other platforms than the CPU's leave out, send nothing.
        if match is None or "replica_groups={{0},{1}" in line:
            continue
        operation = re.search(r'op_name="([^"]*)"', line)
        for shape in re.findall(r"\w+\[([\d,]*)\]", match.group(1)):
            sizes = tuple(int(size) for size in shape.split(",") if size)
            found.append((match.group(2), operation.group(1) if operation else "", sizes))
    return found


def test_only_weights_are_gathered_and_no_activations_of_other_rows():
    # given an update on a mesh
    mesh = Mesh(fsdp=2, context=2, tensor=2)
    sent = collectives(mesh)
    rows, columns = B // (mesh.data * mesh.fsdp), T // mesh.context
    # then what is gathered is one matrix at a time of a layer, the embedding or the head, cut over
    # tensor still, or keys and values of the device's own rows
    layer, keys = HIDDEN * MLP // mesh.tensor, 2 * rows * T * HEAD_DIM
    table = VOCABULARY * HIDDEN // mesh.tensor
    assert {"all-gather", "all-reduce"} <= {kind for kind, *_ in sent}
    for kind, operation, shape in sent:
        if kind == "all-gather":
            assert math.prod(shape) <= max(layer, keys) or math.prod(shape) == table, operation
            assert "gather" not in operation.rsplit("/", 1)[-1] or "shard_map" in operation
    # and nothing goes from all to all, or has the vocabulary beside positions
    assert not [each for each in sent if each[0] == "all-to-all"]
    part = VOCABULARY // mesh.tensor
    assert not [shape for *_, shape in sent if shape[-1:] == (part,) and HIDDEN not in shape]
    # and activations are summed over tensor alone: a device's own rows and columns
    activations = [shape for *_, shape in sent if shape[-1:] == (HIDDEN,) and len(shape) == 3]
    assert all(math.prod(shape) <= rows * columns * HIDDEN for shape in activations)
