"""Log-probability of given tokens and entropy, without the logits of all positions.

With z = hidden @ head / temperature and p = softmax(z), at a position whose target is token o:

    log p_o = z_o - logsumexp(z)                H = - sum_v p_v log p_v
    d log p_o / dz = onehot(o) - p              dH / dz = - p (log p + H)
    d logsumexp(z) / dz = p                     d max(z) / dz = onehot(argmax z)

The positions of each device are taken together, those with a target first, and cut into chunks.
Only chunks that hold a target are computed: prompts and padding cost nothing. The backward pass
forms dz in closed form from logits that it computes again, chunk by chunk, or that were kept where
those of all positions take no more room than one chunk may.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from learner_jax.packing import Data, LossInputs
from learner_jax.sharding import constrain, mesh_axes, wide_dtype
from runspec.core.models.parameters import KEPT_LOGITS, chunk_tokens
from runspec.core.schema.training import ZLoss

Level = Literal["logsumexp", "max_logit"]
"""A number that says how large the logits of a position are."""


@dataclass(frozen=True)
class _Plan:
    """Static arguments, known before the arrays are."""

    temperature: float
    chunk: int
    mesh: Mesh | None
    level: Level | None


def token_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    *,
    temperature: float,
    mesh: Mesh | None = None,
    chunk: int | None = None,
    level: Level | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log_softmax(logits / temperature) at `targets`, and the entropy of that distribution.

    [B, T, V] never exists, forward or backward, unless it is no larger than a chunk.

    Args:
        hidden: after the last norm.
        head: cast to the type of `hidden` for the products; its gradient is summed over the chunks
            and devices in at least float32 and comes in its own type: pass the float32 masters.
        targets: the token that follows each position; -1 where none is asked for.
        temperature: of sampling.
        mesh: over which rows, positions and vocabulary are cut, as `parameters.MESH_AXES` says.
        chunk: positions of a device at a time; by default those of
            `runspec.core.models.parameters.chunk_tokens`.
        level: `logsumexp` or `max_logit` of a position's logits, in place of the entropy.

    Returns:
        log-probabilities, and entropies or levels, in nats, [B, T], at least float32; 0 where no
        target is.
    """
    hidden_by_device = _by_device(hidden, mesh)  # [S, N, D]
    targets_by_device = _by_device(targets, mesh)  # [S, N]
    positions = targets_by_device.shape[1]
    chunk = min(chunk or chunk_tokens(positions, head.shape[1]), positions)
    plan = _Plan(float(temperature), chunk, mesh, level)
    with jax.named_scope("vocabulary_head"):  # found by profilers
        scores = _scores(hidden_by_device, head, targets_by_device, plan)
    return _by_row(scores[0], hidden.shape, mesh), _by_row(scores[1], hidden.shape, mesh)


def _cuts(shape: tuple[int, ...], mesh: Mesh | None) -> tuple[int, int]:
    """Into how many parts the mesh cuts the rows and the positions of [B, T, ...]."""
    if mesh is None:
        return 1, 1
    return mesh_axes(mesh, "batch", shape[0])[1], mesh_axes(mesh, "sequence", shape[1])[1]


def _by_device(x: Array, mesh: Mesh | None) -> Array:
    """[B, T, ...] -> [S, N, ...], a shard's rows and positions together; nothing moves."""
    (rows, columns), (b, t, *rest) = _cuts(x.shape, mesh), x.shape
    x = x.reshape(rows, b // rows, columns, t // columns, *rest)
    x = jnp.moveaxis(x, 2, 1).reshape(rows * columns, -1, *rest)
    return constrain(x, mesh, "shard", *[None] * (x.ndim - 1))


def _by_row(x: Array, shape: tuple[int, ...], mesh: Mesh | None) -> Array:
    """[S, N] -> [B, T], the inverse."""
    (rows, columns), (b, t, *_) = _cuts(shape, mesh), shape
    x = x.reshape(rows, columns, b // rows, t // columns)
    return constrain(jnp.moveaxis(x, 1, 2).reshape(b, t), mesh, "batch", "sequence")


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _scores(
    hidden: Float[Array, "S N D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "S N"],
    plan: _Plan,
) -> tuple[Float[Array, "S N"], Float[Array, "S N"]]:
    """log p_o, and the plan's level or else H."""
    (logprobs, second, _), _ = _forward(hidden, head, targets, plan, keep=False)
    return logprobs, second


def _scores_forward(hidden: Array, head: Array, targets: Array, plan: _Plan) -> tuple:
    keep = targets.shape[1] * head.shape[1] <= KEPT_LOGITS
    (logprobs, second, normaliser), logits = _forward(hidden, head, targets, plan, keep=keep)
    return (logprobs, second), (hidden, head, targets, second, normaliser, logits)


def _forward(
    hidden: Array, head: Array, targets: Array, plan: _Plan, *, keep: bool
) -> tuple[tuple[Array, Array, Array], Array | None]:
    """((log p_o, the level or H, logsumexp(z)) [S, N], all logits [C, S, n, V] if `keep`)."""
    order, rank, count = _order(targets, plan)
    matrix = _matrix(head, hidden, plan)
    wide = wide_dtype(hidden.dtype)

    def one_chunk(i: Array, done: tuple) -> tuple:
        results, kept = done
        logits = _logits(_take(hidden, order[i]), matrix, plan)  # [S, n, V]
        top = jnp.max(logits, axis=-1, keepdims=True)
        total = jnp.sum(jnp.exp(logits - top), axis=-1)
        if plan.level is None:
            # A second exponential costs less than to write the first one down; the barrier keeps
            # the compiler from merging the two.
            again, shift = jax.lax.optimization_barrier((logits, top))
            spread = jnp.sum(jnp.exp(again - shift) * (again - shift), axis=-1) / total
        own = jnp.maximum(_take(targets, order[i]), 0)[..., None]
        chosen = jnp.take_along_axis(logits, own, axis=-1)
        log_total = jnp.log(total)
        logprob = (chosen - top)[..., 0] - log_total
        if plan.level is None:
            second = log_total - spread
        else:
            second = top[..., 0] + (log_total if plan.level == "logsumexp" else 0.0)
        parts = (logprob, second, log_total + top[..., 0])
        results = tuple(_put(out, part, i) for out, part in zip(results, parts, strict=True))
        return results, None if kept is None else _put(kept, logits, i)

    zeros = jnp.zeros(order.shape, wide)
    kept = jnp.zeros((*order.shape, head.shape[1]), wide) if keep else None
    kept = None if kept is None else constrain(kept, plan.mesh, None, "shard", None, "vocab")
    results, kept = jax.lax.fori_loop(0, count, one_chunk, ((zeros,) * 3, kept))
    logprobs, second, normaliser = (_take(_joined(x), rank) for x in results)
    wanted = targets >= 0
    # The normaliser stays where no target is: the backward pass takes exp(z - normaliser) there
    # too, times 0, and exp(z) of a large logit would make that a NaN.
    return (jnp.where(wanted, logprobs, 0.0), jnp.where(wanted, second, 0.0), normaliser), kept


def _scores_backward(plan: _Plan, saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    hidden, head, targets, second, normaliser, kept = saved
    order, rank, count = _order(targets, plan)
    matrix = _matrix(head, hidden, plan)
    wide, vocabulary = wide_dtype(hidden.dtype), jnp.arange(head.shape[1])
    wanted = targets >= 0
    by_logprob, by_second = (jnp.where(wanted, x, 0.0).astype(wide) for x in cotangents)

    def one_chunk(i: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_head = done
        part = _take(hidden, order[i])  # [S, n, D]
        logits = _logits(part, matrix, plan) if kept is None else kept[i]  # [S, n, V]
        target, norm, value, g_p, g_s = (
            _take(x, order[i])[..., None]
            for x in (targets, normaliser, second, by_logprob, by_second)
        )
        table = logits - norm  # log p
        own = vocabulary == target
        if plan.level is None:
            d_logits = jnp.where(own, g_p, 0.0) - jnp.exp(table) * (g_p + g_s * (table + value))
        elif plan.level == "logsumexp":
            d_logits = jnp.where(own, g_p, 0.0) - jnp.exp(table) * (g_p - g_s)
        else:
            d_logits = jnp.where(own, g_p, 0.0) - jnp.exp(table) * g_p + g_s * _largest(logits)
        d_logits = (d_logits / plan.temperature).astype(hidden.dtype)
        back = jnp.einsum("snv,dv->snd", d_logits, matrix, preferred_element_type=wide)
        # Laid out for the product: XLA for CPUs multiplies a transposed view at 0.7 of the speed.
        across = jax.lax.optimization_barrier(jnp.swapaxes(part, 1, 2))  # [S, D, n]
        # One sum for each shard of the batch: they are added up once, after the last chunk.
        d_head += jnp.einsum("sdn,snv->sdv", across, d_logits, preferred_element_type=wide)
        return _put(d_hidden, back.astype(hidden.dtype), i), d_head

    d_hidden = jnp.zeros((*order.shape, hidden.shape[-1]), hidden.dtype)
    d_head = jnp.zeros((hidden.shape[0], *head.shape), wide)
    d_head = constrain(d_head, plan.mesh, "shard", None, "vocab")
    d_hidden, d_head = jax.lax.fori_loop(0, count, one_chunk, (d_hidden, d_head))
    return _take(_joined(d_hidden), rank), d_head.sum(axis=0).astype(head.dtype), None


_scores.defvjp(_scores_forward, _scores_backward)


def _largest(logits: Float[Array, "S n V"]) -> Float[Array, "S n V"]:
    """1 at the largest logit of each position, shared by those that are equal, as JAX does it."""
    there = (logits == jnp.max(logits, axis=-1, keepdims=True)).astype(logits.dtype)
    return there / jnp.sum(there, axis=-1, keepdims=True)


def _order(targets: Int[Array, "S N"], plan: _Plan) -> tuple[Array, Array, Array]:
    """Positions with a target first: (positions by chunk [C, S, n], where each position went
    [S, N], how many chunks hold a target on any shard). The last chunk is filled up with N."""
    shards, positions = targets.shape
    # By counting: a sort takes a TPU's compiler 12 s.
    wanted = targets >= 0
    with_target, without = (jnp.cumsum(x, axis=1) for x in (wanted, ~wanted))
    rank = jnp.where(wanted, with_target, with_target[:, -1:] + without) - 1
    places = jnp.arange(positions, dtype=rank.dtype)
    order = jax.vmap(lambda went: jnp.zeros_like(went).at[went].set(places))(rank)
    chunks = -(-positions // plan.chunk)
    filling = [(0, 0), (0, chunks * plan.chunk - positions)]
    padded = jnp.pad(order, filling, constant_values=positions)
    by_chunk = jnp.moveaxis(padded.reshape(shards, chunks, plan.chunk), 1, 0)
    most = jnp.max(with_target[:, -1])
    return by_chunk, rank, -(-most // plan.chunk)


def _matrix(head: Array, hidden: Array, plan: _Plan) -> Float[Array, "D V"]:
    # Gathered over fsdp once, in the type of the products, not in every chunk.
    return constrain(head.astype(hidden.dtype), plan.mesh, None, "vocab")


def _logits(hidden: Array, matrix: Array, plan: _Plan) -> Float[Array, "S n V"]:
    wide = wide_dtype(hidden.dtype)
    logits = jnp.einsum("snd,dv->snv", hidden, matrix, preferred_element_type=wide)
    return logits / plan.temperature


def _take(x: Array, index: Int[Array, "S n"]) -> Array:
    """[S, N, ...] -> [S, n, ...]; 0 for index N."""
    index = index.reshape(*index.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)


def _put(x: Array, part: Array, i: Array) -> Array:
    """[C, S, n, ...] with chunk i replaced."""
    return jax.lax.dynamic_update_index_in_dim(x, part, i, 0)


def _joined(x: Array) -> Array:
    """[C, S, n, ...] -> [S, C n, ...]"""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DocumentMetrics:
    """Metrics of one microbatch, over all devices; float32 [] and int32 []."""

    loss: Data
    """Normalised already: the microbatches' add up to the optimizer batch's."""
    nll: Data
    """-log p in nats, summed over trained tokens, whatever their weight."""
    z: Data
    """z^2, summed over trained tokens; 0 where no penalty is asked for."""
    nonfinite: Data
    """Trained tokens whose part of the loss is not finite."""
    tokens: Data
    """Trained tokens."""

    @staticmethod
    def zeros() -> DocumentMetrics:
        wide = jax.dtypes.canonicalize_dtype(float)
        numbers = {name: np.zeros((), wide) for name in ("loss", "nll", "z")}
        counts = {name: np.zeros((), np.int32) for name in ("nonfinite", "tokens")}
        return DocumentMetrics(**numbers, **counts)

    def merge(self, other: DocumentMetrics) -> DocumentMetrics:
        """Merge two, on the device or, once fetched, on the host."""
        return jax.tree.map(operator.add, self, other)

    def means(self) -> dict[str, float]:
        """Host floats: `loss` as it is, `nonfinite_tokens` a count, the rest per trained token."""
        tokens = max(float(self.tokens), 1.0)
        return {
            "loss": float(self.loss),
            "nll": float(self.nll) / tokens,
            "z": float(self.z) / tokens,
            "nonfinite_tokens": float(self.nonfinite),
        }


def document_loss(
    logprobs: Float[Array, "B T"],
    level: Float[Array, "B T"] | None,
    inputs: LossInputs,
    z_loss: ZLoss,
) -> tuple[Float[Array, ""], DocumentMetrics]:
    """This microbatch's share of the loss of packed documents: cross entropy, and a penalty.

        loss = sum_t w_t (-log p(o_t) + coef z_t^2),   sum_t w_t = 1 over an optimizer batch

    z_t is the logsumexp of the logits at t (PaLM, arXiv 2204.02311) or their largest (METAGENE-1,
    2501.02045).

    Args:
        logprobs: log p of the targets.
        level: z; None where `z_loss.coef` is 0.
        inputs: weights.
        z_loss: of the spec.
    """
    on = inputs.weights > 0
    nll = jnp.where(on, -logprobs, 0.0)
    squared = jnp.zeros_like(nll) if level is None else jnp.where(on, jnp.square(level), 0.0)
    each = nll + z_loss.coef * squared
    loss = jnp.sum(inputs.weights * each)
    metrics = DocumentMetrics(
        loss=loss,
        nll=jnp.sum(nll),
        z=jnp.sum(squared),
        nonfinite=jnp.sum(on & ~jnp.isfinite(each), dtype=jnp.int32),
        tokens=jnp.sum(on, dtype=jnp.int32),
    )
    return loss, jax.lax.stop_gradient(metrics)
