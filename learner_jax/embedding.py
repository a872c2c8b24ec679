"""The look-up of token embeddings, on a mesh and back."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from learner_jax.execution import Execution, wide_dtype
from learner_jax.sharding import constrain


def embed(
    table: Float[Array, "V D"], tokens: Int[Array, "B T"], execution: Execution
) -> Float[Array, "B T D"]:
    """`table[tokens]` in `execution.compute_dtype`; the gradient is summed in at least float32.

    The table is gathered over fsdp first, as a layer's weights are before their products: looked up
    in a table that is cut along D, the activations of all rows would be exchanged instead.
    """
    return _look_up(table, tokens, execution.compute_dtype, execution.mesh)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _look_up(
    table: Array, tokens: Array, dtype: np.dtype | type, mesh: Mesh | None
) -> Float[Array, "B T D"]:
    return constrain(table.astype(dtype), mesh, "vocab", None)[tokens]


def _forward(
    table: Array, tokens: Array, dtype: np.dtype | type, mesh: Mesh | None
) -> tuple[Array, tuple[Array, Array]]:
    return _look_up(table, tokens, dtype, mesh), (table, tokens)


def _backward(
    dtype: np.dtype | type, mesh: Mesh | None, residuals: tuple[Array, Array], dx: Array
) -> tuple[Array, None]:
    # A token comes often, and a sum of many terms in bfloat16 would lose most of them.
    table, tokens = residuals
    wide = wide_dtype(table.dtype)
    zeros = constrain(jnp.zeros_like(table, wide), mesh, "vocab", None)
    summed = zeros.at[tokens].add(dx.astype(wide))
    return constrain(summed, mesh, "vocab", "embed").astype(table.dtype), None


_look_up.defvjp(_forward, _backward)
