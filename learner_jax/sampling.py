"""Samples continuations by the model's own forward pass, and measures a warm start by them.

There is no cache of keys and values: each new token costs a pass over whole rows, which
the small model of a warm start affords.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from learner_jax.model import bind
from learner_jax.sharding import Execution, make_mesh, shard_batch
from runspec.core.models.config import ModelConfig
from runspec.core.schema import RunSpec
from verify.plugins import Split, WarmStartData

SAMPLED_PROBLEMS = 64
"""Number of problems of each split that a new model answers."""
FEW_RIGHT = 0.05
"""Share of right answers to training problems under which a run has little to learn from."""


def sample(
    spec: RunSpec,
    config: ModelConfig,
    params: Any,
    prompts: Sequence[Sequence[int]],
    end_token: int,
) -> Iterator[list[int]]:
    """Yields a continuation of each prompt, drawn at temperature 1 in float32.

    Args:
        spec: its mesh cuts the rows, its packing says how many are computed at once and how long
            they are, and its shortest `max_new_tokens` ends a continuation.
        config: the shape of the model.
        params: its weights, on the mesh.
        prompts: token ids, at most `data.max_prompt_tokens` of them each.
        end_token: the id after which a continuation ends.
    """
    key, packing = jax.random.key(spec.seed), spec.learner.packing
    mesh = make_mesh(spec.learner.mesh)
    new_tokens = min(pool.max_new_tokens for pool in spec.samplers)
    for begin in range(0, len(prompts), packing.rows):
        batch = prompts[begin : begin + packing.rows]
        tokens = np.zeros((packing.rows, packing.tokens), np.int32)
        lengths = np.zeros(packing.rows, np.int32)
        for row, prompt in enumerate(batch):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        key, now = jax.random.split(key)
        rows = shard_batch(tokens, mesh)
        drawn = _continue(params, rows, lengths, now, end_token, config, mesh, new_tokens)
        for row, prompt in zip(np.asarray(drawn), batch, strict=False):
            output = row[len(prompt) : len(prompt) + new_tokens].tolist()
            yield output[: output.index(end_token) + 1] if end_token in output else output


@partial(jax.jit, static_argnames=("config", "mesh", "new_tokens"))
def _continue(
    params: Any,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    key: Array,
    end_token: int,
    config: ModelConfig,
    mesh: Mesh,
    new_tokens: int,
) -> Int[Array, "B T"]:
    """Writes up to `new_tokens` drawn tokens behind the first `lengths` of each row; a row of
    length 0 holds no prompt."""
    policy = bind(config, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    rows = jnp.arange(len(tokens))

    def unended(state: tuple[Array, Array, Array]) -> Array:
        step, _, going_on = state
        return (step < new_tokens) & going_on.any()

    def one_more(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        step, tokens, going_on = state
        at = lengths + step
        filled = (positions < at[:, None]).astype(jnp.int32)
        hidden = policy(tokens, filled, positions, Execution(jnp.float32, mesh=mesh))
        logits = hidden[rows, at - 1] @ policy.head_weight()
        drawn = jax.random.categorical(jax.random.fold_in(key, step), logits)
        return step + 1, tokens.at[rows, at].set(drawn), going_on & (drawn != end_token)

    return jax.lax.while_loop(unended, one_more, (jnp.zeros((), jnp.int32), tokens, lengths > 0))[1]


def sampled_right(
    spec: RunSpec, config: ModelConfig, params: Any, data: WarmStartData, split: Split
) -> float:
    """Share of problems that the model, sampled as the run samples, answers as the traces do.

    An answer counts where it is the trace's token for token, behind the only `</think>`; a run's
    grader may accept more.
    """
    traces = data.traces(np.random.default_rng([spec.seed, 3]), SAMPLED_PROBLEMS, split)
    outputs = sample(spec, config, params, [t.prompt_tokens for t in traces], data.eos_token_id)
    right = 0
    for trace, output in zip(traces, outputs, strict=True):
        wanted = trace.output_tokens[trace.answer_start - 1 :]  # from `</think>` on
        ending = len(output) - len(wanted)
        right += output[ending:] == wanted and wanted[0] not in output[:ending]
    return right / len(traces)


def log_accuracy(right: Mapping[str, float], probability: float, log: logging.Logger) -> None:
    """Logs how often the model is right by itself, with what to do where it never is."""
    figures = (
        f"sampled at temperature 1: {right['train']:.0%} of training problems and "
        f"{right['held_out']:.0%} of held-out ones are right; P(answer) {probability:.3f} is that "
        "after given thinking"
    )
    if right["train"] >= FEW_RIGHT:
        log.info("%s", figures)
    else:
        log.warning(
            "%s. The run has almost nothing to learn from: raise "
            "warm_start.stop_answer_probability (and max_updates), lower warm_start.answer_weight "
            "to 1, or choose easier problems (docs/first-run.md)",
            figures,
        )
