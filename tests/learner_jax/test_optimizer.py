"""AdamW as its paper writes it, the warm-up, the clip, and moments that lie on the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from learner_jax import optimizer
from learner_jax.optimizer import (
    HOST_MEMORY,
    Moments,
    abstract_moments,
    adamw,
    global_norm,
    learning_rate,
    zero_moments,
)
from learner_jax.sharding import logical_sharding, make_mesh
from runspec.core.spec.schema import Mesh, Optimizer

SPEC = Optimizer(
    lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2, clip_norm=1.0, warmup_updates=2
)
SHAPES = {"embed": ("vocab", "embed"), "layers": ("layers", "embed", "mlp"), "norm": ("norm",)}
SIZES = {"vocab": 12, "embed": 8, "layers": 6, "mlp": 10, "norm": 7}


def updated(
    params: Any, gradients: list[Any], moments: Moments | None = None, shardings: Any = None
) -> tuple[Any, Moments]:
    """After an update with each of the gradients."""

    @jax.jit
    def update(params: Any, moments: Moments, grads: Any, n: jax.Array) -> tuple[Any, Moments]:
        norm = global_norm(grads)
        made = jnp.isfinite(norm)
        return adamw(
            SPEC, params, moments, grads, updates=n, norm=norm, made=made, shardings=shardings
        )

    zeros = jax.tree.map(jnp.zeros_like, params)
    moments = moments or Moments(zeros, zeros)
    for n, grads in enumerate(gradients):
        params, moments = update(params, moments, grads, jnp.int32(n))
    return params, moments


def test_warm_up_is_linear_then_constant() -> None:
    spec = Optimizer(lr=4.0, warmup_updates=4)
    rates = [float(learning_rate(spec, jnp.int32(n))) for n in range(6)]
    assert rates == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    assert float(learning_rate(Optimizer(lr=4.0), jnp.int32(0))) == 4.0


def test_updates_are_those_of_adamw_after_the_clip() -> None:
    # given settings where every part shows, and gradients above and below the clip
    gradients = [np.array([3.0, -4.0]), np.array([0.3, 0.1]), np.array([-6.0, 8.0])]
    # when applied
    params, _ = updated(jnp.array([1.0, -2.0]), [jnp.asarray(g) for g in gradients])
    # then they are Algorithm 2 of arXiv 1711.05101 on clipped gradients
    theta, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient / max(1.0, np.linalg.norm(gradient))
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        step = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
        theta = theta - 0.1 * min(1.0, t / 2) * (step + 0.2 * theta)
    np.testing.assert_allclose(params, theta, rtol=1e-6)


def random_trees(count: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [
        {
            name: jnp.asarray(rng.normal(size=[SIZES[axis] for axis in axes]), jnp.float32)
            for name, axes in SHAPES.items()
        }
        for _ in range(count)
    ]


def test_updates_are_those_of_optax() -> None:
    # given a tree of parameters and some gradients
    params, *gradients = random_trees(5)
    # when optax applies them
    theirs = optax.chain(
        optax.clip_by_global_norm(SPEC.clip_norm),
        optax.adamw(
            lambda n: SPEC.lr * jnp.minimum(1.0, (n + 1) / SPEC.warmup_updates),
            *SPEC.betas,
            eps=SPEC.eps,
            weight_decay=SPEC.weight_decay,
        ),
    )
    expected, state = params, theirs.init(params)
    for grads in gradients:
        updates, state = theirs.update(grads, state, expected)
        expected = optax.apply_updates(expected, updates)
    # then parameters are the same
    found, _ = updated(params, gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), found, expected)


def test_an_update_that_is_not_made_changes_nothing() -> None:
    params, good, bad = random_trees(3)
    bad["embed"] = bad["embed"].at[0, 0].set(jnp.nan)
    once, twice = updated(params, [good]), updated(params, [good, bad])
    jax.tree.map(np.testing.assert_array_equal, once, twice)


@pytest.mark.parametrize("piece", [2**26, 100], ids=["a leaf at once", "a layer at a time"])
def test_moments_on_the_host_make_the_same_updates(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given parameters on a mesh, and moments in the host's memory
    monkeypatch.setattr(optimizer, "PIECE", piece)
    mesh = make_mesh(Mesh(fsdp=2, tensor=2))
    params, *gradients = random_trees(4)
    shardings = {
        name: logical_sharding(mesh, params[name].shape, axes) for name, axes in SHAPES.items()
    }
    expected = updated(params, gradients)
    params = jax.tree.map(jax.device_put, params, shardings)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    moments = zero_moments(abstract_moments(like, offload=True))
    # when updated
    found = updated(params, gradients, moments, shardings)
    # then parameters and moments are those of moments on the device, and still on the host
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found, expected
    )
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(found[1])} == {HOST_MEMORY}
