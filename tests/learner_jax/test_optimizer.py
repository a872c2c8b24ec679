"""The chain of optax's transformations: kinds, schedules, skipped updates, moments on the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from learner_jax.optimizer import (
    HOST_MEMORY,
    abstract_state,
    apply_gradients,
    build_optimizer,
    init_state,
    learning_rate,
)
from learner_jax.sharding import logical_sharding, make_mesh
from runspec.core.models.parameters import Parameter
from runspec.core.spec.schema import Mesh, Optimizer

SETTINGS: dict[str, Any] = {
    "lr": 0.1,
    "betas": (0.8, 0.9),
    "eps": 1e-3,
    "momentum": 0.7,
    "weight_decay": 0.2,
    "clip_norm": 1.0,
    "warmup_updates": 2,
}
SHAPES: dict[str, Any] = {
    "embed": ("vocab", "embed"),
    "layers": {
        "gate": ("layers", "embed", "mlp"),
        "o": ("layers", "heads", "head_dim", "embed"),
        "mlp_norm": ("layers", "norm"),
    },
    "final_norm": ("norm",),
}
INPUTS = {"gate": 1, "o": 2}
"""Contracted dimensions of the matrices."""
KINDS = ["adamw", "sgd", "muon"]
SIZES = {"vocab": 12, "embed": 8, "layers": 6, "mlp": 10, "norm": 7, "heads": 2, "head_dim": 4}


def spec_of(kind: str, **changes: Any) -> Optimizer:
    return Optimizer.model_validate({**SETTINGS, "kind": kind, **changes})


def described(shapes: dict[str, Any] = SHAPES) -> dict[str, Any]:
    """The tree of `Parameter`."""
    return {
        name: described(axes)
        if isinstance(axes, dict)
        else Parameter(tuple(SIZES[axis] for axis in axes), axes, inputs=INPUTS.get(name))
        for name, axes in shapes.items()
    }


FUSED = {"xla_cpu_use_fusion_emitters": True}
"""As users compile, unlike other tests: muon's iterations enlarge differences in rounding."""


def updated(spec: Optimizer, params: Any, gradients: list[Any], state: Any = None) -> Any:
    """(parameters, state) after an update with each of the gradients."""
    optimizer = build_optimizer(spec, 10, described())
    state = init_state(optimizer, params) if state is None else state

    @partial(jax.jit, compiler_options=FUSED)
    def one(params: Any, state: Any, grads: Any) -> Any:
        made = jnp.isfinite(optax.tree.norm(grads))
        return apply_gradients(optimizer, params, state, grads, made=made)

    for grads in gradients:
        params, state = one(params, state, grads)
    return params, state


def random_trees(count: int) -> list[Any]:
    rng = np.random.default_rng(0)

    def draw(axes: tuple[str, ...]) -> jax.Array:
        return jnp.asarray(rng.normal(size=[SIZES[axis] for axis in axes]), jnp.float32)

    return [
        jax.tree.map(draw, SHAPES, is_leaf=lambda node: isinstance(node, tuple))
        for _ in range(count)
    ]


def on_mesh(tree: Any, shape: Mesh) -> Any:
    mesh = make_mesh(shape)
    return jax.tree.map(
        lambda x, axes: jax.device_put(x, logical_sharding(mesh, x.shape, axes)), tree, SHAPES
    )


def test_updates_are_those_of_adamw_after_the_clip() -> None:
    # given settings where every part shows, and gradients above and below the clip
    gradients = [np.array([3.0, -4.0]), np.array([0.3, 0.1]), np.array([-6.0, 8.0])]
    # when applied
    trees = [{"w": jnp.asarray(g)} for g in gradients]
    params, _ = updated(spec_of("adamw"), {"w": jnp.array([1.0, -2.0])}, trees)
    # then they are Grpo 2 of arXiv 1711.05101 on clipped gradients
    theta, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient / max(1.0, np.linalg.norm(gradient))
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        step = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
        theta = theta - 0.1 * min(1.0, t / 2) * (step + 0.2 * theta)
    np.testing.assert_allclose(params["w"], theta, rtol=1e-6)


def plain(kind: str) -> optax.GradientTransformation:
    """The same settings, written with optax alone."""

    def rate(n: jax.Array) -> jax.Array:
        return 0.1 * jnp.minimum(1.0, (n + 1) / 2)

    rule = {
        "adamw": optax.adamw(rate, 0.8, 0.9, eps=1e-3, weight_decay=0.2),
        "sgd": optax.chain(
            optax.trace(0.7, nesterov=True),
            optax.add_decayed_weights(0.2),
            optax.scale_by_learning_rate(rate),
        ),
    }[kind]
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_updates_are_those_of_plain_optax(kind: str) -> None:
    # given a tree of parameters and some gradients, when optax applies them
    params, *gradients = random_trees(5)
    theirs = plain(kind)
    expected, state = params, theirs.init(params)
    for grads in gradients:
        changes, state = theirs.update(grads, state, expected)
        expected = optax.apply_updates(expected, changes)
    # then parameters are the same
    found, _ = updated(spec_of(kind), params, gradients)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-8), found, expected
    )


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(fsdp=4, tensor=2)], ids=["one", "fsdp and tensor"])
def test_muon_is_that_of_optax_on_each_layers_matrix(mesh: Mesh) -> None:
    # given optax's own on matrices that are not stacked, gradients clipped by the norm of all
    params, *gradients = random_trees(4)

    def rate(n: jax.Array) -> jax.Array:
        return 0.1 * jnp.minimum(1.0, (n + 1) / 2)

    def unstacked(tree: Any) -> Any:
        layers = range(SIZES["layers"])
        gates = {f"gate{i}": tree["layers"]["gate"][i] for i in layers}
        outputs = {f"o{i}": tree["layers"]["o"][i].reshape(8, 8) for i in layers}
        return gates | outputs

    theirs = optax.contrib.muon(rate, beta=0.7, eps=1e-3, weight_decay=0.2, consistent_rms=0.2)
    expected = unstacked(params)
    state = theirs.init(expected)
    for grads in gradients:
        clipped, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
        changes, state = theirs.update(unstacked(clipped), state, expected)
        expected = optax.apply_updates(expected, changes)
    # when ours updates the stacked tree, cut over a mesh
    placed = on_mesh(params, mesh)
    found, _ = updated(spec_of("muon"), placed, [on_mesh(g, mesh) for g in gradients])
    # then matrices are equal, and all else is as with adamw
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        unstacked(found),
        expected,
    )
    plainly, _ = updated(spec_of("adamw"), params, gradients)
    for name in ("embed", "final_norm"):
        np.testing.assert_allclose(found[name], plainly[name], rtol=1e-5, atol=1e-7)
    norms = (tree["layers"]["mlp_norm"] for tree in (found, plainly))
    np.testing.assert_allclose(*norms, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]),
        ("linear", [1, 2, 3, 4, 4, 3, 2, 2, 2, 2]),
        ("cosine", [1, 2, 3, 4, 4, 3, 2, 2, 2, 2]),
        ("wsd", [1, 2, 3, 4, 4, 4, 4, 4, 4, 3]),
    ],
)
def test_the_learning_rate_warms_up_then_follows_its_schedule(
    schedule: str, expected: list[float]
) -> None:
    decay = {} if schedule == "constant" else {"decay_updates": 2, "final_lr": 2.0}
    spec = Optimizer.model_validate({"lr": 4.0, "warmup_updates": 4, "schedule": schedule, **decay})
    rate = learning_rate(spec, 10)
    assert [float(rate(jnp.int32(n))) for n in range(10)] == pytest.approx(expected)


def test_without_a_warm_up_the_first_update_has_the_whole_rate() -> None:
    assert float(learning_rate(Optimizer(lr=4.0), 10)(jnp.int32(0))) == 4.0


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_is_not_made_changes_no_bit(kind: str) -> None:
    params, good, bad = random_trees(3)
    params["embed"] = params["embed"].at[0, 0].set(-0.0)
    good["embed"] = good["embed"].at[0, 0].set(0.0)
    bad["embed"] = bad["embed"].at[0, 1].set(jnp.nan)
    spec = spec_of(kind)
    once, twice = updated(spec, params, [good]), updated(spec, params, [good, bad])
    for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_moments_on_the_host_make_the_same_updates(kind: str) -> None:
    # given parameters on a mesh, and moments in the host's memory
    params, *gradients = random_trees(4)
    expected = updated(spec_of(kind), params, gradients)
    params = on_mesh(params, Mesh(fsdp=2, tensor=2))
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    spec = spec_of(kind, offload=True)
    optimizer = build_optimizer(spec, 10, described())
    abstract = abstract_state(optimizer, like, offload=True)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    state = jax.jit(partial(init_state, optimizer), out_shardings=shardings)(params)
    # when updated
    found = updated(spec, params, gradients, state)
    # then parameters and moments are those of moments on the device, and still on the host
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found, expected
    )
    like, found = jax.tree.leaves(abstract), jax.tree.leaves(found[1])
    assert [x.sharding.memory_kind for x in found] == [x.sharding.memory_kind for x in like]
    assert {x.sharding.memory_kind for x in found if x.ndim > 1} == {HOST_MEMORY}
