"""The learner's optimizer: optax's transformations, chained as the spec says.

For update n = 0, 1, ... with gradient g and rate lr_n (`learning_rate`):

    g' = g min(1, clip_norm / ||g||)
    theta = theta - lr_n (d + weight_decay theta)

and the direction d by `optimizer.kind`, mu being `momentum`:

    adamw   m = beta1 m + (1 - beta1) g',  v = beta2 v + (1 - beta2) g'^2     (arXiv 1711.05101)
            d = m^ / (sqrt(v^) + eps),  m^ = m / (1 - beta1^(n + 1)), v^ likewise
    sgd     m = g' + mu m,  d = g' + mu m                                     (Nesterov)
    muon    of each layer's matrix [a, b], all else as adamw                  (arXiv 2502.16982)
            m = mu m + (1 - mu) g',  u = mu m / (1 - mu^(n + 2)) + (1 - mu) g' / (1 - mu^(n + 1))
            d = 0.2 sqrt(max(a, b)) O(u),  O five steps of Newton and Schulz towards orthogonality

The learning rate is part of the weight decay, and every parameter decays, norms and biases too.
theta is rounded to the type of the masters. In bfloat16 neighbours lie 2^-8 to 2^-7 of their size
apart, and a step of less than half of that is lost: at lr 3e-7, of every weight above 1.6e-4.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from learner_jax.leaves import leaf_at, leaf_path
from learner_jax.sharding import widen
from runspec.core.models.parameters import Tree
from runspec.core.schema import Optimizer, RunSpec

HOST_MEMORY = "pinned_host"
UPDATE_RMS = 0.2
"""Root mean square of muon's direction, near AdamW's, so that one `lr` is right for both."""


def learning_rate(spec: Optimizer, updates: int, rise: tuple[int, int] = (0, 0)) -> optax.Schedule:
    """lr_n: linear warm-up to lr, then the schedule.

    With w `warmup_updates`, d `decay_updates` and f `final_lr`, for n >= w:

        constant   lr
        linear     f + (lr - f) (1 - t),                 t = min(1, (n - w) / d)
        cosine     f + (lr - f) (1 + cos(pi t)) / 2
        wsd        linear with t = clip((n - (updates - d)) / d, 0, 1)      (arXiv 2404.06395)

    and lr (n + 1) / w before. Of a rate that a change has set (`RunSpec.changes`), the first m
    updates from update k on have the shares 1/m, 2/m, ... of that.

    Args:
        spec: rates and lengths.
        updates: that the run makes.
        rise: k and m of the change; k counts every update of the steps before, also those skipped.
    """
    warmup, decay = spec.warmup_updates, spec.decay_updates or 0
    start = optax.linear_schedule(spec.lr / max(warmup, 1), spec.lr, warmup - 1)
    if spec.schedule == "cosine":
        after = optax.cosine_decay_schedule(spec.lr, decay, spec.final_lr / spec.lr)
    elif spec.schedule == "constant":
        after = optax.constant_schedule(spec.lr)
    else:
        begin = updates - decay - warmup if spec.schedule == "wsd" else 0
        after = optax.linear_schedule(spec.lr, spec.final_lr, decay, max(begin, 0))
    rate = optax.join_schedules([start, after], [warmup])
    first, length = rise
    if not length:
        return rate
    return lambda n: rate(n) * jnp.clip((n - first + 1) / length, 1 / length, 1.0)


def rise_of(spec: RunSpec) -> tuple[int, int]:
    """The `rise` of `learning_rate`, from the spec of a step (`RunSpec.at_step`)."""
    updates = spec.algorithm.updates_per_step
    for change in spec.changes:
        return change.step * updates, change.warmup_updates
    return 0, 0


def build_optimizer(
    spec: Optimizer, updates: int, trained: Tree | None = None, rise: tuple[int, int] = (0, 0)
) -> optax.GradientTransformationExtraArgs:
    """The chain: clip, then the rule of `optimizer.kind`.

    `update` takes `made`, a bool []: where false, state and parameters stay as they are.

    Args:
        spec: of the run.
        updates: that the run makes.
        trained: tree of `Parameter`, which muon asks for the layers' matrices.
        rise: see `learning_rate`.
    """
    rule = _skippable(_rule(spec, learning_rate(spec, updates, rise), trained or {}))
    if spec.offload or spec.kind == "muon":
        rule = _layer_by_layer(rule, hosted=spec.offload)
    return optax.chain(optax.clip_by_global_norm(spec.clip_norm), rule)


def _rule(spec: Optimizer, rate: optax.Schedule, trained: Tree) -> optax.GradientTransformation:
    if spec.kind == "sgd":
        return optax.chain(
            optax.trace(spec.momentum, nesterov=True),
            optax.add_decayed_weights(spec.weight_decay),
            optax.scale_by_learning_rate(rate),
        )
    adamw = optax.adamw(rate, *spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)
    if spec.kind == "adamw":
        return adamw
    muon = optax.contrib.muon(
        rate,
        beta=spec.momentum,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        muon_weight_dimension_numbers=partial(_dimensions, trained),
        consistent_rms=UPDATE_RMS,
    )
    return optax.partition({"muon": muon, "adamw": adamw}, partial(_labels, trained))


def _labels(trained: Tree, params: Any) -> Any:
    def label(path: tuple[Any, ...], _: Any) -> str:
        return "adamw" if leaf_at(trained, leaf_path(path)).inputs is None else "muon"

    return jax.tree.map_with_path(label, params)


def _dimensions(trained: Tree, params: Any) -> Any:
    """Which dimensions of a layer's matrix are its input, and which its output."""

    def numbers(path: tuple[Any, ...], leaf: Array) -> optax.contrib.MuonDimensionNumbers:
        ends = 1 + (leaf_at(trained, leaf_path(path)).inputs or 0)
        return optax.contrib.MuonDimensionNumbers(range(1, ends), range(ends, leaf.ndim))

    return jax.tree.map_with_path(numbers, params)


def abstract_state(
    optimizer: optax.GradientTransformation, params: Any, *, offload: bool
) -> optax.OptState:
    """The state for `jax.ShapeDtypeStruct` parameters: moments are at least float32.

    Args:
        optimizer: of `build_optimizer`.
        params: with shardings; moments are cut over the mesh as these are, the rest is replicated.
        offload: moments lie in the host's memory.
    """
    mesh = jax.tree.leaves(params)[0].sharding.mesh

    def like(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def moment(leaf: Any, param: Any) -> Any:
        if _is_masked(leaf):
            return leaf
        sharding = param.sharding
        return like(leaf, sharding.with_memory_kind(HOST_MEMORY) if offload else sharding)

    return optax.tree.map_params(
        optimizer,
        moment,
        jax.eval_shape(partial(init_state, optimizer), params),
        params,
        transform_non_params=lambda leaf: like(leaf, NamedSharding(mesh, PartitionSpec())),
        is_leaf=_is_masked,
    )


def init_state(optimizer: optax.GradientTransformation, params: Any) -> optax.OptState:
    """The state before the first update, inside jit."""
    return optimizer.init(jax.tree.map(widen, params))


def apply_gradients(
    optimizer: optax.GradientTransformationExtraArgs,
    params: Any,
    state: optax.OptState,
    grads: Any,
    *,
    made: Bool[Array, ""] | bool = True,
    scale: Float[Array, ""] | None = None,
) -> tuple[Any, optax.OptState]:
    """One update, inside jit, computed in at least float32 and rounded once to the masters' type.

    Args:
        optimizer: of `build_optimizer`.
        params: tree of masters.
        state: of the optimizer.
        grads: float32 tree.
        made: where false, parameters and state come back as they are.
        scale: factor of the learning rate; None: 1.
    """
    updates, state = optimizer.update(grads, state, jax.tree.map(widen, params), made=made)
    if scale is not None:
        updates = jax.tree.map(lambda x: scale * x, updates)
    return optax.apply_updates(params, updates), state


def _skippable(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`rule` with the extra argument `made`."""

    def update(grads: Any, state: Any, params: Any, *, made: Any, **_: Any) -> tuple[Any, Any]:
        updates, new = rule.update(grads, state, params)
        # x + -0.0 is x in all bits, also where x is -0.0.
        updates = jax.tree.map(lambda x: jnp.where(made, x, -0.0), updates)
        return updates, jax.tree.map(lambda x, old: jnp.where(made, x, old), new, state)

    return optax.GradientTransformationExtraArgs(rule.init, update)


def _layer_by_layer(
    rule: optax.GradientTransformationExtraArgs, *, hosted: bool
) -> optax.GradientTransformationExtraArgs:
    """`rule` applied to one layer of the stacked matrices at a time, and to the others at once.

    A loop, not a sequence: only a loop keeps XLA from fetching all layers first.

    Args:
        rule: that updates each leaf, and each layer of it, by itself.
        hosted: moments lie in the host's memory, and visit the device.
    """

    def moved(tree: Any, space: Any) -> Any:
        """The parameters' leaves of a state in another `jax.memory.Space`."""

        def put(path: tuple[Any, ...], leaf: Array) -> Array:
            return leaf if _kind(path, leaf) == "shared" else jax.device_put(leaf, space)

        return jax.tree.map_with_path(put, tree) if hosted else tree

    def update(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        whole, rest = rule.update(
            _pick(grads, "whole"),
            moved(_pick(state, "whole", "shared"), jax.memory.Space.Device),
            _pick(params, "whole"),
            **extra,
        )
        rest = moved(rest, jax.memory.Space.Host)
        stacked, shared = _pick(params, "stacked"), _pick(state, "shared")
        layers = {leaf.shape[0] for leaf in jax.tree.leaves(stacked)}

        def one(i: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            def cut(tree: Any) -> Any:
                return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), tree)

            def put(x: Array, new: Array) -> Array:
                return jax.lax.dynamic_update_slice_in_dim(x, new, i, 0)

            grads, moments = carry
            held = _merge(moved(cut(moments), jax.memory.Space.Device), shared)
            updates, held = rule.update(cut(grads), held, cut(stacked), **extra)
            held = moved(_pick(held, "stacked"), jax.memory.Space.Host)
            return jax.tree.map(put, grads, updates), jax.tree.map(put, moments, held)

        carry = _pick(grads, "stacked"), _pick(state, "stacked")
        for count in layers:
            carry = jax.lax.fori_loop(0, count, one, carry)
        return _merge(whole, carry[0]), _merge(rest, carry[1])

    return optax.GradientTransformationExtraArgs(rule.init, update)


def _kind(path: tuple[Any, ...], leaf: Array) -> str:
    """`shared` for what is no parameter's; `stacked` for a layer's matrices, else `whole`.

    TPUs slice the host's arrays only along dimensions before the last two, so that vectors of
    layers are whole.
    """
    if not isinstance(path[-1], jax.tree_util.DictKey):
        return "shared"
    in_layers = jax.tree_util.DictKey("layers") in path
    return "stacked" if in_layers and leaf.ndim > 2 else "whole"


def _pick(tree: Any, *kinds: str) -> Any:
    """The leaves of these kinds; `optax.MaskedNode` in the place of the others."""
    return jax.tree.map_with_path(
        lambda path, leaf: leaf if _kind(path, leaf) in kinds else optax.MaskedNode(), tree
    )


def _merge(one: Any, other: Any) -> Any:
    """The leaves of two trees of one structure, of which `_pick` has left out different ones."""
    return jax.tree.map(lambda a, b: b if _is_masked(a) else a, one, other, is_leaf=_is_masked)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
