"""How a model is computed, as opposed to what it computes."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from runspec.core.spec import schema


@dataclass(frozen=True)
class Execution:
    """None of it changes the result beyond rounding."""

    compute_dtype: np.dtype | type
    """Type of activations and matrix products; norms, RoPE and softmax are computed in at least
    float32."""
    remat: schema.Remat = "none"
    """The values that a layer stores for the backward pass."""
    attention: schema.Attention = "auto"
    """The attention kernel."""
    mesh: Mesh | None = None
    """Activations are sharded over it; None leaves that to the compiler."""


def wide_dtype(dtype: np.dtype | type) -> np.dtype:
    """The type of sums over values of a type: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def widen(x: Array) -> Array:
    """`x` in at least float32."""
    return x.astype(wide_dtype(x.dtype))


def full_float32(compute_dtype: str | np.dtype | type) -> None:
    """Makes float32 products float32 in this process, where that is the type of products.

    By default TPUs round their operands to bfloat16, and NVIDIA GPUs to TF32. Call it before
    anything is traced.
    """
    if jnp.dtype(compute_dtype) == jnp.float32:
        jax.config.update("jax_default_matmul_precision", "highest")


def execution(
    learner: schema.Learner, mesh: Mesh | None, *, remat: schema.Remat | None = None
) -> Execution:
    """As the spec says; `remat` "none" where no gradient is asked for."""
    return Execution(
        jnp.dtype(learner.compute_dtype), remat or learner.remat, learner.attention, mesh
    )
