"""What a run's types ask of the compiler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from learner_jax.execution import full_float32


@pytest.mark.parametrize(("compute", "asked"), [("float32", True), ("bfloat16", False)])
def test_float32_products_are_asked_for_in_full_where_that_is_the_type(
    compute: str, asked: bool
) -> None:
    # given a process that computes in a type
    full_float32(compute)
    # when a product is lowered
    x = jnp.zeros((2, 2), compute)
    text = jax.jit(lambda x: x @ x).lower(x).as_text()
    # then an accelerator is not left to round its operands
    assert ("HIGHEST" in text) == asked
