"""The probe of a version: fixed token ids, and what the learner says of them under its bits.

A sampler asks its engine the same after a load. It covers what cannot be read back from the
engine: repacked tensors, stale caches, a wrong configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from learner_jax.arrays import TokenBatch
from learner_jax.execution import execution
from learner_jax.logprobs import token_logprobs
from learner_jax.model import bind
from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import RunSpec

SEQUENCES = 4
MAX_TOKENS = 32


def probe_tokens(seed: int, config: ModelConfig) -> np.ndarray:
    """Random token ids, i32 [SEQUENCES, at most MAX_TOKENS], a function of the run's seed."""
    length = min(MAX_TOKENS, config.max_position_embeddings)
    rng = np.random.default_rng([seed, 3])
    return rng.integers(0, config.vocab_size, (SEQUENCES, length)).astype(np.int32)


def build_probe(spec: RunSpec, config: ModelConfig, mesh: Mesh) -> Callable[[Any], dict[str, Any]]:
    """A function from published parameters to the contents of probe.json.

        {"sequences": [{"tokens": [t_0 .. t_m], "logprobs": [m numbers]}, ...]}

    logprobs[i] is of t_(i+1) given the tokens before it, at temperature 1.
    """
    tokens = probe_tokens(spec.seed, config)
    targets = np.concatenate([tokens[:, 1:], np.zeros_like(tokens[:, :1])], axis=1)
    batch = TokenBatch(
        tokens=tokens,
        targets=targets,
        segment_ids=np.ones_like(tokens),
        positions=np.tile(np.arange(tokens.shape[1], dtype=np.int32), (SEQUENCES, 1)),
    )

    @partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def score(params: Any) -> Float[Array, "B T"]:
        policy = bind(config, params)
        hidden = policy(
            batch.tokens,
            batch.segment_ids,
            batch.positions,
            execution(spec.learner, mesh, remat="none"),
        )
        return token_logprobs(hidden, policy.head_weight(), batch.targets, temperature=1.0)[0]

    def probe(params: Any) -> dict[str, Any]:
        logprobs = np.asarray(score(params))[:, :-1]
        return {
            "sequences": [
                {"tokens": ids.tolist(), "logprobs": values.tolist()}
                for ids, values in zip(tokens, logprobs, strict=True)
            ]
        }

    return probe
