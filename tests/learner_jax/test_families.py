"""One decoder for all families: what transformers computes of each, packed or alone."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.weight_map import weight_map
from learner_jax.execution import Execution
from learner_jax.leaves import leaf_at, load_params
from learner_jax.logprobs import token_logprobs
from learner_jax.model import bind
from learner_jax.packing import Packed, Sample, TokenBatch, pack
from learner_jax.sharding import make_mesh
from runspec.core.models.config import ModelConfig
from runspec.core.models.family import load_config
from runspec.core.spec import schema
from tests.learner_jax.families import FAMILIES, lines, saved, theirs, token_weights

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
GRADIENT_TOLERANCE = {"float32": 3e-5, "float64": 1e-10}
"""In float32 either program is about 1e-5 from the gradient in float64."""


@cache
def packed() -> Packed:
    return pack([Sample(ids[:1], ids[1:]) for ids in lines()], tokens=48, rows=2)


@partial(jax.jit, static_argnames=("config", "execution"))
def ours(params: Any, batch: TokenBatch, weights: Any, config: ModelConfig, execution: Any) -> Any:
    """Gradient of the weighted log-probs, the log-probs, and the logits."""

    def objective(params: Any) -> Any:
        policy = bind(config, params)
        hidden = policy(batch.tokens, batch.segment_ids, batch.positions, execution)
        head = policy.head_weight()
        logprobs, _ = token_logprobs(
            hidden, head, batch.targets, temperature=1.0, mesh=execution.mesh
        )
        return jnp.sum(weights * logprobs), (logprobs, hidden @ head)

    return jax.grad(objective, has_aux=True)(params)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def tensors_of(tree: Any, config: ModelConfig) -> dict[str, np.ndarray]:
    """A tree by Hugging Face names."""
    found = {}
    for entry in weight_map(config):
        leaf = np.asarray(leaf_at(tree, entry.path))
        parts = [leaf] if entry.layers is None else list(leaf)
        found |= {
            name: entry.to_hf(part) for name, part in zip(entry.tensor_names(), parts, strict=True)
        }
    return found


QUICK = [("qwen2, tied", "float32"), ("qwen2, tied", "float64"), ("llama 3", "float32")]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *QUICK,
        *(
            pytest.param(name, "float64", marks=pytest.mark.slow)
            for name in FAMILIES
            if (name, "float64") not in QUICK
        ),
    ],
)
def test_a_family_is_what_transformers_computes(name: str, dtype: str) -> None:
    assert_parity(name, dtype)


def assert_parity(name: str, dtype: str) -> None:
    """Of logits, log-probs and gradients with transformers, to 1e-5 or 1e-10 as the type allows."""
    # given a random model as transformers saved it, and what transformers says of samples alone
    config = load_config(saved(name))
    expected = theirs(name, dtype)
    with jax.enable_x64(dtype == "float64"):
        mesh = make_mesh(schema.Mesh())
        params = load_params(saved(name), config, mesh)
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        # when the same samples are packed into rows
        grads, (found_logprobs, found_logits) = ours(
            params,
            packed().token_batch(0),
            packed().scatter(token_weights())[0].astype(dtype),
            config,
            Execution(jnp.dtype(dtype), mesh=mesh),
        )
    # then logits, log-probs and the gradient of every tensor are the same
    tolerance = TOLERANCE[dtype]
    for number, place in enumerate(packed().placements):
        row = np.s_[place.row, place.start : place.stop]
        logits, logprobs = expected.logits[number][:-1], expected.logprobs[number]
        assert relative(np.asarray(found_logits)[row], logits) < tolerance
        assert relative(np.asarray(found_logprobs)[row], logprobs) < tolerance
    found = tensors_of(grads, config)
    assert found.keys() == expected.gradients.keys()
    errors = {key: relative(found[key], expected.gradients[key]) for key in found}
    assert max(errors.values()) < GRADIENT_TOLERANCE[dtype], errors
