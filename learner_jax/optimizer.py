"""AdamW in float32, the gradient clipped by its global norm.

For update n = 0, 1, ... with gradient g (AdamW, arXiv 1711.05101, algorithm 2):

    g' = g min(1, clip_norm / ||g||)
    m = beta1 m + (1 - beta1) g'            m^ = m / (1 - beta1^(n + 1))
    v = beta2 v + (1 - beta2) g'^2          v^ = v / (1 - beta2^(n + 1))
    theta = theta - lr_n (m^ / (sqrt(v^) + eps) + weight_decay theta)

The learning rate is part of the weight decay, and every parameter decays, norms and biases too.
theta is rounded to the type of the masters. In bfloat16 neighbours lie 2^-8 to 2^-7 of their size
apart, and a step of less than half of that is lost: at lr 3e-7, of every weight above 1.6e-4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from learner_jax.execution import wide_dtype
from runspec.core.spec.schema import Optimizer

HOST_MEMORY = "pinned_host"
PIECE = 2**26
"""Elements of a device's part of a leaf whose moments visit it at a time: 256 MiB each."""
MAX_PIECES = 256

LeafUpdate = Callable[[Array, Array, Array, Array], tuple[Array, Array, Array]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Moments:
    """Running means of the gradient and of its square, float32, each cut like the parameters."""

    mean: Any
    square: Any


def abstract_moments(params: Any, *, offload: bool) -> Moments:
    """The moments of `jax.ShapeDtypeStruct` parameters, cut over the mesh as these are.

    Args:
        params: with shardings.
        offload: in the host's memory.
    """

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = leaf.sharding
        assert isinstance(sharding, NamedSharding)
        if offload:
            sharding = sharding.with_memory_kind(HOST_MEMORY)
        return jax.ShapeDtypeStruct(leaf.shape, wide_dtype(leaf.dtype), sharding=sharding)

    like = jax.tree.map(placed, params)
    return Moments(like, like)


def zero_moments(like: Moments) -> Moments:
    """Zeros where `abstract_moments` says, a leaf at a time."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), like)


def learning_rate(spec: Optimizer, updates: Int[Array, ""]) -> Float[Array, ""]:
    """lr * min(1, (n + 1) / warmup_updates) for update n = 0, 1, ...: linear, then constant."""
    return spec.lr * jnp.minimum(1.0, (updates + 1) / max(spec.warmup_updates, 1))


def global_norm(grads: Any) -> Float[Array, ""]:
    """||g|| over all leaves."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))


def adamw(
    spec: Optimizer,
    params: Any,
    moments: Moments,
    grads: Any,
    *,
    updates: Int[Array, ""],
    norm: Float[Array, ""],
    made: Bool[Array, ""],
    shardings: Any | None = None,
) -> tuple[Any, Moments]:
    """One update of the module's formula, inside jit.

    Args:
        spec: rates and bounds.
        params: tree of masters.
        moments, grads: float32 trees.
        updates: n, those made before.
        norm: `global_norm(grads)`.
        made: where false, parameters and moments come back as they are.
        shardings: of the parameters, where the moments lie in the host's memory
            (`optimizer.offload`): they visit the device piece by piece, and are written in place.
    """
    beta1, beta2 = spec.betas
    count = (updates + 1).astype(jnp.float32)
    scale = jnp.minimum(1.0, spec.clip_norm / norm)
    lr = learning_rate(spec, updates)

    def leaf_update(p: Array, m: Array, v: Array, g: Array) -> tuple[Array, Array, Array]:
        g = g * scale
        mean = beta1 * m + (1.0 - beta1) * g
        square = beta2 * v + (1.0 - beta2) * jnp.square(g)
        unbiased = mean / (1.0 - beta1**count), square / (1.0 - beta2**count)
        step = unbiased[0] / (jnp.sqrt(unbiased[1]) + spec.eps) + spec.weight_decay * p
        return (
            jnp.where(made, (p - lr * step).astype(p.dtype), p),
            jnp.where(made, mean, m),
            jnp.where(made, square, v),
        )

    trees = (params, moments.mean, moments.square, grads)
    leaves = zip(*(jax.tree.leaves(tree) for tree in trees), strict=True)
    if shardings is None:
        results = [leaf_update(*each) for each in leaves]
    else:
        places = jax.tree.leaves(shardings)
        results = [
            _streamed(leaf_update, place, *each) for each, place in zip(leaves, places, strict=True)
        ]
    structure = jax.tree.structure(params)
    params, mean, square = (
        jax.tree.unflatten(structure, part) for part in zip(*results, strict=True)
    )
    return params, Moments(mean, square)


def _streamed(
    update: LeafUpdate, place: NamedSharding, p: Array, m: Array, v: Array, g: Array
) -> tuple[Array, Array, Array]:
    """`update` of a leaf whose moments are the host's, a piece of axis 0 on the device at a time.

    A loop, not a sequence: only a loop keeps XLA from fetching all pieces first.
    """
    host = place.with_memory_kind(HOST_MEMORY)
    pieces = _pieces(p.shape, place)
    size = p.shape[0] // pieces

    def one(i: Array, leaf: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        def part(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, i * size, size)

        def put_back(x: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(x, new, i * size, 0)

        p, m, v = leaf
        mean, square = (jax.device_put(part(x), place) for x in (m, v))
        new, mean, square = update(part(p), mean, square, part(g))
        mean, square = (jax.device_put(x, host) for x in (mean, square))
        return put_back(p, new), put_back(m, mean), put_back(v, square)

    return jax.lax.fori_loop(0, pieces, one, (p, m, v))


def _pieces(shape: tuple[int, ...], place: NamedSharding) -> int:
    """Into how many equal parts axis 0 is cut: as few as keep to PIECE.

    One where the mesh cuts axis 0, and for matrices: TPUs slice the host's arrays only along
    dimensions before the last two. All that is large but embedding and head has a layer's axis.
    """
    local = place.shard_shape(shape)
    if len(shape) < 3 or local[0] != shape[0]:
        return 1
    divisors = [n for n in range(1, min(shape[0], MAX_PIECES) + 1) if shape[0] % n == 0]
    return next((n for n in divisors if prod(local) // n <= PIECE), divisors[-1])
