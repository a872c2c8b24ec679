"""Packed attention against the whole matrix: spans, plain XLA, meshes, choice of the kernel.

And the kernels of GPUs and TPUs: what surrounds cuDNN's, and splash in Pallas' interpreter. cuDNN
needs a GPU: `flat_memory` stands for its packed kernel. It reads the offsets that JAX itself would
hand to cuDNN, and leaves NaN wherever cuDNN would not write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as private

from learner_jax.attention import (
    Kernel,
    _kernel,
    attend_on_mesh,
    context_shards,
    cudnn,
    from_zigzag,
    packed_attention,
    splash,
    to_zigzag,
    xla,
)
from learner_jax.attention.xla import key_blocks, segment_starts
from learner_jax.sharding import Execution, make_mesh
from runspec.core import schema
from runspec.core.errors import UserError

pytestmark = pytest.mark.slow

PADDING = 0
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def packed_rows(*rows: Sequence[int], length: int) -> np.ndarray:
    """Segment ids [rows, length] from the lengths of each row's segments; padding at the end.

    A negative length is a hole: padding between segments.
    """
    ids = np.full((len(rows), length), PADDING, np.int32)
    for row, lengths in zip(ids, rows, strict=True):
        begin = 0
        for number, count in enumerate(lengths, start=1):
            if count > 0:
                row[begin : begin + count] = number
            begin += abs(count)
        assert begin <= length
    return ids


def random_arrays(
    ids: np.ndarray, heads: int, kv_heads: int, size: int, *, scale: float = 1.0
) -> Arrays:
    """Queries, keys and values, float64."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(*ids.shape, n, size)) for n in (heads, kv_heads, kv_heads))
    return q * scale, k, v


def weight_of(q: np.ndarray) -> np.ndarray:
    """What the outputs are multiplied with before they are summed: the gradient of each."""
    return np.random.default_rng(1).normal(size=q.shape)


def dense(q: Any, k: Any, v: Any, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    """The output and the gradients of sum(output * weight) by q, k and v, with the whole matrix, in
    float64."""
    column = np.arange(ids.shape[1])
    sees = (ids[:, :, None] == ids[:, None, :]) & (column[:, None] >= column)
    sees = (sees & (ids != PADDING)[:, :, None])[:, None]

    def output(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys, values = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bqnh,btnh->bnqt", q, keys) / np.sqrt(q.shape[3])
        p = jnp.where(sees, jax.nn.softmax(jnp.where(sees, scores, -1e300)), 0.0)
        return jnp.einsum("bnqt,btnh->bqnh", p, values)

    with jax.enable_x64(True):
        out, back = jax.vjp(output, *(np.asarray(x, np.float64) for x in (q, k, v)))
        return jax.device_get((out, *back(weight_of(q))))


def computed(
    attend: Callable[..., jax.Array], arrays: Sequence[Any], ids: np.ndarray
) -> tuple[np.ndarray, ...]:
    """What `dense` gives, by `attend(q, k, v, ids)` under jit."""
    weight = weight_of(arrays[0])

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attend(q, k, v, jnp.asarray(ids))
        return jnp.sum(out * weight.astype(out.dtype)), out

    grads, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*map(jnp.asarray, arrays))
    return tuple(np.asarray(x, np.float64) for x in (out, *grads))


def assert_dense(
    attend: Callable[..., jax.Array], arrays: Sequence[Any], ids: np.ndarray, limit: float
) -> None:
    """Output and gradients are those of `dense`, within `limit` of their norms, and exact zeros at
    padding."""
    found, expected = computed(attend, arrays, ids), dense(*arrays, ids)
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < limit, f"{name}: {error:.1e}"
        assert not a[ids == PADDING].any(), f"{name} at padding"


def assert_exact_softmax(
    attend: Callable[..., jax.Array], arrays: Sequence[Any], ids: np.ndarray, layers: int = 1
) -> None:
    """Scores down to some -1e5, where a mask of small numbers would leak, give finite numbers and
    the output of the exact softmax."""
    found, expected = computed(attend, arrays, ids), layers * dense(*arrays, ids)[0]
    assert all(np.isfinite(x).all() for x in found)
    assert np.linalg.norm(found[0] - expected) / np.linalg.norm(expected) < 1e-3


def test_blocks_computed_grow_with_squared_segments_not_with_the_row():
    length, block = 32768, 256

    def blocks(lengths: list[int]) -> int:
        starts = segment_starts(packed_rows(lengths, length=length)).reshape(-1, block)
        first, stop = key_blocks(starts, jnp.arange(length).reshape(-1, block), block)
        return int(jnp.sum(jnp.maximum(stop - first, 0)))

    # given 32k tokens as one segment and as segments of 2k, in blocks of 256
    # then the blocks are those under each segment's diagonal, the diagonal included
    assert blocks([length]) == 128 * 129 // 2
    assert blocks([length // 16] * 16) == 16 * (8 * 9 // 2)
    # and those of log-normal segments, which begin anywhere in a block, hold the causal pairs of
    # each segment and two blocks a query for the edges
    lengths = np.random.default_rng(0).lognormal(7.3, 0.7, 100).astype(int)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), length)]
    needed = int(np.sum(lengths * (lengths + 1) // 2))
    assert needed <= blocks(lengths.tolist()) * block**2 <= needed + 2 * block * length


SHORT = packed_rows([1, 13, 1, 6, -2, 3], [], length=32)
LONG = packed_rows([150, 1, 1, 90, -20, 50], [20, 280], length=320)
"""Segments over several tiles of queries, a hole, tiles of padding; 320 % 128 = 64, and four shards
have chunks of 40 columns: tiles and segments do not end with them."""


def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    return xla.attend(q, k, v, ids, jnp.arange(ids.shape[1], dtype=jnp.int32))


@pytest.mark.parametrize(
    ("ids", "kv_heads", "dtype", "limit"),
    [
        (SHORT, 1, "float64", 1e-13),
        (LONG, 2, "float64", 1e-13),
        (SHORT, 6, "float32", 2e-6),
        (LONG, 3, "bfloat16", 2e-2),
    ],
    ids=["at once", "in tiles", "at once, float32", "in tiles, bfloat16"],
)
def test_output_and_gradients_are_those_of_the_whole_matrix(ids, kv_heads, dtype, limit):
    with jax.enable_x64(dtype == "float64"):
        arrays = [jnp.asarray(x, dtype) for x in random_arrays(ids, 6, kv_heads, 4)]
        assert_dense(attend, arrays, ids, limit)


@pytest.mark.parametrize("ids", [SHORT, LONG], ids=["at once", "in tiles"])
def test_strongly_negative_scores_do_not_disturb_the_mask(ids):
    assert_exact_softmax(attend, random_arrays(ids, 4, 2, 4, scale=1e5), ids)


def test_memory_grows_with_the_row_not_with_its_square():
    # given the gradient at 32k tokens
    length = 32768
    q, k = (jax.ShapeDtypeStruct((1, length, n, 8), jnp.float32) for n in (4, 2))
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    gradient = jax.grad(lambda *arrays: jnp.sum(attend(*arrays)), (0, 1, 2))
    # then it takes some copies of the queries, 4 MiB each, not scores of 4 x 32k x 32k
    compiled = jax.jit(gradient).lower(q, k, k, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 2**20


def on_mesh(mesh: jax.sharding.Mesh, kernel: Kernel = xla.attend) -> Any:
    """From order to order, as the decoder's doors make it."""

    def in_order(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        inside = (to_zigzag(x, mesh) for x in (q, k, v, ids))
        return from_zigzag(attend_on_mesh(kernel, *inside, mesh), mesh)

    return in_order


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_each_shard_holds_a_chunk_from_the_front_and_its_mirror(shards):
    mesh = make_mesh(schema.Mesh(context=shards))
    length = 6 * shards  # chunks of 3
    x = jnp.arange(2 * length).reshape(2, length)
    zigzag = to_zigzag(x, mesh)
    for number, shard in enumerate(zigzag.addressable_shards):
        chunks = np.array([number, 2 * shards - 1 - number])
        columns = (chunks[:, None] * 3 + np.arange(3)).reshape(-1)
        np.testing.assert_array_equal(shard.data, x[:, columns])
    np.testing.assert_array_equal(from_zigzag(zigzag, mesh), x)
    # and a length that the chunks do not divide is not cut
    lengths = (length, length + shards, 2 * shards, shards)
    assert [context_shards(mesh, n) for n in lengths] == [shards, 1, shards, 1]
    x = jnp.zeros((1, shards))
    assert to_zigzag(x, mesh) is x


@pytest.mark.parametrize(
    ("ids", "axes", "heads"),
    [
        (LONG, {"context": 4, "tensor": 2}, (4, 1)),  # a key/value head that tensor does not divide
        (SHORT, {"data": 2, "fsdp": 2, "context": 2}, (4, 4)),  # nor data x fsdp the rows
        (SHORT, {"context": 2, "tensor": 2}, (3, 3)),  # heads that tensor does not divide
    ],
    ids=["in tiles", "rows", "heads"],
)
def test_meshes_give_the_gradients_of_one_device(ids, axes, heads):
    with jax.enable_x64(True):
        arrays = random_arrays(ids, *heads, 4)
        assert_dense(on_mesh(make_mesh(schema.Mesh(**axes))), arrays, ids, 1e-13)


CPU: Any = SimpleNamespace(platform="cpu", device_kind="cpu")
TPU: Any = SimpleNamespace(platform="tpu", device_kind="TPU v5p")
AMD: Any = SimpleNamespace(platform="gpu", device_kind="AMD Instinct MI300X")
H200: Any = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
A100: Any = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
BF16, F32, F64 = (np.dtype(t) for t in (jnp.bfloat16, jnp.float32, jnp.float64))


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_size", "shards", "expected"),
    [
        ("auto", CPU, BF16, 128, 1, xla.attend),
        ("auto", TPU, BF16, 128, 2, splash.attend),
        ("auto", TPU, F64, 64, 1, xla.attend),
        ("auto", AMD, BF16, 128, 1, xla.attend),
        ("auto", H200, BF16, 128, 1, cudnn.packed),
        ("auto", A100, BF16, 128, 1, cudnn.bucketed),
        ("auto", H200, F32, 128, 1, xla.attend),
        ("auto", H200, BF16, 100, 1, xla.attend),
        ("auto", H200, BF16, 128, 2, xla.attend),  # context parallelism
        ("splash", CPU, BF16, 128, 1, "splash attention runs on TPUs, and here are cpu devices"),
        ("splash", TPU, F64, 128, 1, "not in float64"),
        ("cudnn", AMD, BF16, 128, 1, "runs on NVIDIA GPUs, and here are AMD"),
        ("cudnn", H200, F32, 128, 1, "in bfloat16 or float16, not in float32"),
        ("cudnn", H200, BF16, 100, 1, "not 100"),
        ("cudnn", H200, BF16, 128, 4, "learner.mesh.context cuts them in 4"),
    ],
)
def test_auto_takes_the_fastest_kernel_that_can_and_a_named_one_that_cannot_is_refused(
    name, device, dtype, head_size, shards, expected
):
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected) as refusal:
            _kernel(name, device, dtype, head_size, shards)
        assert refusal.value.place == "learner.attention" and refusal.value.remedy
        return
    found = _kernel(name, device, dtype, head_size, shards)
    assert (found.keywords["rows"] if isinstance(found, partial) else found) is expected


def test_a_jax_whose_private_function_nobody_read_takes_the_public_one(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.12.0")
    assert cudnn.rows_for(H200) is cudnn.bucketed


def test_the_device_is_that_of_the_mesh_or_of_this_process():
    q, ids = jnp.ones((1, 8, 2, 8)), jnp.ones((1, 8), jnp.int32)
    for mesh in (None, make_mesh(schema.Mesh())):
        with pytest.raises(UserError, match="here are cpu devices"):
            packed_attention(q, q, q, ids, Execution(jnp.float32, attention="splash", mesh=mesh))


SEGMENTS = packed_rows(
    [192, 128, 1, 129, -60, 66],  # lengths on both sides of a class's limit; a hole
    [576],  # one segment; 576 % 128 = 64
    [3] * 60 + [100],  # more short segments than there are slots
    length=576,
)


def in_rows(rows: cudnn.Rows) -> Any:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        columns = jnp.arange(ids.shape[1], dtype=jnp.int32)
        return cudnn.attend(q, k, v, ids, columns, rows=rows)

    return attend


@jax.custom_vjp
def poison(x: jax.Array, outside: jax.Array) -> jax.Array:
    """`x`, with a gradient that is NaN outside."""
    return x


poison.defvjp(
    lambda x, outside: (x, outside),
    lambda outside, gradient: (jnp.where(outside, jnp.nan, gradient), None),
)


def flat_memory(q, k, v, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type, qkv_layout):
    """Each listed segment of the flat arrays attended causally; all else is NaN, gradients too."""
    assert (mask_type, qkv_layout) == (private.MaskType.PADDING_CAUSAL, "BTNH")
    assert q.shape[2] % k.shape[2] == 0
    assert q_offsets.shape == (q.shape[0], q_seqlen.shape[1] + 1)
    lengths, key_lengths, offsets, key_offsets = private._fix_seqlen_offsets(
        q_seqlen, kv_seqlen, q_offsets, kv_offsets, q, k
    )

    def segment_of(x: jax.Array, lengths: jax.Array, offsets: jax.Array) -> jax.Array:
        """Number of the segment of each token by the offsets, which count numbers; -1 outside."""
        begins = offsets.reshape(-1)[: lengths.size] // (x.shape[2] * x.shape[3])
        column = jnp.arange(x.shape[0] * x.shape[1])[:, None]
        inside = (begins <= column) & (column < begins + lengths.reshape(-1))
        return jnp.where(inside.any(1), jnp.argmax(inside, 1), -1)

    rows = segment_of(q, lengths, offsets)
    columns = segment_of(k, key_lengths, key_offsets)
    order = jnp.arange(rows.size)
    sees = (rows[:, None] == columns) & (order[:, None] >= order) & (rows >= 0)[:, None]
    outside = (rows < 0)[:, None, None]
    flat_q, flat_k, flat_v = (poison(x.reshape(-1, *x.shape[2:]), outside) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    flat_k, flat_v = (jnp.repeat(x, group, axis=1) for x in (flat_k, flat_v))
    scores = jnp.einsum("qnh,tnh->nqt", flat_q, flat_k) * scale
    weights = jax.nn.softmax(jnp.where(sees, scores, -1e30), axis=-1)
    out = jnp.einsum("nqt,tnh->qnh", weights, flat_v)
    return jnp.where(outside, jnp.nan, out).reshape(q.shape)


def test_class_lengths_cover_every_segment_and_grow_fourfold_at_most():
    for length in (1, 64, 128, 129, 576, 8192, 32768, 34816):
        sizes = cudnn.class_lengths(length)
        assert sizes[-1] >= length
        assert all(size % 128 == 0 for size in sizes)
        assert all(short < long <= cudnn.SLOTS * short for short, long in pairwise(sizes))


def test_only_segments_of_the_shortest_class_find_no_slot():
    # given rows filled with segments of one length, as tightly as can be: each the shortest of
    # its class, and one that is so short that five begin in 128 tokens
    lengths = (129, 513, 2049, 25)
    ids = packed_rows(*([n] * (4096 // n) for n in lengths), length=4096)
    # then some of the last alone found none
    rest = jax.jit(cudnn._classes)(ids)[1]
    assert rest.any(axis=1).tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("rows", "limit"),
    [
        (cudnn.packed, 1e-13),
        # JAX's own attention takes its softmax in float32
        pytest.param(
            partial(cudnn.bucketed, implementation="xla"), 1e-6, marks=pytest.mark.nightly
        ),
    ],
    ids=["packed", "bucketed"],
)
def test_rows_of_cudnn_are_exact(rows, limit, monkeypatch):
    # given memory outside of the segments that nobody wrote, of which nothing may be seen
    monkeypatch.setattr(private, "dot_product_attention", flat_memory)
    with jax.enable_x64(True):
        assert_dense(in_rows(rows), random_arrays(SEGMENTS, 4, 2, 8), SEGMENTS, limit)


@pytest.mark.parametrize("rows", [cudnn.packed, cudnn.bucketed])
def test_lowers_for_cuda_with_a_call_for_each_class(rows, monkeypatch):
    # given the gradient at 32k tokens, for a Hopper GPU that is not here
    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91800)
    monkeypatch.setattr(private, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(private, "is_cuda_compute_capability_equal", lambda capability: False)
    q, k = (jax.ShapeDtypeStruct((1, 32768, n, 128), jnp.bfloat16) for n in (8, 2))
    ids = jax.ShapeDtypeStruct((1, 32768), jnp.int32)
    gradient = jax.grad(lambda *x: jnp.sum(in_rows(rows)(*x).astype(jnp.float32)), (0, 1, 2))
    text = jax.jit(gradient).trace(q, k, k, ids).lower(lowering_platforms=("cuda",)).as_text()
    # then each class is a call forward and one backward
    calls = len(cudnn.class_lengths(32768))
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == calls
    assert text.count("@__cudnn$fmhaSoftmax(") == calls
    assert "PADDING_CAUSAL" in text


def test_the_table_says_whether_this_jax_is_right_for_grouped_heads():
    # given the second of two segments, which begins at token 3, of two query heads on one
    q, k = jnp.zeros((1, 8, 2, 4)), jnp.zeros((1, 8, 1, 4))
    lengths, offsets = jnp.array([[3, 5]]), jnp.array([[0, 3, -1]])
    *_, found = jax.jit(private._fix_seqlen_offsets)(lengths, lengths, offsets, offsets, q, k)
    # then its keys begin after 3 heads of 4 numbers
    assert (int(found[0, 1]) == 3 * 1 * 4) == cudnn.PACKED_VERSIONS[jax.__version__]


IDS = packed_rows([130, 1, 1, 60, -20, 100], [20], length=320)
"""Segments over several blocks of 128, a hole, blocks of padding; 320 % 128 = 64."""


def in_interpreter(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    columns = jnp.arange(ids.shape[1], dtype=jnp.int32)
    return splash.attend(q, k, v, ids, columns, interpret=True)


@pytest.mark.parametrize(
    ("kv_heads", "size", "axes"),
    [
        (2, 64, {}),
        pytest.param(4, 128, {}, marks=pytest.mark.nightly),
        pytest.param(2, 64, {"fsdp": 2, "context": 2, "tensor": 2}, marks=pytest.mark.nightly),
    ],
)
def test_splash_gives_output_and_gradients_of_the_whole_matrix(kv_heads, size, axes, monkeypatch):
    # given grouped and full heads, of the sizes that models have
    monkeypatch.setattr(splash, "MAX_BLOCK_Q", 128)
    monkeypatch.setattr(splash, "MAX_BLOCK_KV", 128 if axes else 256)
    ids = packed_rows([200, 1, -10, 100], [300], length=512) if axes else IDS
    arrays = [x.astype(np.float32) for x in random_arrays(ids, 4, kv_heads, size)]
    mesh, kernel = make_mesh(schema.Mesh(**axes)), partial(splash.attend, interpret=True)
    assert_dense(on_mesh(mesh, kernel) if axes else in_interpreter, arrays, ids, 2e-6)


@pytest.mark.nightly
def test_splash_takes_strongly_negative_scores_inside_remat_and_scan(monkeypatch):
    # given a layer that is computed again
    monkeypatch.setattr(splash, "MAX_BLOCK_Q", 128)
    monkeypatch.setattr(splash, "MAX_BLOCK_KV", 256)
    arrays = [x.astype(np.float32) for x in random_arrays(IDS, 2, 1, 64, scale=1e4)]

    def layers(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        attend = partial(in_interpreter, k=k, v=v, ids=ids)
        layer = jax.checkpoint(lambda out, scale: (out + attend(q * scale), None))
        return jax.lax.scan(layer, jnp.zeros_like(q), jnp.ones(2))[0]

    assert_exact_softmax(layers, arrays, IDS, layers=2)


def test_blocks_of_other_segments_are_not_visited():
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
