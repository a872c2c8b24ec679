"""Which keys a query sees, and how much of the matrix the blocked kernels compute."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from learner_jax.attention.spans import key_blocks, segment_lengths, segment_starts, visible
from tests.learner_jax.attention.dense import packed_rows


def test_starts_and_lengths_of_segments() -> None:
    # given one-token segments, a hole of padding, a row that is full and a row of padding
    ids = packed_rows([1, 2, -2, 1], [8], [], length=8)
    # then each column knows its segment; padding begins past the end and has no length
    assert segment_starts(ids).tolist() == [[0, 1, 1, 8, 8, 5, 8, 8], [0] * 8, [8] * 8]
    assert segment_lengths(ids).tolist() == [[1, 2, 2, 0, 0, 1, 0, 0], [8] * 8, [0] * 8]


def test_visible_is_causal_inside_the_segment() -> None:
    ids = packed_rows([3, -1, 2], length=7)
    found = visible(segment_starts(ids), jnp.arange(7), jnp.arange(7))[0]
    expected = np.array(
        [[s <= t and ids[0, s] == ids[0, t] != 0 for s in range(7)] for t in range(7)]
    )
    np.testing.assert_array_equal(found, expected)


def test_blocks_computed_grow_with_squared_segments_not_with_the_row() -> None:
    # given 32k tokens as one segment and as segments of 2k, in blocks of 256
    length, block = 32768, 256
    counts = {}
    for segments in (1, 16):
        ids = packed_rows([length // segments] * segments, length=length)
        starts = segment_starts(ids).reshape(-1, block)
        first, stop = key_blocks(starts, jnp.arange(length).reshape(-1, block), block)
        counts[segments] = int(jnp.sum(stop - first))
    # then the blocks are those under each segment's diagonal, the diagonal included
    assert counts == {1: 128 * 129 // 2, 16: 16 * (8 * 9 // 2)}


def test_ragged_rows_cost_little_more_than_their_segments() -> None:
    # given log-normal segments that begin anywhere in a block
    length, block = 32768, 256
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(7.3, 0.7, 100).astype(int)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), length)]
    ids = packed_rows(lengths.tolist(), length=length)
    # when the blocks that each tile of queries visits are counted
    starts = segment_starts(ids).reshape(-1, block)
    first, stop = key_blocks(starts, jnp.arange(length).reshape(-1, block), block)
    pairs = int(jnp.sum(jnp.maximum(stop - first, 0))) * block**2
    # then they hold the causal pairs of each segment and two blocks a query for the edges
    needed = int(np.sum(lengths * (lengths + 1) // 2))
    assert needed <= pairs <= needed + 2 * block * length


def test_queries_that_see_nothing_visit_no_block() -> None:
    ids = packed_rows([], length=8)
    first, stop = key_blocks(segment_starts(ids), jnp.arange(8)[None], 4)
    assert (stop <= first).all()
