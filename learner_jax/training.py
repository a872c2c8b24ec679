"""One rollout step on the mesh: rollouts in, updated state and the step's numbers out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from learner_jax.arrays import LossInputs, TokenBatch
from learner_jax.batch import Batch, TrainingRollout
from learner_jax.loss import token_weights
from learner_jax.loss_metrics import LossMetrics
from learner_jax.packing import Packed, Sample, pack
from learner_jax.sharding import shard_batch
from learner_jax.step import Programs, TrainState
from runspec.common.process import RunStopped
from runspec.spec.schema import RunSpec


@dataclass(frozen=True)
class StepResult:
    """What a rollout step did."""

    state: TrainState
    numbers: dict[str, float]
    """`LossMetrics.means` over the step's updates, and `grad_norm`, the mean before clipping."""
    tokens: int
    """Prompt and output tokens of the rollouts."""
    positions: int
    """Of the packed rows that were trained, padding included."""
    score_s: float
    """Seconds of packing, and of the log-probs of pi_old and of the reference policy."""
    update_s: float
    """Seconds of the updates: loss, gradients, optimizer."""


@dataclass(frozen=True)
class _Share:
    """The rollouts of one optimizer update, packed, and their log-probs before the first update."""

    rollouts: Sequence[TrainingRollout]
    packed: Packed
    old: list[np.ndarray]
    """log pi_old, one array [rows, tokens] a microbatch."""
    reference: list[np.ndarray] | None


def train_step(
    spec: RunSpec,
    mesh: Mesh,
    programs: Programs,
    state: TrainState,
    *,
    published: Any,
    reference: Any | None,
    batch: Batch,
) -> StepResult:
    """Makes `updates_per_step` optimizer updates, each from its contiguous share of the groups.

    Args:
        spec, mesh, programs: of the run.
        state: of the version being trained; used up.
        published: that version's bits, under which pi_old is recomputed.
        reference: version 0's bits; None where `kl.coef` is 0.
        batch: in training order.

    Raises:
        RunStopped: a gradient that is not finite.
    """
    begun = time.perf_counter()
    # All of pi_old before the first update: that is what makes it the version's.
    shares = [
        _share(spec, mesh, programs, published, reference, groups)
        for groups in _split(batch.groups, spec.algorithm.updates_per_step)
    ]
    scored = time.perf_counter()
    merged, norms = LossMetrics.zeros(), []
    for update, share in enumerate(shares):
        total = programs.zeros()
        for tokens, inputs in _microbatches(spec, mesh, share):
            total = programs.accumulate(state.params, total, tokens, inputs)
        state, norm = programs.apply(state, total)
        norms.append(float(norm))
        if not np.isfinite(norms[-1]):
            raise RunStopped(
                f"step {batch.manifest.step}, update {update}: the gradient is not finite",
                place="optimizer",
                remedy="lower optimizer.lr or clip_norm; the newest full state is from before this",
            )
        merged = merged.merge(jax.device_get(total.metrics))
    numbers = merged.means()
    for summed in ("loss", "policy_loss"):
        numbers[summed] /= len(shares)
    numbers["grad_norm"] = float(np.mean(norms))
    tokens_trained = sum(len(r.prompt_tokens) + len(r.output_tokens) for r in batch.rollouts)
    return StepResult(
        state,
        numbers,
        tokens_trained,
        positions=sum(share.packed.microbatches for share in shares)
        * spec.learner.packing.rows
        * spec.learner.packing.tokens,
        score_s=scored - begun,
        update_s=time.perf_counter() - scored,
    )


def compile_ahead(
    spec: RunSpec, mesh: Mesh, programs: Programs, state: TrainState, published: Any
) -> None:
    """Compiles the large programs on a microbatch of padding, while the first rollouts are made."""
    shape = (spec.learner.packing.rows, spec.learner.packing.tokens)
    tokens = shard_batch(TokenBatch(*(np.zeros(shape, np.int32) for _ in range(4))), mesh)
    zeros = np.zeros(shape, np.float32)
    with_reference = zeros if spec.algorithm.kl.coef else None
    inputs = shard_batch(LossInputs(zeros, zeros, zeros, zeros, with_reference), mesh)
    total = programs.accumulate(state.params, programs.zeros(), tokens, inputs)
    jax.block_until_ready((total, programs.score(published, tokens)))


def _split(
    groups: Sequence[list[TrainingRollout]], parts: int
) -> list[list[list[TrainingRollout]]]:
    """Contiguous shares, as equal as can be; an incomplete step may have fewer than `parts`."""
    bounds = [round(i * len(groups) / parts) for i in range(parts + 1)]
    shares = (list(groups[a:b]) for a, b in pairwise(bounds))
    return [share for share in shares if share]


def _share(
    spec: RunSpec,
    mesh: Mesh,
    programs: Programs,
    published: Any,
    reference: Any | None,
    groups: Sequence[list[TrainingRollout]],
) -> _Share:
    rollouts = [rollout for group in groups for rollout in group]
    packed = pack(
        [Sample(rollout.prompt_tokens, rollout.output_tokens) for rollout in rollouts],
        tokens=spec.learner.packing.tokens,
        rows=spec.learner.packing.rows,
    )
    batches = [shard_batch(packed.token_batch(i), mesh) for i in range(packed.microbatches)]
    if spec.algorithm.old_logprobs == "sampler":
        old = list(packed.scatter([rollout.mu for rollout in rollouts]))
    else:
        old = jax.device_get([programs.score(published, tokens) for tokens in batches])
    scores = None
    if reference is not None:
        scores = jax.device_get([programs.score(reference, tokens) for tokens in batches])
    return _Share(rollouts, packed, old, scores)


def _microbatches(
    spec: RunSpec, mesh: Mesh, share: _Share
) -> Iterator[tuple[TokenBatch, LossInputs]]:
    """Put on the mesh one by one, while the one before is computed."""
    lengths = [len(rollout.output_tokens) for rollout in share.rollouts]
    weights = share.packed.scatter(
        token_weights(
            lengths,
            spec.algorithm.loss_normalizer,
            max_new_tokens=max(pool.max_new_tokens for pool in spec.samplers),
        )
    )
    advantages = share.packed.scatter([rollout.advantage for rollout in share.rollouts])
    mu = share.packed.scatter([rollout.mu for rollout in share.rollouts])
    for i in range(share.packed.microbatches):
        on = weights[i] > 0  # scores say something at every position, the loss wants outputs only
        inputs = LossInputs(
            weights=weights[i],
            advantages=advantages[i],
            old_logprobs=np.where(on, share.old[i], 0.0),
            sampler_logprobs=mu[i],
            ref_logprobs=None if share.reference is None else np.where(on, share.reference[i], 0.0),
        )
        yield shard_batch(share.packed.token_batch(i), mesh), shard_batch(inputs, mesh)
