"""One step on the mesh: rollouts or rows of documents in, updated state and its numbers out.

All programs are dispatched without looking at what they computed, so that the devices never wait
for the host between updates; the host looks once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from learner_jax.batch import Batch
from learner_jax.corpus.packed import CorpusRows
from learner_jax.loss import token_weights
from learner_jax.packing import LossInputs, Sample, TokenBatch
from learner_jax.sharding import shard_batch
from learner_jax.shared_prompts import pack_samples
from learner_jax.step import Programs, TrainState, Update, microbatch_bound
from runspec.core.errors import UserError
from runspec.core.process import RunStopped
from runspec.core.schema import RunSpec

NAMED = 8
"""Rollouts that a message names; the rest are counted."""


@dataclass(frozen=True)
class SkippedUpdate:
    """An update that was not made."""

    update: int
    """Number of the update in the step, from 0."""
    names: tuple[str, ...]
    """Names of the rollouts, or rows of documents, with a number that is not finite; of all in the
    update where no number tells."""
    identified: bool
    """Whether their numbers identify them."""

    def __str__(self) -> str:
        names = "; ".join(self.names[:NAMED])
        more = f" and {len(self.names) - NAMED} more" if len(self.names) > NAMED else ""
        which = (
            "numbers that are not finite in" if self.identified else "finite log-probs, in it were"
        )
        return f"update {self.update} skipped, loss or gradient not finite: {which} {names}{more}"


@dataclass(frozen=True)
class StepResult:
    """Result of a step."""

    state: TrainState
    numbers: dict[str, float]
    """`means` of the loss metrics over the updates that were made (not finite where none was),
    `grad_norm`, their mean before clipping; of all of them `nonfinite_tokens` and
    `skipped_updates`."""
    skipped: tuple[SkippedUpdate, ...]
    tokens: int
    """Prompt and output tokens of the rollouts, or tokens of the documents."""
    padding_share: float
    """Of the positions that were computed."""
    update_s: float
    """Seconds of the updates: loss, gradients, optimizer."""
    score_s: float = 0.0
    """Seconds of packing rollouts, and of the log-probs of pi_old and of the reference policy."""


@dataclass(frozen=True)
class Share:
    """What one optimizer update trains, on the mesh."""

    tokens: TokenBatch
    inputs: Any
    """Inputs of the loss; log-probs are from before the first update."""
    microbatches: int
    """Those that train a token; the rest of M is padding."""
    names: Sequence[str]
    """Names of the rollouts, or of the rows of documents, for messages."""
    by_name: Callable[[np.ndarray], Sequence[np.ndarray]]
    """Values of each name, from values [M, rows, tokens]."""


def train_step(
    spec: RunSpec,
    mesh: Mesh,
    programs: Programs,
    state: TrainState,
    *,
    published: Any | None,
    reference: Any | None,
    batch: Batch,
    base: Any | None = None,
) -> StepResult:
    """Makes `updates_per_step` optimizer updates, each from its contiguous share of the groups.

    Args:
        spec, mesh, programs: of the run.
        state: of the version being trained; used up.
        published: that version's bits, under which pi_old is recomputed; None where it is mu.
        reference: version 0's bits; None where `kl.coef` is 0.
        batch: in training order.
        base: the frozen weights under adapters; None where the weights are trained.

    Raises:
        RunStopped: more than `optimizer.max_skipped` updates in a row were not finite.
    """
    begun = time.perf_counter()
    groups = [
        [(f"{named.submission[:16]} group {named.group} sample {i}", r) for i, r in enumerate(own)]
        for named, own in zip(batch.named, batch.groups, strict=True)
    ]
    parts = spec.grpo.updates_per_step
    bounds = [round(i * len(groups) / parts) for i in range(parts + 1)]
    # All of pi_old before the first update: that is what makes it the version's.
    shares, used, positions = [], 0, 0
    for start, stop in pairwise(bounds):
        if start == stop:  # an incomplete step may have fewer groups than parts
            continue
        names, rollouts = zip(
            *(each for group in groups[start:stop] for each in group), strict=True
        )
        samples = [Sample(r.prompt_tokens, r.output_tokens, r.own) for r in rollouts]
        packed = pack_samples(samples, spec, mesh, microbatch_bound(spec))
        used += packed.used
        positions += packed.microbatches * packed.batch.tokens[0].size
        weights = token_weights(
            [rollout.length for rollout in rollouts],
            spec.grpo.loss_normalizer,
            max_new_tokens=max(pool.max_new_tokens for pool in spec.samplers),
        )
        scattered = [
            packed.scatter(values)
            for values in (weights, [r.advantage for r in rollouts], [r.mu for r in rollouts])
        ]
        tokens, (on_mesh, advantages, mu) = shard_batch((packed.batch, scattered), mesh)
        recompute, count = spec.grpo.old_logprobs == "recompute", packed.microbatches
        old = programs.score(published, tokens, count) if recompute else mu
        ref = None if reference is None else programs.score(reference, tokens, count)
        inputs = LossInputs(on_mesh, advantages, old, mu, ref)
        shares.append(Share(tokens, inputs, count, names, packed.gather))
    jax.block_until_ready([share.inputs for share in shares])
    scored = time.perf_counter()
    return make_updates(
        *(spec, f"step {batch.manifest.step}", programs, state, shares, base),
        tokens=sum(len(r.prompt_tokens) + len(r.output_tokens) for r in batch.rollouts),
        padding_share=1.0 - used / positions,
        begun=scored,
        score_s=scored - begun,
    )


def make_updates(
    spec: RunSpec,
    what: str,
    programs: Programs,
    state: TrainState,
    shares: Sequence[Share],
    base: Any | None,
    *,
    tokens: int,
    padding_share: float,
    begun: float,
    score_s: float = 0.0,
) -> StepResult:
    """Make an optimizer update of each share.

    Attention does not cross samples, so a rollout or a document spoils only its own log-probs:
    where an update was not finite, they tell which it was.

    Args:
        spec, programs: of the run.
        what: names the step in messages.
        state: used up.
        shares: in training order.
        base: the frozen weights under adapters; None where the weights are trained.
        tokens, padding_share, score_s: see `StepResult`.
        begun: when the updates began, by `time.perf_counter`.

    Raises:
        RunStopped: more than `optimizer.max_skipped` updates in a row were not finite.
    """
    logprobs: list[jax.Array] = []
    outcomes: list[tuple[Any, Update]] = []
    for share in shares:
        total = programs.accumulate(
            state.params, share.tokens, share.inputs, share.microbatches, base
        )
        state, update = programs.apply(state, total)
        logprobs.append(total.logprobs)
        outcomes.append((total.metrics, update))
        del total  # or its gradient would lie beside the next one
    outcomes = jax.device_get(outcomes)
    skipped = []
    for number, (share, current) in enumerate(zip(shares, logprobs, strict=True)):
        if not outcomes[number][1].skipped:
            continue
        finite = np.ones(current.shape, bool)
        for array in (current, *jax.tree.leaves(share.inputs)):
            finite &= np.isfinite(multihost_utils.process_allgather(array, tiled=True))
        whole = zip(share.names, share.by_name(finite), strict=True)
        bad = [name for name, values in whole if not values.all()]
        skipped.append(SkippedUpdate(number, tuple(bad or share.names), identified=bool(bad)))
    in_a_row = max(int(update.skipped) for _, update in outcomes)
    if in_a_row > spec.optimizer.max_skipped:
        raise RunStopped(
            f"{what}: {in_a_row} updates in a row were not finite; " + "; ".join(map(str, skipped)),
            place="optimizer.max_skipped",
            remedy="lower optimizer.lr or clip_norm; the newest full state is from before this",
        )
    numbers, update_s = step_numbers(outcomes), time.perf_counter() - begun
    return StepResult(state, numbers, tuple(skipped), tokens, padding_share, update_s, score_s)


def step_numbers(outcomes: Sequence[tuple[Any, Update]]) -> dict[str, float]:
    """Return the numbers of a step, from metrics and outcome of each of its updates."""
    made = [(metrics, update) for metrics, update in outcomes if not update.skipped]
    zeros = type(outcomes[0][0]).zeros()
    numbers: dict[str, float] = reduce(lambda a, b: a.merge(b), (m for m, _ in made), zeros).means()
    for name in ("loss", "policy_loss"):  # which the metrics add up over the updates
        if name in numbers:
            numbers[name] /= max(len(made), 1)
    numbers["grad_norm"] = sum(float(update.grad_norm) for _, update in made) / max(len(made), 1)
    if not made:
        numbers = dict.fromkeys(numbers, float("nan"))
    return {
        **numbers,
        "nonfinite_tokens": float(sum(int(metrics.nonfinite) for metrics, _ in outcomes)),
        "skipped_updates": float(len(outcomes) - len(made)),
    }


def supervised_step(
    spec: RunSpec,
    mesh: Mesh,
    programs: Programs,
    state: TrainState,
    rows: CorpusRows,
    *,
    base: Any | None = None,
) -> StepResult:
    """Makes `updates_per_step` optimizer updates, each from its contiguous share of the rows.

    Args:
        spec, mesh, programs: of the run.
        state: of the version being trained; used up.
        rows: int32 [R, tokens], R = updates_per_step * tokens_per_update / packing.tokens.
        base: the frozen weights under adapters; None where the weights are trained.

    Raises:
        RunStopped: more than `optimizer.max_skipped` updates in a row were not finite.
        UserError: the rows of an update train no token.
    """
    begun = time.perf_counter()
    updates, packing = spec.algorithm.updates_per_step, spec.learner.packing
    shape = (updates, microbatch_bound(spec), packing.rows, packing.tokens)
    batch = jax.tree.map(lambda x: x.reshape(shape), rows.batch)
    names = [f"row {number} of the update" for number in range(shape[1] * shape[2])]
    shares = []
    for update, weights in enumerate(rows.weights.reshape(shape)):
        total = float(weights.sum(dtype=np.float64))
        if total == 0.0:
            raise UserError(
                "the rows of an update train no token",
                place="data.sources",
                remedy="see that the conversations have an assistant's part",
            )
        own = (weights / total).astype(weights.dtype)
        # The last microbatches of an update may train no token: they are not computed.
        real = int(np.flatnonzero(own.any(axis=(1, 2)))[-1]) + 1
        tokens = jax.tree.map(lambda x, at=update: x[at], batch)
        on_mesh = shard_batch((tokens, LossInputs(own)), mesh)
        shares.append(
            Share(*on_mesh, real, names, lambda values: [*values.reshape(-1, packing.tokens)])
        )
    real = int((rows.batch.segment_ids > 0).sum())
    return make_updates(
        *(spec, "a step", programs, state, shares, base),
        tokens=real,
        padding_share=1.0 - real / rows.weights.size,
        begun=begun,
    )


def held_out_loss(
    spec: RunSpec, mesh: Mesh, programs: Programs, weights: Any, rows: CorpusRows
) -> float:
    """Sum of -log p over the trained tokens of rows, in nats, whatever their weight.

    Args:
        spec, mesh, programs: of the run.
        weights: parameters in `broadcast.dtype`, as they are published.
        rows: int32 [R, tokens], any number of them.
    """
    scores = score_rows(spec, mesh, programs, weights, rows.batch)
    return -float(scores[rows.weights > 0].sum(dtype=np.float64))


def score_rows(
    spec: RunSpec, mesh: Mesh, programs: Programs, weights: Any, batch: TokenBatch
) -> np.ndarray:
    """Log-probs of the targets of rows, float32 [R, tokens]; 0 where no target is.

    Args:
        spec, mesh, programs: of the run.
        weights: parameters.
        batch: numpy int32 [R, tokens], any number of rows.
    """
    packing, bound = spec.learner.packing, microbatch_bound(spec)
    at_once, count = bound * packing.rows, len(batch.tokens)
    missing = -count % at_once
    filled = TokenBatch(
        *(
            np.pad(x, ((0, missing), (0, 0)), constant_values=fill)
            for x, fill in zip(jax.tree.leaves(batch), (0, -1, 0, 0), strict=True)
        )
    )
    cut = jax.tree.map(lambda x: x.reshape(-1, bound, packing.rows, packing.tokens), filled)
    found = []
    for part in range(len(cut.tokens)):
        real = min(bound, -(-(count - part * at_once) // packing.rows))
        on_mesh = shard_batch(jax.tree.map(lambda x, at=part: x[at], cut), mesh)
        scores = programs.score(weights, on_mesh, real)
        found.append(multihost_utils.process_allgather(scores, tiled=True))
    return np.concatenate(found).reshape(-1, packing.tokens)[:count]
