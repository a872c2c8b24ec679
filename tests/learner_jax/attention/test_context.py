"""Attention over meshes: rows, heads and columns cut, on 8 virtual devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.attention import packed_attention, splash, xla
from learner_jax.attention.context import (
    Kernel,
    attend_on_mesh,
    context_shards,
    from_zigzag,
    to_zigzag,
)
from learner_jax.execution import Execution
from learner_jax.sharding import make_mesh
from runspec.core.spec import schema
from tests.learner_jax.attention.dense import assert_dense, packed_rows, random_arrays

SHORT = packed_rows([40, 1, -3, 14], [64], length=64)
LONG = packed_rows([200, 1, 159, -40, 70], [20, 400], length=480)
"""Chunks of 60 columns over four shards: tiles and segments do not end with them."""


def attend(mesh: jax.sharding.Mesh, kernel: Kernel = xla.attend) -> Any:
    """From order to order, as the decoder's doors make it."""

    def in_order(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        inside = (to_zigzag(x, mesh) for x in (q, k, v, ids))
        return from_zigzag(attend_on_mesh(kernel, *inside, mesh), mesh)

    return in_order


@pytest.mark.parametrize("shards", [2, 3, 4, 8])
def test_each_shard_holds_a_chunk_from_the_front_and_its_mirror(shards: int) -> None:
    mesh = make_mesh(schema.Mesh(context=shards))
    length = 6 * shards  # chunks of 3
    x = jnp.arange(2 * length).reshape(2, length)
    zigzag = to_zigzag(x, mesh)
    for number, shard in enumerate(zigzag.addressable_shards):
        chunks = np.array([number, 2 * shards - 1 - number])
        columns = (chunks[:, None] * 3 + np.arange(3)).reshape(-1)
        np.testing.assert_array_equal(shard.data, x[:, columns])
    np.testing.assert_array_equal(from_zigzag(zigzag, mesh), x)


def test_lengths_that_the_chunks_do_not_divide_are_not_cut() -> None:
    mesh = make_mesh(schema.Mesh(context=4))
    assert [context_shards(mesh, n) for n in (32, 28, 8, 4)] == [4, 1, 4, 1]
    x = jnp.arange(28).reshape(1, 28)
    assert to_zigzag(x, mesh) is x


@pytest.mark.parametrize("ids", [SHORT, LONG], ids=["at once", "in tiles"])
@pytest.mark.parametrize(
    ("axes", "kv_heads"),
    [
        ({"fsdp": 2, "context": 2, "tensor": 2}, 2),
        ({"context": 4, "tensor": 2}, 1),  # a key/value head that tensor does not divide
        ({"data": 2, "fsdp": 2, "context": 2}, 4),  # rows that data x fsdp does not divide
    ],
    ids=str,
)
def test_meshes_give_the_gradients_of_one_device(
    ids: np.ndarray, axes: Mapping[str, int], kv_heads: int
) -> None:
    arrays = random_arrays(ids, 4, kv_heads, 4)
    mesh = make_mesh(schema.Mesh(**axes))
    with jax.enable_x64(True):
        assert_dense(attend(mesh), arrays, ids, 1e-13)


def test_heads_that_tensor_does_not_divide_are_whole() -> None:
    arrays = [x.astype(np.float32) for x in random_arrays(SHORT, 3, 3, 4)]
    mesh = make_mesh(schema.Mesh(context=2, tensor=2))
    assert_dense(attend(mesh), arrays, SHORT, 2e-6)


@pytest.mark.slow  # Pallas' interpreter
def test_splash_over_context_and_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splash, "MAX_BLOCK_Q", 128)
    monkeypatch.setattr(splash, "MAX_BLOCK_KV", 128)
    ids = packed_rows([200, 1, -10, 100], [300], length=512)
    arrays = [x.astype(np.float32) for x in random_arrays(ids, 4, 2, 64)]
    mesh = make_mesh(schema.Mesh(fsdp=2, context=2, tensor=2))
    assert_dense(attend(mesh, partial(splash.attend, interpret=True)), arrays, ids, 2e-6)


def test_keys_and_values_are_all_that_is_gathered() -> None:
    # given the gradient at 4k tokens with 8 query heads to a key/value head
    mesh = make_mesh(schema.Mesh(context=4))
    execution = Execution(jnp.float32, mesh=mesh)
    sharding = jax.NamedSharding(mesh, jax.P(None, "context"))
    q, k, ids = (
        jax.ShapeDtypeStruct((1, 4096, *rest), dtype, sharding=sharding)
        for rest, dtype in (((8, 16), jnp.float32), ((1, 16), jnp.float32), ((), jnp.int32))
    )

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(packed_attention(q, k, v, ids, execution))

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, ids).compile().as_text()
    # then what is gathered has as many numbers as keys, values or segment ids, and no more
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", text)
    sizes = {int(np.prod([int(n) for n in shape.split(",")])) for shape in gathered}
    assert sizes <= {4096 * 16, 4096}
    assert 4096 * 16 in sizes
    # and their gradients are summed into shards
    assert "reduce-scatter(" in text
