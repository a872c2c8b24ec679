"""Masters in bfloat16: what an update rounds away, and what stays in float32 around it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.optimizer import apply_gradients, build_optimizer, init_state
from learner_jax.training import StepResult
from runspec.core.spec.schema import Lora, Optimizer, RunSpec
from tests.learner_jax.conftest import changed
from tests.learner_jax.test_training import batch_of, flat, spec_with, trained


def spec_of(master: str, *, lr: float = 1e-3, **learner: Any) -> RunSpec:
    spec = changed(spec_with(), learner={"master_dtype": master, **learner})
    return spec.model_copy(update={"optimizer": Optimizer(lr=lr)})


def updated(params: Any, gradient: Any, *, lr: float) -> Any:
    """The masters after one update; jitted, as compilers may widen what they do not store."""

    optimizer = build_optimizer(Optimizer(lr=lr), 1)
    return jax.jit(lambda *args: apply_gradients(optimizer, *args))(
        params, init_state(optimizer, params), gradient
    )[0]


@pytest.mark.parametrize(("master", "moved"), [("float32", 1.0), ("bfloat16", 0.0)])
def test_a_step_of_3e_7_moves_float32_weights_and_no_bfloat16_weight(
    master: str, moved: float
) -> None:
    # given weights of the usual size, and a gradient for each
    key = jax.random.key(0)
    size = 0.005 + 0.05 * jax.random.uniform(key, (4096,))
    weights = {"w": size.astype(master)}
    gradient = {"w": jax.random.normal(key, (4096,))}
    # when updated at the learning rate of the INTELLECT-2 recipe
    after = updated(weights, gradient, lr=3e-7)["w"]
    # then all have moved, or none
    assert after.dtype == jnp.dtype(master)
    assert np.mean(np.asarray(after != weights["w"])) == moved


def test_an_update_is_computed_in_float32_and_rounded_once() -> None:
    # given the same weights in both types
    weights = {"w": jax.random.normal(jax.random.key(0), (4096,)).astype(jnp.bfloat16)}
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    gradient = {"w": jax.random.normal(jax.random.key(1), (4096,))}
    # when updated, then one is the other, rounded
    narrow = updated(weights, gradient, lr=1e-2)["w"]
    expected = updated(wide, gradient, lr=1e-2)["w"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(narrow, expected)


def types(result: StepResult) -> dict[str, set[str]]:
    moments = [leaf for leaf in jax.tree.leaves(result.state.optimizer) if leaf.ndim]
    trees = {"params": result.state.params, "moments": moments}
    return {name: {str(x.dtype) for x in jax.tree.leaves(tree)} for name, tree in trees.items()}


def test_a_step_trains_bfloat16_masters_with_float32_moments() -> None:
    # given the same rollouts
    wide, narrow = (trained(spec_of(m), batch_of(4)) for m in ("float32", "bfloat16"))
    # then only the masters are narrow
    assert types(narrow) == {"params": {"bfloat16"}, "moments": {"float32"}}
    # and the step was that of float32 masters but for rounding
    np.testing.assert_allclose(flat(narrow).astype(np.float32), flat(wide), rtol=2**-7, atol=2e-3)
    assert narrow.numbers["grad_norm"] == pytest.approx(wide.numbers["grad_norm"], rel=0.05)


def test_adapters_may_be_bfloat16_too() -> None:
    lora = Lora(rank=2, alpha=4.0, targets=["q", "down"])
    result = trained(spec_of("bfloat16", lora=lora), batch_of(4))
    assert types(result)["params"] == {"bfloat16"}
    assert np.any(np.asarray(result.state.params["layers"]["attention"]["q"]["b"]))
