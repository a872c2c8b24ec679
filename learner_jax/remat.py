"""What a layer keeps from the forward pass for the backward one, by the names of `learner.remat`.

    none        everything
    dots        the results of its matrix products, and what attention gave
    attention   its input, and what attention gave: its output and log-sum-exp
    full        its input
    offload     its input, in the host's memory

What is not kept is computed again, from the layer's input, when the backward pass comes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import checkpoint_policies as policies
from jax.ad_checkpoint import checkpoint_name

from learner_jax.attention import SAVED
from runspec.core.spec import schema

Body = Callable[[Any, Any], tuple[Any, Any]]
LAYER_INPUT = "layer_input"

_POLICIES: dict[schema.Remat, Callable[..., Any]] = {
    # Attention's own products have batch dimensions: scores, T x T, are not kept.
    "dots": policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(SAVED)
    ),
    "attention": policies.save_only_these_names(SAVED),
    "full": policies.nothing_saveable,
    "offload": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def layer_remat(body: Body, remat: schema.Remat) -> Body:
    """The body of a scan over layers, (x, layer) -> (x, None), that keeps what `remat` says."""
    if remat == "none":
        return body

    def named(x: Any, layer: Any) -> tuple[Any, Any]:
        return body(checkpoint_name(x, LAYER_INPUT), layer)

    # A scan's body is not merged with another: nothing has to prevent it.
    return jax.checkpoint(named, prevent_cse=False, policy=_POLICIES[remat])
