"""The TPU kernel in Pallas' interpreter against the whole matrix, and compiled for TPUs."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.attention import splash
from learner_jax.topology import compiler_library
from tests.learner_jax.attention.dense import (
    assert_dense,
    computed,
    dense,
    packed_rows,
    random_arrays,
)

IDS = packed_rows([130, 1, 1, 60, -20, 100], [20], length=320)
"""Segments over several blocks of 128, a hole, blocks of padding; 320 % 128 = 64."""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splash, "MAX_BLOCK_Q", 128)
    monkeypatch.setattr(splash, "MAX_BLOCK_KV", 256)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    columns = jnp.arange(ids.shape[1], dtype=jnp.int32)
    return splash.attend(q, k, v, ids, columns, interpret=True)


@pytest.mark.slow  # the interpreter compiles each kernel for 5 s
@pytest.mark.parametrize(("kv_heads", "size"), [(2, 64), (4, 128)])
def test_output_and_gradients_are_those_of_the_whole_matrix(
    kv_heads: int, size: int, small_blocks: None
) -> None:
    # given grouped and full heads, of the sizes that models have
    arrays = [x.astype(np.float32) for x in random_arrays(IDS, 4, kv_heads, size)]
    assert_dense(attend, arrays, IDS, 2e-6)


@pytest.mark.slow
def test_strongly_negative_scores_inside_remat_and_scan(small_blocks: None) -> None:
    # given scores down to some -1e5, in a layer that is computed again
    arrays = [x.astype(np.float32) for x in random_arrays(IDS, 2, 1, 64, scale=1e4)]

    def layers(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda out, scale: (out + attend(q * scale, k, v, ids), None))
        return jax.lax.scan(layer, jnp.zeros_like(q), jnp.ones(2))[0]

    out, *gradients = computed(layers, arrays, IDS)
    # then the output is that of the exact softmax, twice, and every gradient is a number
    expected = 2 * dense(*arrays, IDS)[0]
    assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < 1e-3
    assert all(np.isfinite(x).all() for x in gradients)


def test_blocks_of_other_segments_are_not_visited() -> None:
    # given 32k tokens in segments of 2k, in the blocks that the kernel uses
    length = 32768
    columns = jnp.arange(length)
    block_q, block_kv = splash.MAX_BLOCK_Q, splash.MAX_BLOCK_KV
    visits = {}
    for segment in (length, 2048):
        reached = splash._reached(columns // segment * segment, columns, block_q, block_kv, length)
        visits[segment] = int(reached.sum())
    # then whole rows visit the blocks under the diagonal, and segments their own
    assert visits == {length: 2 * (32 * 33 // 2), 2048: 16 * (1 + 1 + 2 + 2)}


def test_tables_name_the_next_block_that_is_visited() -> None:
    reached = jnp.array([[1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 1, 0]], bool)
    along_keys = splash._mask_info(reached, jnp.arange(3), axis=1)
    along_queries = splash._mask_info(reached, jnp.arange(3), axis=0)
    assert along_keys.block_mask.tolist() == [reached.astype(int).tolist()]
    assert along_keys.data_next.tolist() == [[[0, 0, 0, 0], [2, 2, 2, 2], [1, 1, 2, 2]]]
    # a block of keys that no query sees loads the first queries
    assert along_queries.data_next.tolist() == [[[0, 2, 1, 0], [0, 2, 1, 0], [0, 2, 2, 0]]]


AHEAD_OF_TIME = """
import sys
from learner_jax.topology import parse_topology, prepare_environment, topology_devices
prepare_environment()
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from learner_jax.attention import packed_attention
from learner_jax.execution import Execution

names = ("data", "fsdp", "context", "tensor")
T = 32768

def compiled(topology, size):
    devices = np.array(topology_devices(parse_topology(topology))[:4]).reshape(1, 1, 2, 2)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * 4)

    def loss(q, k, v, ids):
        out = packed_attention(q, k, v, ids, Execution(jnp.bfloat16, mesh=mesh))
        return jnp.sum(out.astype(jnp.float32))

    def of(spec, *rest, dtype=jnp.bfloat16):
        sharding = NamedSharding(mesh, P(None, *spec))
        return jax.ShapeDtypeStruct((1, T, *rest), dtype, sharding=sharding)

    q, k = (of(("context", "tensor"), heads, size) for heads in (8, 2))
    ids = of(("context",), dtype=jnp.int32)
    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, ids).compile()

for topology, size in zip(sys.argv[1::2], sys.argv[2::2]):
    program = compiled(topology, int(size))
    print(
        program.memory_analysis().temp_size_in_bytes,
        program.as_text().count('custom_call_target="tpu_custom_call"'),
    )
"""


@pytest.mark.slow  # a process, and three compilations of some 5 s
def test_compiles_for_tpus_without_scores_of_the_whole_row() -> None:
    if compiler_library() is None:
        pytest.skip("libtpu is not installed")
    # when the gradient at 32k tokens over context and tensor is compiled for TPUs
    cases = ("v5e:2x4", "128", "v5p:2x2x2", "64", "v6e:2x4", "128")
    done = subprocess.run(
        [sys.executable, "-c", AHEAD_OF_TIME, *cases],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(found) == 3
    for temporary, kernels in found:
        # then "auto" chose the kernel, which runs thrice (forward, dq, dk and dv), and a device
        # needs some copies of its 16k queries of 4 heads; scores would be 2 GiB a head
        assert kernels == 3
        assert temporary < 2**29
