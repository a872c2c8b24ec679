"""One rollout step on the mesh: rollouts in, updated state and the step's numbers out.

All programs are dispatched without looking at what they computed, so that the devices never wait
for the host between updates; the host looks once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from learner_jax.batch import Batch, TrainingRollout
from learner_jax.loss import token_weights
from learner_jax.loss_metrics import LossMetrics
from learner_jax.packing import LossInputs, Packed, Sample, TokenBatch, pack
from learner_jax.sharding import shard_batch
from learner_jax.step import Programs, TrainState, Update, microbatch_bound
from runspec.core.process import RunStopped
from runspec.core.spec.schema import RunSpec

NAMED = 8
"""Rollouts that a message names; the rest are counted."""


@dataclass(frozen=True)
class RolloutName:
    """Where a person finds a rollout again."""

    submission: str
    """Digest of its submission."""
    group: int
    sample: int

    def __str__(self) -> str:
        return f"{self.submission[:16]} group {self.group} sample {self.sample}"


@dataclass(frozen=True)
class SkippedUpdate:
    """An update that was not made."""

    update: int
    """Number of the update in the step, from 0."""
    rollouts: tuple[RolloutName | str, ...]
    """Those with a number that is not finite, or rows of documents with one; all of the update
    where no number tells."""
    identified: bool
    """Whether their numbers identify them."""

    def __str__(self) -> str:
        names = "; ".join(str(name) for name in self.rollouts[:NAMED])
        more = f" and {len(self.rollouts) - NAMED} more" if len(self.rollouts) > NAMED else ""
        which = (
            "numbers that are not finite in" if self.identified else "finite log-probs, in it were"
        )
        return f"update {self.update} skipped, loss or gradient not finite: {which} {names}{more}"


def skipped_update(
    update: int, names: Sequence[RolloutName], packed: Packed, arrays: Sequence[jax.Array]
) -> SkippedUpdate:
    """Looks for the rollouts that made an update not finite.

    Attention does not cross samples, so a rollout spoils only its own log-probs.

    Args:
        update: its number in the step.
        names: of the rollouts, in the order of the samples in `packed`.
        packed: the update's rows.
        arrays: per-token values, float32 [M, rows, tokens]; where they may be sharded over
            processes, all of them call this.
    """
    finite = np.ones(packed.batch.tokens.shape, bool)
    for array in arrays:
        finite &= np.isfinite(multihost_utils.process_allgather(array, tiled=True))
    bad = [name for name, ok in zip(names, packed.gather(finite), strict=True) if not ok.all()]
    return SkippedUpdate(update, tuple(bad or names), identified=bool(bad))


@dataclass(frozen=True)
class StepResult:
    """Result of a rollout step."""

    state: TrainState
    numbers: dict[str, float]
    """`LossMetrics.means` over the updates that were made (not finite where none was),
    `grad_norm`, their mean before clipping; of all of them `nonfinite_tokens` and
    `skipped_updates`."""
    skipped: tuple[SkippedUpdate, ...]
    tokens: int
    """Prompt and output tokens of the rollouts."""
    positions: int
    """Positions of the packed rows that were trained, padding included."""
    score_s: float
    """Seconds of packing, and of the log-probs of pi_old and of the reference policy."""
    update_s: float
    """Seconds of the updates: loss, gradients, optimizer."""


@dataclass(frozen=True)
class _Share:
    """The rollouts of one optimizer update, packed and on the mesh."""

    names: Sequence[RolloutName]
    packed: Packed
    tokens: TokenBatch
    inputs: LossInputs
    """Inputs of the loss; log-probs are from before the first update."""


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
    # All of pi_old before the first update: that is what makes it the version's.
    shares = [
        _share(spec, mesh, programs, published, reference, rollouts)
        for rollouts in _split(batch, spec.grpo.updates_per_step)
    ]
    jax.block_until_ready([share.inputs for share in shares])
    scored = time.perf_counter()
    batches = [(share.tokens, share.inputs, share.packed.microbatches) for share in shares]
    state, outcomes, logprobs = make_updates(programs, state, batches, base)
    skipped = tuple(
        skipped_update(number, share.names, share.packed, [current, *jax.tree.leaves(share.inputs)])
        for number, (share, current, (_, update)) in enumerate(
            zip(shares, logprobs, outcomes, strict=True)
        )
        if update.skipped
    )
    refuse_skipping(spec, f"step {batch.manifest.step}", outcomes, skipped)
    return StepResult(
        state,
        step_numbers(outcomes, LossMetrics.zeros(), ("loss", "policy_loss")),
        skipped,
        tokens=sum(len(r.prompt_tokens) + len(r.output_tokens) for r in batch.rollouts),
        positions=sum(s.packed.microbatches * s.packed.batch.tokens[0].size for s in shares),
        score_s=scored - begun,
        update_s=time.perf_counter() - scored,
    )


def make_updates(
    programs: Programs,
    state: TrainState,
    batches: Iterable[tuple[TokenBatch, Any, int]],
    base: Any | None,
) -> tuple[TrainState, list[tuple[Any, Update]], list[jax.Array]]:
    """Make an optimizer update of each batch.

    Args:
        programs: of the run.
        state: used up.
        batches: microbatches on the mesh, their loss inputs, and how many of them are real.
        base: the frozen weights under adapters; None where the weights are trained.

    Returns:
        the new state; metrics and outcome of each update, on the host; and the log-probs of its
        targets before it, float32 [M, rows, tokens] on the mesh.
    """
    logprobs: list[jax.Array] = []
    outcomes: list[tuple[Any, Update]] = []
    for tokens, inputs, count in batches:
        total = programs.accumulate(state.params, tokens, inputs, count, base)
        state, update = programs.apply(state, total)
        logprobs.append(total.logprobs)
        outcomes.append((total.metrics, update))
        del total  # or its gradient would lie beside the next one
    return state, jax.device_get(outcomes), logprobs


def refuse_skipping(
    spec: RunSpec,
    what: str,
    outcomes: Sequence[tuple[Any, Update]],
    skipped: Sequence[SkippedUpdate],
) -> None:
    """Raise RunStopped where more than `optimizer.max_skipped` updates in a row were not finite."""
    in_a_row = max(int(update.skipped) for _, update in outcomes)
    if in_a_row > spec.optimizer.max_skipped:
        raise RunStopped(
            f"{what}: {in_a_row} updates in a row were not finite; "
            + "; ".join(str(each) for each in skipped),
            place="optimizer.max_skipped",
            remedy="lower optimizer.lr or clip_norm; the newest full state is from before this",
        )


def compile_ahead(
    mesh: Mesh,
    programs: Programs,
    state: TrainState,
    scored: Any | None,
    base: Any | None = None,
) -> None:
    """Compiles the large programs, on no microbatch, while the first rollouts are made.

    Args:
        mesh, programs, state: of the run.
        scored: parameters whose log-probs the run needs; None where it needs none.
    """
    tokens, inputs = shard_batch(
        jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), programs.abstract_batch), mesh
    )
    total = jax.block_until_ready(programs.accumulate(state.params, tokens, inputs, 0, base))
    # Into the compile cache alone: a call would use up the state.
    programs.apply.lower(state, total).compile()  # type: ignore[attr-defined]
    if scored is not None:
        jax.block_until_ready(programs.score(scored, tokens, 0))


def _split(batch: Batch, parts: int) -> list[list[tuple[RolloutName, TrainingRollout]]]:
    """Rollouts of contiguous shares of the groups, as equal as can be, none empty: an incomplete
    step may have fewer than `parts`."""
    groups = [
        [(RolloutName(named.submission, named.group, i), each) for i, each in enumerate(rollouts)]
        for named, rollouts in zip(batch.named, batch.groups, strict=True)
    ]
    bounds = [round(i * len(groups) / parts) for i in range(parts + 1)]
    shares = ([each for group in groups[a:b] for each in group] for a, b in pairwise(bounds))
    return [share for share in shares if share]


def _share(
    spec: RunSpec,
    mesh: Mesh,
    programs: Programs,
    published: Any,
    reference: Any | None,
    named: Sequence[tuple[RolloutName, TrainingRollout]],
) -> _Share:
    names, rollouts = zip(*named, strict=True)
    packed = pack(
        [Sample(rollout.prompt_tokens, rollout.output_tokens) for rollout in rollouts],
        tokens=spec.learner.packing.tokens,
        rows=spec.learner.packing.rows,
        shards=mesh.shape["data"] * mesh.shape["fsdp"],
        microbatches=microbatch_bound(spec),
    )
    weights = token_weights(
        [len(rollout.output_tokens) for rollout in rollouts],
        spec.grpo.loss_normalizer,
        max_new_tokens=max(pool.max_new_tokens for pool in spec.samplers),
    )
    scattered = [
        packed.scatter(values)
        for values in (weights, [r.advantage for r in rollouts], [r.mu for r in rollouts])
    ]
    tokens, (on_mesh, advantages, mu) = shard_batch((packed.batch, scattered), mesh)
    recompute = spec.grpo.old_logprobs == "recompute"
    inputs = LossInputs(
        weights=on_mesh,
        advantages=advantages,
        old_logprobs=programs.score(published, tokens, packed.microbatches) if recompute else mu,
        sampler_logprobs=mu,
        ref_logprobs=(
            None if reference is None else programs.score(reference, tokens, packed.microbatches)
        ),
    )
    return _Share(names, packed, tokens, inputs)


def step_numbers(
    outcomes: Sequence[tuple[Any, Update]], zeros: Any, summed: Sequence[str]
) -> dict[str, float]:
    """Return the numbers of a step.

    Args:
        outcomes: metrics and outcome of each update.
        zeros: metrics of nothing.
        summed: numbers that the metrics add up over the updates; their mean is returned.
    """
    made = [(metrics, update) for metrics, update in outcomes if not update.skipped]
    numbers: dict[str, float] = reduce(lambda a, b: a.merge(b), (m for m, _ in made), zeros).means()
    for name in summed:
        numbers[name] /= max(len(made), 1)
    numbers["grad_norm"] = sum(float(update.grad_norm) for _, update in made) / max(len(made), 1)
    if not made:
        numbers = dict.fromkeys(numbers, float("nan"))
    return {
        **numbers,
        "nonfinite_tokens": float(sum(int(metrics.nonfinite) for metrics, _ in outcomes)),
        "skipped_updates": float(len(outcomes) - len(made)),
    }
