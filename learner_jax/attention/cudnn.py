"""Packed attention on NVIDIA GPUs by cuDNN's flash kernels. Not yet run on a GPU.

The kernels take segments as lists of a static size, by which XLA sizes their workspace. A list for
as many segments as a row may have, each as long as the row, would take tens of GiB. So segments are
sorted into classes by length, up to 128, 512, 2048, ... tokens. Each class is a call of its own.

For a class of up to L tokens, all rows are laid end to end and cut into rows of L; a segment may
run on into the next row. Segments longer than L / 4 begin at most `SLOTS` times in a row. So the
workspace is `SLOTS` times the queries in float32, whatever the segments are. Only the shortest
class can have more segments in a row: `xla` computes those, samples of less than 32 tokens.

`packed` calls a private function of JAX, because the public one takes no offsets: only in versions
of JAX in which it was read, `PACKED_VERSIONS`. `bucketed` copies segments into rows of their own
and calls the public function, in any version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from learner_jax.attention import xla
from learner_jax.attention.xla import segment_lengths, segment_starts
from runspec.core.errors import UserError

SHORTEST = 128
SLOTS = 4
"""Segments of a class that begin in a row, at most; also the ratio of one class to the next."""
DTYPES = (jnp.bfloat16, jnp.float16)
MAX_HEAD_SIZE = 256
PACKED_VERSIONS = {"0.10.2": False, "0.11.2": True}
"""JAX versions whose private function was read -> whether it is right for grouped heads: 0.10.2
multiplies the offsets of keys by the number of query heads, in silence."""
Rows = Callable[[Array, Array, Array, Array, Array], Array]
"""(q [R, L, H, h], k and v [R, L, K, h], lengths [R, SLOTS], offsets [R, SLOTS + 1]; -1 where there
is no segment) -> [R, L, H, h], anything outside of the segments. Offsets count from the row's first
token; a segment may run on into later rows."""


def attend(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    segment_ids: Int[Array, "B T"],
    columns: Int[Array, " T"],
    *,
    rows: Rows,
) -> Float[Array, "B T H h"]:
    """See `xla.attend`, of whole rows only.

    Args:
        rows: `packed` or `bucketed`.
    """
    classes, rest = _classes(segment_ids)
    out = _if_any(q, k, v, segment_ids * rest, columns)
    for each in classes:
        found = _attend_class(q, k, v, each, rows)
        out = jnp.where(each.member[:, :, None, None], found, out)
    return out


class _Class(NamedTuple):
    """The segments of up to `length` tokens, and above the next shorter class."""

    length: int
    lengths: Any
    """Int32 [R, SLOTS], rows of `length` tokens; -1 where there is no segment."""
    offsets: Any
    """Int32 [R, SLOTS + 1]: where in its row each begins."""
    member: Any
    """Bool [B, T]: whether the token is in one of them."""


def class_lengths(length: int) -> tuple[int, ...]:
    """The longest segment of each class, for rows of `length` tokens.

    128, 512, 2048, ... below `length`, then `length` rounded up to a multiple of 128.
    """
    found = []
    size = SHORTEST
    while size < length:
        found.append(size)
        size *= SLOTS
    return (*found, -(-length // SHORTEST) * SHORTEST)


def _classes(segment_ids: Int[Array, "B T"]) -> tuple[list[_Class], Bool[Array, "B T"]]:
    """The classes, and which tokens' segments found no slot in theirs."""
    batch, length = segment_ids.shape
    own = segment_lengths(segment_ids)
    # In the stream of all rows, one after another.
    starts = segment_starts(segment_ids) + length * jnp.arange(batch)[:, None]
    starts = jnp.where(own == 0, 0, starts)
    stream, tokens = own.reshape(-1), jnp.arange(batch * length)
    begins = (stream > 0) & (starts.reshape(-1) == tokens)
    classes, shorter, rest = [], 0, own > 0
    for size in class_lengths(length):
        in_class = (stream > shorter) & (stream <= size)
        taken, lengths, offsets = _slots(begins & in_class, stream, size)
        member = taken[starts] & (own > 0)
        classes.append(_Class(size, lengths, offsets, member))
        shorter, rest = size, rest & ~member
    return classes, rest


def _slots(
    begins: Bool[Array, " N"], lengths: Int[Array, " N"], size: int
) -> tuple[Bool[Array, " N"], Int[Array, "R M"], Int[Array, "R M1"]]:
    """Lists the segments that begin in each row of `size` tokens, as many as there are slots.

    Returns:
        which of `begins` are listed, their lengths and their offsets.
    """
    flags = _in_rows(begins, size)  # [R, size]
    slot = jnp.cumsum(flags, axis=1) - 1
    listed = flags & (slot < SLOTS)
    row, offset = jnp.indices(flags.shape, dtype=jnp.int32)
    place = row, jnp.where(listed, slot, SLOTS + 1)  # out of bounds: dropped
    none = jnp.full((flags.shape[0], SLOTS + 1), -1, jnp.int32)
    return (
        listed.reshape(-1)[: begins.size],
        none.at[place].set(_in_rows(lengths, size).astype(jnp.int32), mode="drop")[:, :SLOTS],
        none.at[place].set(offset, mode="drop"),
    )


def _in_rows(x: Array, size: int) -> Array:
    """[N, ...] -> [R, size, ...], padded with zeros."""
    x = jnp.pad(x, [(0, -x.shape[0] % size)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, size, *x.shape[1:])


def _attend_class(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    each: _Class,
    rows: Rows,
) -> Float[Array, "B T H h"]:
    """Right at the members; zeros elsewhere, and no gradient from there."""
    member = each.member[:, :, None, None]

    def stream(x: Array) -> Array:
        return _in_rows(_where_gradient(x, member).reshape(-1, *x.shape[2:]), each.length)

    out = rows(stream(q), stream(k), stream(v), each.lengths, each.offsets)
    out = out.reshape(-1, *q.shape[2:])[: q.shape[0] * q.shape[1]].reshape(q.shape)
    return jnp.where(member, out, 0)


@jax.custom_vjp
def _where_gradient(x: Array, mask: Array) -> Array:
    """x; its gradient is 0 where the mask is not, whatever memory held there."""
    return x


def _where_gradient_forward(x: Array, mask: Array) -> tuple[Array, Array]:
    return x, mask


def _where_gradient_backward(mask: Array, gradient: Array) -> tuple[Array, None]:
    return jnp.where(mask, gradient, 0), None


_where_gradient.defvjp(_where_gradient_forward, _where_gradient_backward)


@jax.custom_vjp
def _if_any(q: Array, k: Array, v: Array, segment_ids: Array, columns: Array) -> Array:
    """`xla.attend` where there is a segment at all, else zeros at once; keeps no residuals."""
    return jax.lax.cond(
        jnp.any(segment_ids != 0),
        lambda: xla.attend(q, k, v, segment_ids, columns),
        lambda: jnp.zeros_like(q),
    )


def _if_any_forward(*inputs: Array) -> tuple[Array, tuple[Array, ...]]:
    return _if_any(*inputs), inputs


def _if_any_backward(inputs: tuple[Array, ...], gradient: Array) -> tuple[Any, ...]:
    q, k, v, segment_ids, columns = inputs

    def attend(q: Array, k: Array, v: Array) -> Array:
        return xla.attend(q, k, v, segment_ids, columns)

    gradients = jax.lax.cond(
        jnp.any(segment_ids != 0),
        lambda: jax.vjp(attend, q, k, v)[1](gradient),
        lambda: (jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)),
    )
    return (*gradients, None, None)


_if_any.defvjp(_if_any_forward, _if_any_backward)


def packed(q: Array, k: Array, v: Array, lengths: Array, offsets: Array) -> Array:
    """`Rows` by cuDNN's packed layout, which reads the segments where they lie.

    Needs a Hopper GPU or newer and a version of JAX in `PACKED_VERSIONS`. Its private function
    turns the offsets of rows into offsets of the whole stream, in numbers, as int32.
    """
    # The public function takes no offsets.
    from jax._src.cudnn import fused_attention_stablehlo as private  # noqa: PLC2701

    if q.size > jnp.iinfo("int32").max:
        raise UserError(
            f"{q.size} numbers of queries on a device are more than cuDNN's offsets count",
            place="learner.packing",
            remedy="lower learner.packing.rows",
        )
    if not PACKED_VERSIONS[jax.__version__]:
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    return private.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=q.shape[-1] ** -0.5,
        mask_type=private.MaskType.PADDING_CAUSAL,
        qkv_layout="BTNH",
    )


def bucketed(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    offsets: Array,
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
    """`Rows` by JAX's public function, over copies of the segments in rows of their own.

    The copies are made again in the backward pass. On Ampere GPUs too.
    """
    count, size = q.shape[:2]
    begins = offsets[:, :SLOTS] + size * jnp.arange(count)[:, None]
    lengths = jnp.maximum(lengths, 0).reshape(-1)  # [R SLOTS]
    inside = jnp.arange(size) < lengths[:, None]
    # Out of bounds outside of the segment: reads zeros, writes nothing.
    index = jnp.where(inside, begins.reshape(-1, 1) + jnp.arange(size), count * size)

    @jax.checkpoint
    def attend(q: Array, k: Array, v: Array) -> Array:
        copies = (
            x.reshape(-1, *x.shape[2:]).at[index].get(mode="fill", fill_value=0) for x in (q, k, v)
        )
        out = jax.nn.dot_product_attention(
            *copies,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation=implementation,
        )
        flat = jnp.zeros((count * size, *q.shape[2:]), q.dtype)
        return flat.at[index].set(out, mode="drop").reshape(q.shape)

    return attend(q, k, v)


def rows_for(device: jax.Device) -> Rows:
    """`packed` where the device and this version of JAX can, else `bucketed`."""
    hopper = float(device.compute_capability) >= 9.0
    return packed if hopper and jax.__version__ in PACKED_VERSIONS else bucketed
