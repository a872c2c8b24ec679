"""Packed attention on TPUs: JAX's Pallas kernel "splash", told which blocks the segments allow.

The kernel reads from small tables which blocks of keys to visit and computes the causal mask from
column numbers. Its own tables are made from a static mask, so it would visit, and mask away, the
blocks of other segments. Here the tables come from the segment ids of each row: what is computed
grows with the sum of the squared segment lengths. Column numbers instead of a static mask also let
context parallelism give it queries in zigzag order.
"""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Bool, Float, Int

from learner_jax.attention.xla import SAVED, key_blocks, segment_starts

DTYPES = (jnp.bfloat16, jnp.float32)
LANES = 128
"""Blocks are whole multiples of a vector register's width."""
MAX_BLOCK_Q = 512
MAX_BLOCK_KV = 1024
MAX_COMPUTE = 512
"""Scores in on-chip memory are MAX_BLOCK_Q x MAX_COMPUTE floats, 1 MiB. Larger blocks visit more
masked pairs at the edges of segments, smaller ones more grid steps, which cost some 0.3 us even
where they do nothing. Not yet tuned on a TPU."""


def attend(
    q: Float[Array, "B Q H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    segment_ids: Int[Array, "B T"],
    columns: Int[Array, " Q"],
    *,
    interpret: bool = False,
) -> Float[Array, "B Q H h"]:
    """See `xla.attend`. Rows are padded to whole blocks.

    Args:
        q: bfloat16 or float32, like k and v.
        interpret: runs the kernel in plain JAX, for tests without a TPU.
    """
    queries, length = q.shape[1], k.shape[1]
    starts = segment_starts(segment_ids)[:, columns]  # [B, Q]
    sees = starts <= columns
    # A query must see a key, or its softmax divides by 0: padding sees itself alone, as segments
    # of one token with ids of their own.
    own = jnp.arange(length, dtype=jnp.int32)
    segment_ids = jnp.where(segment_ids == 0, -1 - own, segment_ids)
    starts = jnp.where(sees, starts, columns)
    block_q, block_kv = _block(queries, MAX_BLOCK_Q), _block(length, MAX_BLOCK_KV)
    extra_q, extra_kv = -queries % block_q, -length % block_kv
    # Queries past the end repeat the last one; keys past the end belong to no segment.
    columns = jnp.pad(columns, (0, extra_q), mode="edge")
    starts = jnp.pad(starts, ((0, 0), (0, extra_q)), mode="edge")
    query_ids = segment_ids[:, columns]
    key_ids = jnp.pad(segment_ids, ((0, 0), (0, extra_kv)), constant_values=jnp.iinfo("int32").min)
    q = (q * q.shape[-1] ** -0.5).astype(q.dtype)

    def one_row(row: tuple[Array, ...]) -> Array:
        q, k, v, query_ids, key_ids, starts = row
        reached = _reached(starts, columns, block_q, block_kv, key_ids.shape[0])
        kernel = _kernel(reached, columns, block_q, block_kv, interpret=interpret)
        out = kernel(q, k, v, kernels.SegmentIds(query_ids, key_ids))
        assert isinstance(out, jax.Array)  # and no log-sum-exp, which is not asked for
        return out

    # A row after another: each has tables of its own, and a core runs its grid in order anyway.
    out = jax.lax.map(
        one_row,
        (
            _by_head(q, extra_q),
            _by_head(k, extra_kv),
            _by_head(v, extra_kv),
            query_ids,
            key_ids,
            starts,
        ),
    )  # [B, H, Q, h]
    out = jnp.transpose(out, (0, 2, 1, 3))[:, :queries]
    return jnp.where(sees[:, :, None, None], out, 0)


def _block(length: int, most: int) -> int:
    """`most`, or for a shorter dimension the least multiple of `LANES` that covers it."""
    return min(most, -(-length // LANES) * LANES)


def _by_head(x: Float[Array, "B T N h"], padding: int) -> Float[Array, "B N S h"]:
    return jnp.transpose(jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))), (0, 2, 1, 3))


def _reached(
    starts: Int[Array, " Q"], columns: Int[Array, " Q"], block_q: int, block_kv: int, length: int
) -> Bool[Array, "I J"]:
    """Whether block i of queries sees anything in block j of keys."""
    first, stop = key_blocks(
        starts.reshape(-1, block_q), columns.reshape(-1, block_q), block_kv
    )  # [I] each
    blocks = jnp.arange(length // block_kv)
    return (first[:, None] <= blocks) & (blocks < stop[:, None])


def _kernel(
    reached: Bool[Array, "I J"],
    columns: Int[Array, " Q"],
    block_q: int,
    block_kv: int,
    *,
    interpret: bool,
) -> kernels.SplashAttentionKernel:
    """(q [H, Q, h], k and v [K, T, h], segment ids) -> [H, Q, h], differentiable."""
    along_keys = _mask_info(reached, columns, axis=1)
    compute = max(n for n in range(LANES, MAX_COMPUTE + 1, LANES) if block_kv % n == 0)
    return kernels.SplashAttentionKernel(
        along_keys,
        along_keys,
        _mask_info(reached, columns, axis=0),
        block_sizes=kernels.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_kv_compute=compute,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_kv_dkv_compute=compute,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        ),
        is_mqa=False,
        save_residuals=False,
        mask_value=kernels.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=SAVED,
        mask_function=operator.ge,  # of the columns of query and key
        interpret=interpret,
    )


def _mask_info(reached: Bool[Array, "I J"], columns: Int[Array, " Q"], *, axis: int) -> MaskInfo:
    """The kernel's tables: whether to visit a pair of blocks, and the block to have loaded then.

    Args:
        axis: 1 where the kernel walks along the keys of a block of queries (forward pass and dq),
            0 where it walks along the queries of a block of keys (dk and dv).
    """
    count = reached.shape[axis]
    index = jax.lax.broadcasted_iota(jnp.int32, reached.shape, axis)
    # A skipped pair names the next block to be visited, which is loaded meanwhile, or the last.
    later = jax.lax.cummin(jnp.where(reached, index, count), axis=axis, reverse=True)
    last = jnp.max(jnp.where(reached, index, 0), axis=axis, keepdims=True)
    return MaskInfo(
        data_next=jnp.where(later == count, last, later)[None],
        mask_next=None,
        block_mask=reached.astype(jnp.int32)[None],
        partial_mask_blocks=None,
        q_sequence=columns,  # type: ignore[arg-type]  # numpy in JAX's annotation alone
    )
