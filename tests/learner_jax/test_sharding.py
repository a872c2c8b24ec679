"""Meshes over slices, and what travels between devices in an update."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.decoder import embed
from learner_jax.execution import Execution
from learner_jax.sharding import make_mesh, shard_batch
from learner_jax.step import build_programs
from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import Mesh, Packing
from tests.learner_jax.conftest import changed, tiny_spec

# Every size its own, so that a shape tells what an array is.
VOCABULARY, HIDDEN, MLP, HEADS, HEAD_DIM, ROWS, TOKENS = 320, 64, 192, 4, 16, 8, 48
CONFIG = ModelConfig(
    "qwen2", VOCABULARY, HIDDEN, MLP, 3, HEADS, 2, HEAD_DIM, 64, 1e4, 1e-6, False, True
)
COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


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


def test_only_the_slice_axis_crosses_slices() -> None:
    # given eight devices in two slices, the first four and the last
    # then data runs from slice to slice, and fsdp stays inside one
    assert ids(make_mesh(Mesh(data=4, fsdp=2, slices=2))) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    mesh = make_mesh(Mesh(fsdp=4, tensor=2, slices=2, slice_axis="fsdp"))
    assert mesh.shape == {"data": 1, "fsdp": 4, "context": 1, "tensor": 2}
    assert ids(mesh) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_slices_are_those_that_the_devices_name() -> None:
    # given devices of two slices that are listed in turn
    devices = [Device(i, slice_index=i % 2) for i in range(4)]
    # when data crosses them, then its outer part does
    assert ids(make_mesh(Mesh(data=2, fsdp=2, slices=2), devices)) == [[0, 2], [1, 3]]
    # and a mesh that needs more of a slice than there is, is refused
    uneven = [Device(i, slice_index=int(i == 3)) for i in range(4)]
    with pytest.raises(UserError, match=r"slices of \[3, 1\] devices, the mesh needs 2 of each"):
        make_mesh(Mesh(data=2, fsdp=2, slices=2), uneven)


def test_slices_that_do_not_divide_their_axis_are_refused() -> None:
    with pytest.raises(UserError, match=r"learner\.mesh\.slices: 2 slices do not divide data = 3"):
        make_mesh(Mesh(data=3, fsdp=2, slices=2))


@cache
def collectives(**mesh: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """(kind, operation, shape) of what `accumulate` sends between devices."""
    packing = Packing(tokens=TOKENS, rows=ROWS)
    spec = changed(tiny_spec(), learner={"mesh": Mesh(**mesh), "packing": packing})
    programs = build_programs(spec, CONFIG, make_mesh(spec.learner.mesh))
    count = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = programs.accumulate.lower(
        programs.abstract_state.params, *programs.abstract_batch, count
    )
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"fsdp": 2, "tensor": 2},
        {"fsdp": 4, "data": 2},
        {"fsdp": 2, "context": 2, "tensor": 2},
    ],
    ids=lambda mesh: ",".join(f"{axis}={size}" for axis, size in mesh.items()),
)
def test_only_weights_are_gathered_and_no_activations_of_other_rows(mesh: dict[str, int]) -> None:
    # given an update on a mesh
    sent = collectives(**mesh)
    tensor, rows = mesh.get("tensor", 1), ROWS // (mesh.get("data", 1) * mesh["fsdp"])
    columns = TOKENS // mesh.get("context", 1)
    layer = HIDDEN * MLP // tensor
    # then what is gathered is one matrix at a time of a layer, the embedding or the head, cut over
    # tensor still, or keys and values of the device's own rows
    keys = 2 * rows * TOKENS * HEAD_DIM
    table = VOCABULARY * HIDDEN // tensor
    assert {"all-gather", "all-reduce"} <= {kind for kind, *_ in sent}
    for kind, operation, shape in sent:
        if kind == "all-gather":
            assert math.prod(shape) <= max(layer, keys) or math.prod(shape) == table, operation
            assert "gather" not in operation.rsplit("/", 1)[-1] or "shard_map" in operation
    # and nothing goes from all to all, or has the vocabulary beside positions
    assert not [each for each in sent if each[0] == "all-to-all"]
    assert not [
        shape for *_, shape in sent if shape[-1:] == (VOCABULARY // tensor,) and HIDDEN not in shape
    ]
    # and activations are summed over tensor alone: a device's own rows and columns
    activations = [shape for *_, shape in sent if shape[-1:] == (HIDDEN,) and len(shape) == 3]
    own = rows * columns * HIDDEN
    assert all(math.prod(shape) <= own for shape in activations)


@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2, "tensor": 2}, {"data": 2, "context": 2}], ids=str)
def test_embedding_is_a_look_up_and_its_gradient_a_sum_in_float32(mesh: dict[str, int]) -> None:
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
