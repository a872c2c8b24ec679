"""What surrounds cuDNN's kernels: lists of segments, copies, masks. The kernels need a GPU.

`flat_memory` stands for the packed kernel: it reads the offsets that JAX itself would hand to
cuDNN, and leaves NaN wherever cuDNN would not write.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as private

from learner_jax.attention import cudnn
from tests.learner_jax.attention.dense import assert_dense, packed_rows, random_arrays

SEGMENTS = packed_rows(
    [192, 128, 1, 129, -60, 66],  # lengths on both sides of a class's limit; a hole
    [576],  # one segment; 576 % 128 = 64
    [3] * 60 + [100],  # more short segments than there are slots
    length=576,
)


def attend(rows: cudnn.Rows) -> Any:
    def whole_rows(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        columns = jnp.arange(ids.shape[1], dtype=jnp.int32)
        return cudnn.attend(q, k, v, ids, columns, rows=rows)

    return whole_rows


def classes_of(ids: jax.Array) -> Any:
    """(lengths, offsets, member) of each class, and what found no slot."""
    classes, rest = cudnn._classes(ids)
    return [tuple(each)[1:] for each in classes], rest


def flat_memory(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_seqlen: jax.Array,
    kv_seqlen: jax.Array,
    q_offsets: jax.Array,
    kv_offsets: jax.Array,
    scale: float,
    mask_type: private.MaskType,
    qkv_layout: str,
) -> jax.Array:
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

    @jax.custom_vjp
    def poison(x: jax.Array) -> jax.Array:
        return x

    def poison_forward(x: jax.Array) -> tuple[jax.Array, None]:
        return x, None

    def poison_backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (jnp.where(outside, jnp.nan, gradient),)

    poison.defvjp(poison_forward, poison_backward)
    flat_q, flat_k, flat_v = (poison(x.reshape(-1, *x.shape[2:])) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    flat_k, flat_v = (jnp.repeat(x, group, axis=1) for x in (flat_k, flat_v))
    scores = jnp.einsum("qnh,tnh->nqt", flat_q, flat_k) * scale
    weights = jax.nn.softmax(jnp.where(sees, scores, -1e30), axis=-1)
    out = jnp.einsum("nqt,tnh->qnh", weights, flat_v)
    return jnp.where(outside, jnp.nan, out).reshape(q.shape)


def test_class_lengths_cover_every_segment_and_grow_fourfold_at_most() -> None:
    for length in (1, 64, 128, 129, 576, 8192, 32768, 34816):
        sizes = cudnn.class_lengths(length)
        assert sizes[-1] >= length
        assert all(size % 128 == 0 for size in sizes)
        assert all(short < long <= cudnn.SLOTS * short for short, long in pairwise(sizes))


def test_only_segments_of_the_shortest_class_find_no_slot() -> None:
    # given rows filled with segments of one length, as tightly as can be: each the shortest of
    # its class, and one that is so short that five begin in 128 tokens
    lengths = (129, 513, 2049, 25)
    ids = packed_rows(*([n] * (4096 // n) for n in lengths), length=4096)
    _, rest = jax.jit(classes_of)(ids)
    # then some of the last alone found none
    assert rest.any(axis=1).tolist() == [False, False, False, True]


def test_offsets_of_jax_address_every_segment_in_the_stream() -> None:
    # given the lists of each class, turned into offsets of the stream by JAX
    classes, rest = jax.jit(classes_of)(SEGMENTS)
    found = []
    for size, (lengths, offsets, _) in zip(cudnn.class_lengths(576), classes, strict=True):
        q = jnp.zeros((lengths.shape[0], size, 1, 1))
        lengths, _, offsets, _ = jax.jit(private._fix_seqlen_offsets)(
            lengths, lengths, offsets, offsets, q, q
        )
        pairs = zip(offsets.reshape(-1).tolist(), lengths.reshape(-1).tolist(), strict=False)
        found += [(begin, count) for begin, count in pairs if count > 0]
    # then they and the rest are all segments, each once
    expected = []
    for row, ids in enumerate(SEGMENTS):
        for number in range(1, ids.max() + 1):
            place = np.flatnonzero(ids == number)
            if place.size and not rest[row, place[0]]:
                expected.append((row * SEGMENTS.shape[1] + int(place[0]), place.size))
    assert sorted(found) == sorted(expected)
    # 61 short segments begin in two rows of 128
    assert len(np.unique(SEGMENTS[2][np.asarray(rest[2])])) == 61 - 2 * cudnn.SLOTS


@pytest.mark.slow  # compiles for 6 s
def test_copies_into_rows_of_their_own_are_exact() -> None:
    arrays = random_arrays(SEGMENTS, 4, 2, 8)
    with jax.enable_x64(True):
        # JAX's own attention takes its softmax in float32
        assert_dense(attend(partial(cudnn.bucketed, implementation="xla")), arrays, SEGMENTS, 1e-6)


def test_packed_hands_over_what_cudnn_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    # given memory outside of the segments that nobody wrote
    monkeypatch.setattr(private, "dot_product_attention", flat_memory)
    arrays = random_arrays(SEGMENTS, 4, 2, 8)
    with jax.enable_x64(True):
        # then grouped heads are right in this version of JAX, and nothing of it is seen
        assert_dense(attend(cudnn.packed), arrays, SEGMENTS, 1e-13)


@pytest.mark.parametrize("rows", [cudnn.packed, cudnn.bucketed])
def test_lowers_for_cuda_with_a_workspace_that_is_bounded(
    rows: cudnn.Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given the gradient at 32k tokens, for a Hopper GPU that is not here
    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91800)
    monkeypatch.setattr(private, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(private, "is_cuda_compute_capability_equal", lambda capability: False)
    q, k = (jax.ShapeDtypeStruct((1, 32768, n, 128), jnp.bfloat16) for n in (8, 2))
    ids = jax.ShapeDtypeStruct((1, 32768), jnp.int32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(attend(rows)(q, k, v, ids).astype(jnp.float32))

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # then each class is a call forward and one backward
    calls = len(cudnn.class_lengths(32768))
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == calls
    assert text.count("@__cudnn$fmhaSoftmax(") == calls
    assert "PADDING_CAUSAL" in text


def test_the_table_says_whether_this_jax_is_right_for_grouped_heads() -> None:
    # given the second of two segments, which begins at token 3, of two query heads on one
    q, k = jnp.zeros((1, 8, 2, 4)), jnp.zeros((1, 8, 1, 4))
    lengths, offsets = jnp.array([[3, 5]]), jnp.array([[0, 3, -1]])
    *_, found = jax.jit(private._fix_seqlen_offsets)(lengths, lengths, offsets, offsets, q, k)
    # then its keys begin after 3 heads of 4 numbers
    assert (int(found[0, 1]) == 3 * 1 * 4) == cudnn.PACKED_VERSIONS[jax.__version__]


def test_types_and_head_sizes_that_cudnn_does_not_take() -> None:
    assert cudnn.refusal(jnp.bfloat16, 128) is None
    assert "not in float32" in str(cudnn.refusal(jnp.float32, 128))
    assert "not 100" in str(cudnn.refusal(jnp.bfloat16, 100))
