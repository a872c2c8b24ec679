"""Remat policies: what each keeps, as the compiled programs' memory says."""

from __future__ import annotations

from functools import cache
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.execution import Execution
from learner_jax.model import abstract_params, bind
from runspec.core.models.config import ModelConfig
from runspec.core.spec import schema

pytestmark = pytest.mark.slow  # a program to compile for each policy

CONFIG = ModelConfig("qwen2", 32, 32, 96, 6, 2, 1, 16, 2048, 1e4, 1e-6, False, True)
ROWS, TOKENS = 2, 1024  # long enough that attention goes by blocks
KEPT_INPUTS = 6 * ROWS * TOKENS * 32 * 4
"""Bytes of the inputs of all layers."""


@cache
def compiled(remat: schema.Remat) -> jax.stages.Compiled:
    """The gradient of a model of six layers."""
    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), abstract_params(CONFIG)
    )
    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)
    execution = Execution(jnp.float32, remat=remat)
    weights = np.linspace(0.0, 1.0, 32, dtype=np.float32)

    def objective(params: dict, tokens: jax.Array) -> jax.Array:
        segments, positions = jnp.ones_like(tokens), jnp.cumsum(jnp.ones_like(tokens), axis=1)
        return jnp.sum(bind(CONFIG, params)(tokens, segments, positions, execution) * weights)

    return jax.jit(jax.grad(objective)).lower(params, tokens).compile()


def kept(remat: schema.Remat) -> int:
    """Bytes that the program needs beside its arguments and results."""
    return compiled(remat).memory_analysis().temp_size_in_bytes


def test_each_policy_keeps_less_than_the_one_before() -> None:
    assert kept("none") > kept("dots") > kept("attention") > kept("full") > KEPT_INPUTS
    # and `attention` keeps of each layer, beside its input, an output of that size and little more
    assert KEPT_INPUTS <= kept("attention") - kept("full") < 1.5 * KEPT_INPUTS


def test_every_policy_gives_the_same_gradient() -> None:
    # given one set of parameters and tokens
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda spec: (
            spec.initial.mean + rng.normal(size=spec.shape) * (spec.initial.std or 0.1)
        ).astype(np.float32),
        abstract_params(CONFIG),
    )
    tokens = rng.integers(0, 32, (ROWS, TOKENS)).astype(np.int32)
    # when differentiated under each policy, then the gradient is that of keeping everything
    expected = compiled("none")(params, tokens)
    for remat in get_args(schema.Remat):
        found = compiled(remat)(params, tokens)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b), remat
